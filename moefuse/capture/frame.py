"""One attempt of Dynamo at one frame, seen instruction by instruction: where to assume, and when an assumption's scope ends."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import nn

from moefuse import _torch_private
from moefuse._dynamo import control, creation_clock, relations, values
from moefuse.capture import branches, counts, dummies, functions, modules
from moefuse.capture.appends import Appends
from moefuse.capture.assumptions import Assumption, Place, Undischarged
from moefuse.capture.bytecode import GENERATOR, Code
from moefuse.capture.loops import Loops
from moefuse.capture.scopes import OTHER_WAY, Scopes
from moefuse.errors import CODES, first_line
from moefuse.explaining import module_names, quietly
from moefuse.module_names import Matching, ModuleNames
from moefuse.report import FusionReport, Skipped
from moefuse.stops import Stop, code_at

log = logging.getLogger("moefuse.capture")

_LISTED = (
    "it decides what a list has in it; ask in the loop over experts instead, `if not (ids == e).any(): continue`, "
    "or loop over `torch.unique(ids)`"
)
_MAKES_GENERATOR = frozenset(("COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"))
"""What the frame of a generator does when it is called, and not when it gives an item."""


@dataclass
class Ledger:
    """What all attempts at one frame have in common.

    Attributes:
        off: trace this frame as if moefuse had no capture. One assumption that does not hold is enough: where Dynamo has to break the graph
            anyway, it shall break it as it always does, and the frames behind the break are captured by themselves.
        unroll: trace every row of a loop; representatives were tried and did not do.
        numbers: read numbers out of tensors, where moefuse made that traceable; not once a compiler could not take such a graph.
        collects: trace bodies of checkpoints that write to what the call has made; not once that was there when a graph ended.
        parametrizes: trace parametrisations that the call registers and removes; not once one of them was more than that.
        broken: the graph breaks somewhere, in an attempt that traced sizes that depend on data.
        met: what a graph that was given up is given, because it writes to what its experts read: calls whose inputs are apart have another.
        unrelated: why no guard can tell which inputs of the graph lie in one memory; empty while nothing speaks against it.
        erred: the program raises in this call, or would if it came that far.
        seen: names of what the graphs of attempts that were given up have read.
        refusals: why, for the report of the next attempt.
        stops: the breaks of the graph in attempts that were given up.
        notes: what else the report has to say.
    """

    off: bool = False
    unroll: bool = False
    numbers: bool = True
    collects: bool = True
    parametrizes: bool = True
    broken: bool = False
    met: Sequence[relations.Input] = ()
    unrelated: str = ""
    erred: bool = False
    seen: set[str] = field(default_factory=set)
    refusals: list[Skipped] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Frame:
    """The observer of one attempt. Dynamo calls the methods that :class:`moefuse._dynamo.hooks.Observer` names.

    Args:
        ledger: what is shared with other attempts at the same frame.
        log: Dynamo's record of the frame, which a restart clears.
        flags: whether moefuse, and not the user, has made sizes that depend on data traceable here.
        skipped: called with a report when the frame ends without a call of the backend.
        exclude: the user's pattern of names of modules to leave.
        insists: the user wants an error where experts are not fused.
    """

    def __init__(
        self,
        ledger: Ledger,
        log: Any,
        *,
        flags: bool,
        skipped: Callable[[FusionReport], object],
        exclude: str | None = None,
        insists: bool = False,
    ) -> None:
        self.ledger, self.log, self.flags, self._skipped, self.exclude, self.insists = ledger, log, flags, skipped, exclude, insists
        self.assumptions: list[Assumption] = []
        self.settled: set[Assumption] = set()
        self.scopes = Scopes(self)
        self.loops = Loops(self)
        self.appends = Appends(self)
        self.numpy = False
        self.elements: list[counts.Elements] = []
        self.has_graph = False
        self.fused = False  # whether experts are, in the graph of this attempt
        self.related: Sequence[relations.Input] = []  # what the graph is given, where it writes to some of that
        self.crossed = False  # whether it does so between experts that are one op now
        self.registering = False
        self.traced: set[types.CodeType] = set()
        self._code: dict[int, tuple[Any, Code]] = {}
        self._doubt: Skipped | None = None

    @property
    def active(self) -> bool:
        """Whether anything may be assumed in this attempt."""
        return not self.ledger.off

    @property
    def scalars(self) -> bool:
        """Whether Dynamo shall trace sizes and numbers that depend on data."""
        return self.active

    @property
    def numbers_traced(self) -> bool:
        """Whether Dynamo shall trace the reading of a number as an operation, instead of breaking the graph there."""
        return self.scalars and (self.ledger.numbers or not self.flags)

    @property
    def collects(self) -> bool:
        """Whether Dynamo shall trace what the bodies of checkpoints write to outside of them."""
        return self.ledger.collects

    @property
    def parametrizes(self) -> bool:
        """Whether Dynamo shall trace parametrisations without registering them."""
        return self.ledger.parametrizes

    @property
    def gave_up(self) -> bool:
        """Whether this frame has experts that could not be fused as they are; those of another module may be."""
        return bool(self.ledger.refusals)

    @property
    def erred(self) -> bool:
        """Whether the program raises in this call, so that nothing is known of the frame in others."""
        return self.ledger.erred

    @property
    def seen(self) -> set[str]:
        """Names of what the graphs of attempts that were given up have read."""
        return self.ledger.seen

    @property
    def met(self) -> Sequence[relations.Input]:
        """What a graph that was given up is given, because it writes to what its experts read."""
        return self.ledger.met

    @property
    def apart(self) -> Callable[[nn.Module], Hashable] | None:
        """What tells modules apart that may not share compiled code; None if nothing does."""
        if self.exclude is None:
            return None
        return Matching(ModuleNames(_torch_private.traced()), self.exclude)

    def joins(self, environment: Any) -> bool:
        """Whether this attempt's graph is one only because of capture: it assumed something, or traced sizes that depend on data."""
        return self.active and (bool(self.assumptions) or (self.flags and control.has_unbacked(environment)))

    # --- what Dynamo tells ---

    def before(self, tx: Any) -> None:
        """An instruction of ``tx`` is about to run."""
        if tx.instruction_pointer is None:
            return
        if self._doubt is not None:  # Dynamo has gone on: an assertion, which it writes into the graph
            self.ledger.refusals.remove(self._doubt)
            self._doubt = None
        if tx.instructions[tx.instruction_pointer].opname == "IS_OP":
            self._asks_for_identity(tx)
        if not self.active:
            return
        self.traced.add(tx.f_code)
        try:
            self._before(tx, tx.instruction_pointer)
        except Exception as error:
            if control.is_restart(error) or control.is_tracing(error):
                raise
            log.exception("moefuse failed while it looked at %s", self.location(tx))
            self.retreat([], why=first_line(error))

    def _before(self, tx: Any, at: int) -> None:
        if self.scopes.open:
            self.scopes.leave(tx, at)
            at = tx.instruction_pointer
        self.loops.iterate(tx)
        self.appends.before(tx, at)
        loop = next((s.loop for s in self.scopes.open if s.loop is not None and s.loop.lists), None)
        if loop is not None and modules.tells_apart(tx, loop, tx.instructions[at]):
            self.unroll("the body may tell one module from another")
        if self.numpy and counts.asks_for_type(tx, tx.instructions[at]):
            self.retreat([], why="it asks for the type of a number out of NumPy")
        name = tx.instructions[at].opname
        if name == "BINARY_SUBSCR":
            self.loops.subscript(tx)
        elif name.startswith("FORMAT_"):
            self.loops.formatted(tx, tx.instructions[at])
        if tx.f_code.co_flags & GENERATOR and name not in _MAKES_GENERATOR:
            self.advanced(tx)
        if name == "GET_ITER":
            self.loops.get_iter(tx, at)
        elif name == "FOR_ITER":
            self.loops.for_iter(tx)
        elif "JUMP" in name and "_IF_" in name:
            branches.jump(self, tx, at)
        elif name == "PUSH_EXC_INFO":
            self.scopes.handler(tx)

    def mutated(self, variable: Any) -> None:
        """An object of the program is about to change."""
        for scope in self.scopes.open:
            if creation_clock.created_inside(variable, scope.clock) or functions.takes(scope, variable):
                continue
            if scope.then is not None or not self.appends.takes(variable, scope.assumption):
                listed = _last(scope.translator) == "LIST_APPEND"
                self.refuse(scope.assumption, _LISTED if listed else "it changes a Python object that was there before")

        if not self.scopes.open:
            self.scopes.changed(variable)

    def advanced(self, iterator: Any, tx: Any = None) -> None:
        """An iterator is about to give its next item, in ``tx``. Not every kind of iterator counts as mutated by that."""
        for scope in self.scopes.open:
            if not creation_clock.iterator_created_inside(iterator, scope.clock):
                again = _last(scope.translator) in ("FOR_ITER", "")
                self.refuse(scope.assumption, OTHER_WAY if again else "it takes an item from an iterator that was there before")

    def compiling(self, environment: Any) -> None:
        """A graph of this frame is about to be compiled."""
        if self.traces_data and control.asserts_floats(environment):
            detail = "the program asserts something of a float that it reads out of a tensor; read it as an integer"
            self.retreat([Undischarged(a, detail) for a in self.assumptions[:1]], why="a float is asserted about")

    def compiled(self, output: Any = None) -> None:
        """A graph of this frame is compiled, or the frame is done (``output``): whatever was assumed must be settled now."""
        stop = None if output is None else _torch_private.graph_break(output)
        self.check_closed(stop)
        left = [Undischarged(a, "nothing has checked it") for a in self.assumptions if a not in self.settled]
        if left:
            self.retreat(left)
        if not self.has_graph and (self.ledger.refusals or self.ledger.notes or stop is not None):
            # Where this attempt breaks there is no graph yet, and so no report that says so, or why the one before was given up.
            stops = [*self.ledger.stops, *([] if stop is None else [stop])]
            self._skipped(self._report(stops=stops))

    def failed(self, error: Exception, environment: Any) -> None:
        """Tracing ended with an error: one that capture may have caused means another attempt without it."""
        if control.is_restart(error):
            self.ledger.broken = self.ledger.broken or (self.traces_data and control.is_break(error) and control.has_unbacked(environment))
            return
        if control.is_backends(error):
            return
        self.ledger.erred = self.ledger.erred or control.is_programs(error)
        if self.active and (self.flags or self.assumptions):
            self.ledger.stops.append(_torch_private.tracing_stop(error))
            self.retreat(
                [Undischarged(s.assumption, f"it cannot be traced: {first_line(error)}") for s in self.scopes.open], why=first_line(error)
            )
        self.report_skipped(error)

    def rows(self, tx: Any, variable: Any) -> Any:
        """``tolist()`` of the rows of a mask, as Python's list, and of what is an index and nothing else; None for any other tensor."""
        found = self.loops.rows(tx, variable)
        found = counts.as_list(self, tx, variable) if found is None else found
        if found is not None or not self._only_an_index(tx, variable):
            return found
        return variable.call_method(tx, "clone", [], {})  # a list does not change with the tensor

    def _only_an_index(self, tx: Any, variable: Any) -> bool:
        """``rows.tolist()`` of unknown length, with which tensors are indexed as with the tensor itself."""
        node = values.tensor_node(variable)
        value = node.meta.get("example_value") if node is not None and self.active else None
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype != torch.int64 or not values.unbacked(value.shape[0]):
            return False
        code, at = self.code_of(tx), tx.instruction_pointer
        following = code.instructions[at]
        return following.opname == "STORE_FAST" and code.only_in_indices(following.argval)

    def numbers(self, tx: Any, variable: Any) -> Any:
        """The elements of a tensor or an array that is unpacked, where they are to be numbers; None to leave it to Dynamo."""
        return counts.numbers(self, tx, variable)

    def read(self, tx: Any, variable: Any) -> Any:
        """A number is read out of a tensor; what Python gets in its place, or None."""
        return self.loops.read(tx, variable)

    def compared(self, tx: Any, variables: list[Any]) -> None:
        """Dynamo decides by ``in`` or ``is`` which of some variables are the same; of those that only the run knows it cannot."""
        if self.active and any(map(values.of_the_run, variables)):
            self.tell(tx, "this question", "it asks for such a number by `in` or `is`; compare with == instead")
            self.retreat([], why="a symbolic number is asked for by `in` or `is`")

    def _asks_for_identity(self, tx: Any) -> None:
        """``is`` of two numbers: to Dynamo a symbolic one is no other. Equal small numbers are one object."""
        if all(map(values.number_like, tx.stack[-2:])):
            self.compared(tx, tx.stack[-2:])
            # Dynamo's own code asks by == as well.
            if not any(map(values.of_the_run, tx.stack[-2:])) and not values.polyfilled(tx.f_code):
                tx.stack[-2:] = map(values.settled, tx.stack[-2:])

    def unroll(self, why: str) -> NoReturn:
        """Start the frame again, with every row traced."""
        self.ledger.unroll = True
        log.debug("tracing this frame again, row by row: %s", why)
        raise control.restart(self.log, "moefuse: representatives do not do")

    def asks_for_rows(self, tx: Any, number: Any) -> None:
        """A branch, at which Dynamo is about to stop, depends on a number: the user is told if that is how many tokens an expert has."""
        from moefuse.passes.prove.concerns import counts_rows

        symbols = values.unbacked(number) if number is not None else set()
        if not symbols or not values.undecided(number) or self._told(tx):
            return
        if any(counts_rows(graph, symbols) for graph in dict.fromkeys((values.graph_of(tx), values.whole_graph_of(tx)))):
            self.tell(tx, "this branch", "it asks how many tokens an expert has")
            self._doubt = self.ledger.refusals[-1]

    def tell(self, tx: Any, what: str, detail: str) -> None:
        """A refusal for the report, where Dynamo is about to stop."""
        if not self._told(tx):
            text = CODES["not-captured"].format(what=what, detail=detail)
            self.ledger.refusals.append(Skipped("not-captured", text, module_names.of_traced(tx.nn_module_stack), self.location(tx)))

    def _told(self, tx: Any) -> bool:
        location = self.location(tx)
        return any(known.location == location for known in self.ledger.refusals)

    # --- giving up ---

    def refuse(self, assumption: Assumption, detail: str) -> NoReturn:
        self.retreat([Undischarged(assumption, detail)])

    def retreat(self, problems: list[Undischarged], skipped: list[Skipped] | None = None, *, why: str = "") -> NoReturn:
        """Start the frame again, without capture.

        Args:
            problems: assumptions that do not hold.
            skipped: refused regions; where there are any they say more than the loop around them.
            why: the reason if there are no problems, for the log.

        Raises:
            Dynamo's restart exception, always.
        """
        ledger = self.ledger
        other = {s.assumption for s in self.scopes.open if s.then is not None}
        problems = [Undischarged(p.assumption, OTHER_WAY) if p.assumption in other else p for p in problems]
        if not ledger.unroll and any(loop.represented for loop in self.loops.made):
            self.unroll("; ".join(p.detail for p in problems) or why)
        ledger.off = True
        ledger.met = self.related if self.crossed and not ledger.unrelated else ()
        for new in skipped or refusals(problems):
            if new not in ledger.refusals:
                ledger.refusals.append(replace(new, given_up=True))
        text = "; ".join(f"{p.assumption.what} at {p.assumption.location}: {p.detail}" for p in problems) or why
        log.debug("tracing this frame again without capture: %s", text)
        raise control.restart(self.log, "moefuse: an assumption about data does not hold")

    def leave_numbers(self, why: str) -> None:
        """Start the frame again, with a break of the graph wherever a number is read. Does nothing where numbers are left already."""
        if not (self.traces_data and self.ledger.numbers):
            return
        self.ledger.numbers = False
        log.debug("tracing this frame again, without reading numbers: %s", why)
        raise control.restart(self.log, "moefuse: the compiler takes no numbers that are read out of tensors")

    def outlived(self) -> NoReturn:
        """Start the frame again: what the body of a checkpoint has written to is still there where the graph ends."""
        self.ledger.collects = False
        raise control.restart(self.log, "moefuse: what a checkpoint has written to outlives the graph")

    def computed(self, tx: Any, nodes: Collection[torch.fx.Node]) -> bool:
        """The value of a parametrised tensor was computed where the program first asks for it; whether that makes no difference."""
        return self.scopes.computed(tx, nodes)

    def registers(self, tx: Any, why: str) -> NoReturn:
        """Start the frame again, and leave parametrisations to torch; ``tx`` is None where no place is known."""
        self.ledger.parametrizes = False
        place = "" if tx is None else f" ({self.location(tx)})"
        self.ledger.notes.append(f"registering a parametrization in a call breaks graphs: {why}{place}")
        raise control.restart(self.log, "moefuse: a parametrisation is more than a value for a while")

    def unrelated(self, why: str) -> NoReturn:
        """Start the frame again: what its graph assumes of inputs that lie in one memory cannot be asked for in each call."""
        self.ledger.unrelated = why
        raise control.restart(self.log, "moefuse: no guard tells which inputs lie in one memory")

    def unsettled(self, stop: Stop | None = None) -> list[Undischarged]:
        """Assumptions whose scope is still open. ``stop``: the break that ends the graph."""
        early = [Undischarged(s.assumption, _left_in(s.assumption, stop)) for s in self.scopes.open]
        early += [Undischarged(a, OTHER_WAY) for a, nodes in self.scopes.dummies if not dummies.gives_no_gradients(nodes)]
        early += [Undischarged(e.length, "not every element is looped over") for e in self.elements if len(e.done) < len(e.nodes)]
        return early or [
            Undischarged(row, _left_in(row, stop))
            for loop in self.loops.made
            if not loop.finished and loop.done != loop.count and (row := self.loops.row(loop))
        ]

    @property
    def traces_data(self) -> bool:
        """Whether sizes that depend on data are in the graph only because of moefuse."""
        return self.active and self.flags

    def check_closed(self, stop: Stop | None = None) -> None:
        """Before anything is done with a graph: no scope is open, and a break without a captured loop is where it always was.

        Args:
            stop: the break that ended the graph, if one did.
        """
        problems = self.unsettled(stop)
        if problems or (self.traces_data and self.ledger.broken and not self.assumptions):
            self.ledger.stops += [] if stop is None else [stop]
            self.retreat(problems, why="the graph breaks, and capture has changed nothing but where")

    def report_skipped(self, error: Exception) -> None:
        """The frame ends here and runs in eager."""
        text = f"{first_line(error)} (this function runs in eager){control.place(error)}"
        stop = _torch_private.tracing_stop(error)
        self._skipped(self._report(graph_breaks=[text], stops=[*self.ledger.stops, stop], followed=self.follows(stop)))

    def follows(self, stop: Stop) -> list[str]:
        """The place of a break that comes of a refusal, or nothing."""
        found: list[str] = quietly(lambda: [stop.place] if self.gave_up and stop.by_data else [], otherwise=[])
        return found

    def _report(self, **found: Any) -> FusionReport:
        ledger = self.ledger
        return FusionReport(skipped=list(ledger.refusals), notes=list(ledger.notes), seen=frozenset(ledger.seen), **found)

    # --- small things ---

    def assume(self, tx: Any, assumption: Assumption) -> None:
        """Put an assumption on record: no graph of this frame is used before it is discharged."""
        self.scopes.only_outside_of_dummies()
        assumption.graph = values.graph_of(tx)
        self.assumptions.append(assumption)

    def code_of(self, tx: Any) -> Code:
        known = self._code.get(id(tx.instructions))
        if known is None:
            known = (tx.instructions, Code(tx.instructions))
            self._code[id(tx.instructions)] = known
        return known[1]

    def place(self, tx: Any) -> Place:
        return Place(tx.f_code, tx.instructions[tx.instruction_pointer].offset)

    def location(self, tx: Any) -> str:
        tx = values.users(tx)
        return f"{tx.f_code.co_filename}:{tx.lineno if tx.lineno > 0 else tx.f_code.co_firstlineno}"


def _left_in(assumption: Assumption, stop: Stop | None) -> str:
    """Why a scope is open where a graph ends: the statement that opened it, and the one at which the graph breaks."""
    opened = code_at(assumption.location)
    inside = f"it is left early (`{opened}`)" if opened else "it is left early, or the graph breaks in it"
    if stop is None or not stop.stack:
        return inside
    breaks = code_at(f"{stop.stack[-1][0]}:{stop.stack[-1][1]}")
    return f"in what `{opened}` decides about the graph breaks, at `{breaks}` ({stop.text})" if opened and breaks else inside


def _last(tx: Any) -> str:
    """The instruction that ``tx`` runs; empty where its function has returned."""
    at = tx.instruction_pointer
    return "" if at is None else str(tx.instructions[at - 1].opname)


def concerns_experts(assumption: Assumption) -> bool:
    """Whether what was assumed about has to do with expert ids at all; other code that depends on data is nothing to report."""
    from moefuse.passes.prove.concerns import concerns_routing

    try:
        return concerns_routing(assumption)
    except Exception:  # a question about a graph that is half written; nothing but a line of the report hangs on it
        return True


def refusals(problems: list[Undischarged]) -> list[Skipped]:
    """What the user reads about assumptions that do not hold, one line for each statement."""
    out: dict[str, Skipped] = {}
    for problem in problems:
        assumption = problem.assumption
        if assumption.location not in out and concerns_experts(assumption):
            text = CODES["not-captured"].format(what=assumption.what, detail=problem.detail)
            out[assumption.location] = Skipped("not-captured", text, _module(assumption), assumption.location)
    return list(out.values())


def _module(assumption: Assumption) -> str:
    """The module that computes what was assumed about."""
    nodes = (assumption.subject, *assumption.nodes)
    node = next((node for node in nodes if isinstance(node, torch.fx.Node)), None)
    return module_names.of_traced(node.meta.get("nn_module_stack")) if node is not None else ""


__all__ = ["Frame", "Ledger", "refusals"]
