"""One attempt of Dynamo at one frame, seen instruction by instruction: where to assume, and when an assumption's scope ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.fx import Node

from moefuse import _dynamo_private as dynamo
from moefuse.capture import guess, modules
from moefuse.capture.assumptions import TAG, Assumption, Kind, Place, Scope, Undischarged
from moefuse.capture.bytecode import Code
from moefuse.errors import CODES
from moefuse.report import FusionReport, Skipped

log = logging.getLogger("moefuse.capture")

MAX_BODIES = 1024
"""Loop bodies that one frame may unroll, at about a tenth of a second each."""

READ_AFTER = "`{name}` is read after it, and has another value if it does not run"

_GENERATOR = 0x20 | 0x80 | 0x200

_MAKES_GENERATOR = frozenset(("COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"))
"""What the frame of a generator does when it is called, and not when it gives an item."""


@dataclass
class Ledger:
    """What all attempts at one frame have in common.

    Attributes:
        off: trace this frame as if moefuse had no capture. One assumption that does not hold is enough: where Dynamo has to break the graph
            anyway, it shall break it as it always does, and the frames behind the break are captured by themselves.
        unroll: trace every row of a loop; representatives were tried and did not do.
        broken: the graph breaks somewhere, in an attempt that traced sizes that depend on data.
        refusals: why, for the report of the next attempt.
    """

    off: bool = False
    unroll: bool = False
    broken: bool = False
    refusals: list[Skipped] = field(default_factory=list)


@dataclass(eq=False)
class _Loop:
    """A ``for`` over the rows of a mask: every row, whether the mask has it or not; or one row for each way through the body.

    ``like`` is the tensor of rows (in the second case only), ``handed`` the rows so far, ``conditions`` what the body asked about them,
    ``lists`` the lists of modules that it selects from: name of the source -> list.
    """

    mask: Node
    count: int
    place: Place
    location: str
    done: int = 0
    like: Any = None
    handed: list[tuple[int, Node]] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    conditions: list[tuple[Node, Node]] = field(default_factory=list)
    finished: bool = False
    lists: dict[str, Any] = field(default_factory=dict)

    @property
    def represented(self) -> bool:
        """Whether one row is traced for each way through the body, instead of every row."""
        return self.like is not None

    def outcomes(self, row: int) -> tuple[bool, ...]:
        """Which ways the conditions met so far take for a row. Raises what ``replay`` raises."""
        value = torch.full(tuple(self.like.shape[1:]), row, dtype=self.like.dtype)
        return tuple(bool(replay(node, start, value)) for node, start in self.conditions)


class Frame:
    """The observer of one attempt. Dynamo calls the methods that :class:`moefuse._dynamo_private.Observer` names.

    Args:
        ledger: what is shared with other attempts at the same frame.
        log: Dynamo's record of the frame, which a restart clears.
        flags: whether moefuse, and not the user, has made sizes that depend on data traceable here.
        skipped: called with a report when the frame ends without a call of the backend.
    """

    def __init__(self, ledger: Ledger, log: Any, *, flags: bool, skipped: Callable[[FusionReport], object]) -> None:
        self.ledger, self.log, self.flags, self._skipped = ledger, log, flags, skipped
        self.assumptions: list[Assumption] = []
        self.settled: set[Assumption] = set()
        self._scopes: list[Scope] = []
        self._loops: dict[int, tuple[Any, _Loop]] = {}
        self._lists: dict[int, tuple[Any, _Loop]] = {}
        self._made: list[_Loop] = []
        self._bodies = 0
        self._handled: list[tuple[Any, Assumption, str]] = []
        self._next: tuple[Any, _Loop, Any] | None = None
        self._code: dict[int, tuple[Any, Code]] = {}

    @property
    def active(self) -> bool:
        """Whether anything may be assumed in this attempt."""
        return not self.ledger.off

    @property
    def scalars(self) -> bool:
        """Whether Dynamo shall trace sizes and numbers that depend on data."""
        return self.active

    # --- what Dynamo tells ---

    def before(self, tx: Any) -> None:
        """An instruction of ``tx`` is about to run."""
        if not self.active or tx.instruction_pointer is None:
            return
        try:
            self._before(tx, tx.instruction_pointer)
        except Exception as error:
            if dynamo.is_restart(error) or dynamo.is_tracing(error):
                raise
            log.exception("moefuse failed while it looked at %s", self._location(tx))
            self.retreat([], why=_first_line(error))

    def _before(self, tx: Any, at: int) -> None:
        if self._scopes:
            self._leave(tx, at)
        if self._next is not None and self._next[0] is tx:
            self._iterate(tx)
        loop = next((s.loop for s in self._scopes if s.loop is not None and s.loop.lists), None)
        if loop is not None and modules.tells_apart(tx, loop, tx.instructions[at]):
            self._unroll("the body may tell one module from another")
        name = tx.instructions[at].opname
        if tx.f_code.co_flags & _GENERATOR and name not in _MAKES_GENERATOR:
            self.advanced(tx)
        if name == "GET_ITER":
            self._get_iter(tx, at)
        elif name == "FOR_ITER":
            self._for_iter(tx)
        elif "JUMP" in name and "_IF_" in name:
            self._jump(tx, at)
        elif name == "PUSH_EXC_INFO":
            self._handler(tx)

    def mutated(self, variable: Any) -> None:
        """An object of the program is about to change."""
        for scope in self._scopes:
            if not dynamo.born_inside(variable, scope.clock):
                self._refuse(scope.assumption, "it changes a Python object that was there before")

    def advanced(self, iterator: Any) -> None:
        """An iterator is about to give its next item. Not every kind of iterator counts as mutated by that."""
        for scope in self._scopes:
            if not dynamo.iterator_born_inside(iterator, scope.clock):
                self._refuse(scope.assumption, "it takes an item from an iterator that was there before")

    def rows(self, tx: Any, variable: Any) -> Any:
        """The rows of a mask as a list of numbers for ``tolist()``, where only a ``for`` will read that list; else None."""
        source = guess.mask_of(dynamo.tensor_node(variable)) if self.active else None
        if source is None or not self._only_for(tx):
            return None
        value = dynamo.tensor_node(variable).meta["example_value"]  # type: ignore[union-attr]
        loop = _Loop(source, guess.length(source), self._place(tx), self._location(tx))
        if value.dim() != 1:
            return None
        made = dynamo.new_list([dynamo.constant(i) for i in range(loop.count)])
        self._lists[id(made)] = (made, loop)
        self._made.append(loop)
        return made

    def compiled(self) -> None:
        """A graph of this frame is compiled, or the frame is done: whatever was assumed must be settled now."""
        self.check_closed()
        left = [Undischarged(a, "nothing has checked it") for a in self.assumptions if a not in self.settled]
        if left:
            self.retreat(left)

    def failed(self, error: Exception, environment: Any) -> None:
        """Tracing ended with an error: one that capture may have caused means another attempt without it."""
        if dynamo.is_restart(error):
            self.ledger.broken = self.ledger.broken or (self.traces_data and dynamo.is_break(error) and dynamo.has_unbacked(environment))
            return
        if dynamo.is_backends(error):
            return
        if self.active and (self.flags or self.assumptions):
            self.retreat(
                [Undischarged(s.assumption, f"it cannot be traced: {_first_line(error)}") for s in self._scopes], why=_first_line(error)
            )
        self.report_skipped(error)

    # --- scopes ---

    def _leave(self, tx: Any, at: int) -> None:
        """Close the scopes that end in front of this instruction."""
        while True:
            ending = next((s for s in reversed(self._scopes) if s.translator is tx and s.join == at), None)
            if ending is None:
                return
            while self._scopes[-1] is not ending:
                self._refuse(self._scopes[-1].assumption, "a function is left in the middle of it")
            self._scopes.pop()
            self._close(tx, ending, at)

    def _open(self, tx: Any, assumption: Assumption, join: int, stack: list[Any], loop: _Loop | None = None) -> None:
        graph = dynamo.graph_of(tx)
        if any(s.translator is tx and s.assumption.place == assumption.place for s in self._scopes):
            self._refuse(assumption, "the program comes back to it before its two ways meet")
        state = dynamo.python_state(tx)
        assumption.graph = graph
        self.assumptions.append(assumption)
        self._scopes.append(
            Scope(
                assumption,
                tx,
                join,
                list(stack),
                dict(tx.symbolic_locals),
                graph,
                next(iter(reversed(graph.nodes)), None),  # type: ignore[arg-type]
                dynamo.now(),
                lambda: dynamo.python_state(tx) == state,
                loop,
            )
        )

    def _close(self, tx: Any, scope: Scope, at: int) -> None:
        """What happened in the scope, and whether Python's state is what it was."""
        assumption = scope.assumption
        if dynamo.graph_of(tx) is not scope.graph or (scope.marker is not None and scope.marker._erased):
            self._refuse(assumption, "Dynamo rewrote the graph in the middle of it")
        for node in reversed(scope.graph.nodes):
            if node is scope.marker:
                break
            if node.op != "placeholder":
                assumption.nodes.add(node)
                node.meta[TAG] = node.meta.get(TAG, 0) + 1
        same_stack = len(tx.stack) == len(scope.stack) and all(
            self._compare(a, b) == "same" for a, b in zip(scope.stack, tx.stack, strict=True)
        )
        if not same_stack or not scope.check():
            self._refuse(assumption, "the program is in another state behind it")
        code = self._code_of(tx)
        for name in sorted(code.live(at) | code.live(at, handlers=True)):
            before, after = scope.locals.get(name), tx.symbolic_locals.get(name)
            verdict = self._compare(before, after)
            if verdict == "same":
                continue
            if name not in code.live(at):
                self._handled.append((tx, assumption, name))
            elif verdict == "differs":
                self._refuse(assumption, READ_AFTER.format(name=name))
            elif verdict == "carried":
                assumption.carried.append((name, dynamo.tensor_node(dynamo.plain(before)), dynamo.tensor_node(dynamo.plain(after))))  # type: ignore[arg-type]

    def _handler(self, tx: Any) -> None:
        """An exception is handled: what only the handlers read is read after all."""
        for owner, assumption, name in self._handled:
            if owner is tx:
                self._refuse(assumption, READ_AFTER.format(name=name))

    def _compare(self, before: Any, after: Any) -> str:
        """``same``, ``carried`` (both are tensors), or ``differs``."""
        if before is after:
            return "same"
        if before is None or after is None:
            return "differs"
        before, after = dynamo.plain(before), dynamo.plain(after)
        if before is after:
            return "same"
        if dynamo.is_constant(before) and dynamo.is_constant(after):
            a, b = before.as_python_constant(), after.as_python_constant()
            return "same" if type(a) is type(b) and a == b else "differs"
        old, new = dynamo.tensor_node(before), dynamo.tensor_node(after)
        if old is not None and new is not None:
            return "same" if old is new else "carried"
        old, new = dynamo.number_node(before), dynamo.number_node(after)
        return "same" if old is not None and old is new else "differs"

    # --- where to assume ---

    def _get_iter(self, tx: Any, at: int) -> None:
        """``for row in mask.nonzero():`` becomes a loop over all rows."""
        listed = self._lists.get(id(tx.stack[-1]))
        if listed is not None:
            self._next = (tx, listed[1], None)
            return
        top = dynamo.realized(tx.stack[-1])
        node = dynamo.tensor_node(top)
        source = guess.mask_of(node)
        place = self._place(tx)
        if node is None or source is None or tx.f_code.co_flags & _GENERATOR:
            return
        value = node.meta["example_value"]
        if not self._code_of(tx).plain_for(at) or value.dim() > 2 or (value.dim() == 2 and value.shape[1] != 1):
            return
        loop = _Loop(source, guess.length(source), place, self._location(tx))
        if not self.ledger.unroll and loop.count > 2:
            loop.like = value
        rows = [self._hand_out(tx, loop, value, i) for i in range(1 if loop.represented else loop.count)]
        self._made.append(loop)
        self._spend(tx, len(rows))
        tx.stack[-1] = dynamo.new_list(rows)
        self._next = (tx, loop, None)

    def _hand_out(self, tx: Any, loop: _Loop, value: Any, row: int) -> Any:
        made = dynamo.row_tensor(tx, [row] if value.dim() == 2 else row, value)
        loop.handed.append((row, dynamo.tensor_node(made)))  # type: ignore[arg-type]
        return made

    def _spend(self, tx: Any, bodies: int) -> None:
        """Unrolling has a price; beyond some point it is not worth it."""
        self._bodies += bodies
        if self._bodies > MAX_BODIES:
            self.retreat([], why=f"more than {MAX_BODIES} loop bodies, at {self._location(tx)}")

    def _for_iter(self, tx: Any) -> None:
        known = self._loops.get(id(tx.stack[-1]))
        if known is not None:
            if known[1].represented and known[1].done == len(known[1].handed):
                self._next_representative(tx, known[1])
            self._next = (tx, known[1], tx.stack[-1])

    def _next_representative(self, tx: Any, loop: _Loop) -> None:
        """Hand out the first row that goes another way than those before, or end the loop."""
        try:
            known = {loop.outcomes(row): row for row, _ in reversed(loop.handed)}
            classes: dict[int | None, list[int]] = {}
            for row in range(loop.count):
                classes.setdefault(known.get(loop.outcomes(row)), []).append(row)
        except Exception:  # whatever the user's condition raises on plain tensors
            self._unroll("a condition on the row cannot be evaluated for other rows")
        following = classes[None][0] if None in classes else modules.twin_wanted(loop, classes)
        if following is not None:
            iterator = dynamo.realized(tx.stack[-1])
            iterator.items = [*iterator.items, self._hand_out(tx, loop, loop.like, following)]
            return
        loop.finished = True
        for assumption in loop.assumptions:
            assumption.members = tuple(classes.get(assumption.row, (assumption.row,)))
        if loop.lists:
            problem = modules.bind(tx, loop)
            if problem is not None:
                self._unroll(problem)

    def _unroll(self, why: str) -> NoReturn:
        """Start the frame again, with every row traced."""
        self.ledger.unroll = True
        log.debug("tracing this frame again, row by row: %s", why)
        raise dynamo.restart(self.log, "moefuse: representatives do not do")

    def read(self, tx: Any, variable: Any) -> None:
        """A number is read out of a tensor: where that is a representative's row, Python may do anything with it but select a module."""
        node = dynamo.tensor_node(variable)
        if node is None or dynamo.known_tensor(node.meta.get("example_value")) is None:
            return
        loops = [s.loop for s in self._scopes if s.loop is not None and s.loop.represented]
        if loops and (len(loops) > 1 or not modules.selects(tx, loops[0], node)):
            self._unroll("the body reads the number of its row")

    def _iterate(self, tx: Any) -> None:
        """The instruction behind GET_ITER or FOR_ITER: remember the iterator, or open the scope of an iteration."""
        _, loop, iterator = self._next  # type: ignore[misc]
        self._next = None
        if iterator is None:
            top = dynamo.realized(tx.stack[-1])
            if not dynamo.is_list_iterator(top):
                self._refuse(self._row(loop), "this Python iterates in a way that moefuse does not know")
            tx.stack[-1] = top
            self._loops[id(top)] = (top, loop)
            return
        if loop.done == (len(loop.handed) if loop.represented else loop.count):
            return
        assumption = self._row(loop)
        loop.done += 1
        loop.assumptions.append(assumption)
        self._open(tx, assumption, self._head(tx), tx.stack[:-1], loop)

    def _row(self, loop: _Loop) -> Assumption:
        if loop.represented:
            row, node = loop.handed[min(loop.done, len(loop.handed) - 1)]
            return Assumption("row", loop.place, loop.location, loop.mask, row=row, row_node=node)
        return Assumption("row", loop.place, loop.location, loop.mask, row=loop.done)

    def _head(self, tx: Any) -> int:
        """The FOR_ITER that has just run."""
        at = tx.instruction_pointer - 1
        while tx.instructions[at].opname != "FOR_ITER":
            at -= 1
        return int(at)

    def _jump(self, tx: Any, at: int) -> None:
        """A conditional jump: known, or assumed, or left to Dynamo."""
        code = self._code_of(tx)
        ways = code.ways(at)
        if ways is None:
            return
        top = dynamo.realized(tx.stack[-1])
        known = self._known(top)
        if known is not None:
            tx.stack[-1] = dynamo.constant(known)
            return
        place = self._place(tx)
        if tx.f_code.co_flags & _GENERATOR:
            return
        found = self._assumed(top)
        if found is None:
            return
        kind, subject, outcome = found
        here, there = ways if outcome else ways[::-1]
        join = code.landing(there)
        # The other way must do nothing before both meet, and this way must not be the way back of a loop.
        if join is None or code.instructions[join].opname in ("RAISE_VARARGS", "RERAISE") or here <= at:
            return
        assumption = Assumption(kind, place, self._location(tx), subject, outcome=outcome)
        self._open(tx, assumption, join, tx.stack[:-1])
        tx.stack[-1] = dynamo.constant(outcome)

    def _known(self, variable: Any) -> bool | None:
        """The truth of a one-element tensor that follows from the row alone."""
        node = dynamo.tensor_node(variable)
        if node is None or not any(s.assumption.kind == "row" for s in self._scopes):
            return None
        known = dynamo.known_tensor(node.meta.get("example_value"))
        if known is None:
            return None
        loops = [s.loop for s in self._scopes if s.loop is not None and s.loop.represented]
        for loop in loops:
            loop.conditions.append((node, loop.handed[-1][1]))
        if len(loops) > 1:
            self._unroll("a condition may depend on the rows of two loops")
        return bool(known)

    def _assumed(self, variable: Any) -> tuple[Kind, Any, bool] | None:
        """(kind, what it is about, outcome if an expert has tokens) of a condition; None if capture has no opinion."""
        number = dynamo.symbol(variable)
        if number is not None:
            found = guess.about_size(number)
            return None if found is None else ("size", found[0], found[1])
        node = dynamo.tensor_node(variable)
        outcome = guess.about_value(node) if node is not None else None
        return None if outcome is None else ("value", node, outcome)

    def _only_for(self, tx: Any) -> bool:
        """Whether the result of the running call is only looped over."""
        code, at = self._code_of(tx), tx.instruction_pointer
        following = code.instructions[at]
        if following.opname == "GET_ITER":
            return code.plain_for(at)
        return following.opname == "STORE_FAST" and code.only_looped_over(following.argval, at)

    # --- giving up ---

    def _refuse(self, assumption: Assumption, detail: str) -> NoReturn:
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
        if not ledger.unroll and any(loop.represented for loop in self._made):
            self._unroll("; ".join(p.detail for p in problems) or why)
        ledger.off = True
        for new in skipped or refusals(problems):
            if all((new.code, new.location) != (known.code, known.location) for known in ledger.refusals):
                ledger.refusals.append(new)
        text = "; ".join(f"{p.assumption.what} at {p.assumption.location}: {p.detail}" for p in problems) or why
        log.debug("tracing this frame again without capture: %s", text)
        raise dynamo.restart(self.log, "moefuse: an assumption about data does not hold")

    def unsettled(self) -> list[Undischarged]:
        """Assumptions whose scope is still open."""
        early = [Undischarged(s.assumption, "it is left early, or the graph breaks in it") for s in self._scopes]
        return early or [
            Undischarged(self._row(loop), "it is left early, or the graph breaks in it")
            for loop in self._made
            if not loop.finished and loop.done != loop.count
        ]

    @property
    def traces_data(self) -> bool:
        """Whether sizes that depend on data are in the graph only because of moefuse."""
        return self.active and self.flags

    def check_closed(self) -> None:
        """Before anything is done with a graph: no scope is open, and a break without a captured loop is where it always was."""
        problems = self.unsettled()
        if problems or (self.traces_data and self.ledger.broken and not self.assumptions):
            self.retreat(problems, why="the graph breaks, and capture has changed nothing but where")

    def report_skipped(self, error: Exception) -> None:
        """The frame ends here and runs in eager."""
        text = f"{_first_line(error)} (this function runs in eager)"
        self._skipped(FusionReport(skipped=list(self.ledger.refusals), graph_breaks=[text]))

    # --- small things ---

    def _code_of(self, tx: Any) -> Code:
        known = self._code.get(id(tx.instructions))
        if known is None:
            known = (tx.instructions, Code(tx.instructions))
            self._code[id(tx.instructions)] = known
        return known[1]

    def _place(self, tx: Any) -> Place:
        return Place(tx.f_code, tx.instructions[tx.instruction_pointer].offset)

    def _location(self, tx: Any) -> str:
        return f"{tx.f_code.co_filename}:{tx.lineno if tx.lineno > 0 else tx.f_code.co_firstlineno}"


def replay(node: Node, row: Node, value: torch.Tensor) -> Any:
    """What a chain of operations on a row gives for another row.

    Raises:
        ValueError: it does not start from the row and constants alone.
    """
    if node is row:
        return value
    if node.op not in ("call_function", "call_method") or (not node.all_input_nodes and node.target is not torch.tensor):
        raise ValueError(f"{node.name} is not computed from the row")
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: replay(n, row, value))
    if isinstance(node.target, str):
        return getattr(args[0], node.target)(*args[1:], **kwargs)
    return node.target(*args, **kwargs)


def concerns_experts(assumption: Assumption) -> bool:
    """Whether what was assumed about has to do with expert ids at all; other code that depends on data is nothing to report."""
    from moefuse.passes.discharge import concerns_routing

    try:
        return concerns_routing(assumption)
    except Exception:  # a question about a graph that is half written; nothing but a line of the report hangs on it
        return True


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def refusals(problems: list[Undischarged]) -> list[Skipped]:
    """What the user reads about assumptions that do not hold, one line for each statement."""
    out: dict[str, Skipped] = {}
    for problem in problems:
        assumption = problem.assumption
        if assumption.location not in out and concerns_experts(assumption):
            text = CODES["not-captured"].format(what=assumption.what, detail=problem.detail)
            out[assumption.location] = Skipped("not-captured", text, module="", location=assumption.location)
    return list(out.values())


__all__ = ["Frame", "Ledger", "refusals"]
