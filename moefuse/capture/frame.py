"""One attempt of Dynamo at one frame, seen instruction by instruction: where to assume, and when an assumption's scope ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from moefuse import _torch_private
from moefuse.capture import bins, branches, compared, counts, functions, modules
from moefuse.capture.appends import Appends
from moefuse.capture.attempt import OTHER_WAY, Attempt
from moefuse.capture.bytecode import GENERATOR, kind
from moefuse.capture.dynamo import control, creation_clock, values
from moefuse.capture.iterators import Iterators
from moefuse.capture.loops import Loops
from moefuse.capture.scopes import Scopes
from moefuse.errors import first_line
from moefuse.passes.graph import symbols
from moefuse.passes.graph.assumptions import Undischarged
from moefuse.program.breaks import Stop
from moefuse.report.entries import Skipped
from moefuse.report.quietly import quietly
from moefuse.report.report import FusionReport

log = logging.getLogger("moefuse.capture")

_LISTED = (
    "it decides what a list has in it; ask in the loop over experts instead, `if not (ids == e).any(): continue`, "
    "or loop over `torch.unique(ids)`"
)
_MAKES_GENERATOR = frozenset(("COPY_FREE_VARS", "MAKE_CELL", "RETURN_GENERATOR"))
"""What the frame of a generator does when it is called, and not when it gives an item."""


class Frame(Attempt):
    """The observer of an attempt. Dynamo calls the methods that :class:`moefuse.capture.dynamo.hooks.Observer` names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scopes = Scopes(self)
        self.loops = Loops(self, self.scopes)
        self.appends = Appends(self)
        self.iterators = Iterators()
        self._looks: Mapping[str, Callable[[Any, int], None]] = {
            "subscript": lambda tx, _: self.loops.subscript(tx),
            "call": self._called,
            "format": lambda tx, at: self.loops.formatted(tx, tx.instructions[at]),
            "get_iter": self.loops.get_iter,
            "for_iter": lambda tx, _: self.loops.for_iter(tx),
            "jump": lambda tx, at: branches.jump(self.scopes, tx, at),
            "handler": lambda tx, _: self.scopes.handler(tx),
        }
        """Kind of instruction -> what is done before it runs."""

    def before(self, tx: Any) -> Any:
        """An instruction of ``tx`` is about to run; what it leaves on the stack in place of what Dynamo finds, or None."""
        at = tx.instruction_pointer
        if at is None:
            return None
        if self._doubt is not None:  # Dynamo has gone on: an assertion, which it writes into the graph
            self.ledger.refusals.remove(self._doubt)
            self._doubt = None
        found = kind(tx.instructions[at])
        answer = compared.asked(self, tx, found) if found in ("identity", "contains") else None
        if not self.active:
            return answer
        self.traced.add(tx.f_code)
        root = tx is tx.output.root_tx
        self._cut = self._cut or (root and self.ledger.cut is not None and at == self.ledger.cut[0])
        if root and not tx.stack and not self.open:
            self._between[at] = len(tx.output.graph.nodes)
        try:
            self._before(tx, at)
        except Exception as error:
            if control.is_restart(error) or control.is_tracing(error):
                raise
            log.exception("moefuse failed while it looked at %s", self.location(tx))
            self.retreat([], why=first_line(error))
        return answer

    def _before(self, tx: Any, at: int) -> None:
        if self.open:
            self.scopes.leave(tx, at)
            at = tx.instruction_pointer
        self.loops.iterate(tx)
        inst = tx.instructions[at]
        found = kind(inst)
        self.appends.before(tx, at)
        loop = next((s.loop for s in self.open if s.loop is not None and s.loop.lists), None)
        if loop is not None and modules.tells_apart(tx, loop, inst):
            self.unroll("the body may tell one module from another")
        if self.open:
            for iterator in self.iterators.before(tx, inst):
                self.advanced(iterator)
        if tx.f_code.co_flags & GENERATOR and inst.opname not in _MAKES_GENERATOR:
            self.advanced(tx)
        if found in self._looks:
            self._looks[found](tx, at)

    def _called(self, tx: Any, at: int) -> None:
        if self.numpy and counts.asks_for_type(tx, tx.instructions[at]):
            self.retreat([], why="it asks for the type of a number out of NumPy")
        modules.reads_index(tx, tx.instructions[at])
        self.loops.occurrences.call(tx, at)

    def mutated(self, variable: Any) -> None:
        """An object of the program is about to change."""
        for scope in self.open:
            if creation_clock.created_inside(variable, scope.clock) or functions.takes(scope, variable):
                continue
            if scope.then is not None or not self.appends.takes(variable, scope.assumption):
                listed = _last(scope.translator) == "LIST_APPEND"
                self.refuse(scope.assumption, _LISTED if listed else "it changes a Python object that was there before")

        if not self.open:
            self.scopes.changed(variable)

    def advanced(self, iterator: Any) -> None:
        """An iterator, or the frame of a generator, is about to give its next item. Not every kind counts as mutated by that."""
        for scope in self.open:
            if not creation_clock.iterator_created_inside(iterator, scope.clock):
                again = _last(scope.translator) in ("FOR_ITER", "")
                self.refuse(scope.assumption, OTHER_WAY if again else "it takes an item from an iterator that was there before")

    def computed(self, tx: Any, nodes: Collection[torch.fx.Node]) -> bool:
        """The value of a parametrised tensor was computed where the program first asks for it; whether that makes no difference."""
        return self.scopes.computed(tx, nodes)

    def compiling(self, environment: Any) -> None:
        """A graph of this frame is about to be compiled."""
        if self.traces_data and control.asserts_floats(environment):
            detail = "the program asserts something of a float that it reads out of a tensor; read it as an integer"
            self.retreat([Undischarged(a, detail) for a in self.assumptions[:1]], why="a float is asserted about")

    def compiled(self, output: Any = None) -> None:
        """A graph of this frame is compiled, or the frame is done (``output``): whatever was assumed must be settled now."""
        stop = None if output is None else self.cause(_torch_private.graph_break(output))
        self.check_closed(stop)
        self.check_worth(self.fused, stop)
        left = [Undischarged(a, "nothing has checked it") for a in self.assumptions if a not in self.settled]
        if left:
            self.retreat(left)
        if not self.has_graph and (self.ledger.refusals or self.ledger.notes or stop is not None):
            # Where this attempt breaks there is no graph yet, and so no report that says so, or why the one before was given up.
            stops = [*self.ledger.stops, *([] if stop is None else [stop])]
            self._skipped(self._report(stops=stops))

    def failed(self, error: Exception, tx: Any, again: bool = False) -> None:
        """Tracing ended with an error: one that capture may have caused means another attempt without it. ``again``: one follows."""
        environment = tx.output.shape_env
        if control.is_restart(error):
            self.ledger.broken = self.ledger.broken or (self.traces_data and control.is_break(error) and control.has_unbacked(environment))
            return
        if control.is_backends(error):
            return
        self.try_cut(tx, error)
        self.ledger.erred = self.ledger.erred or control.is_programs(error)
        if self.active and (self.flags or self.assumptions):
            self.ledger.stops.append(_torch_private.tracing_stop(error))
            self.retreat(
                [Undischarged(s.assumption, f"it cannot be traced: {first_line(error)}") for s in self.open], why=first_line(error)
            )
        if not again:
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
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.dtype != torch.int64 or not symbols.unbacked(value.shape[0]):
            return False
        code, at = self.code_of(tx), tx.instruction_pointer
        following = code.instructions[at]
        stored = following.opname == "STORE_FAST" and code.only_in_indices(following.argval)
        return bool(stored or code.becomes_an_index(at))

    def numbers(self, tx: Any, variable: Any) -> Any:
        """The elements of a tensor or an array that is unpacked, where they are to be numbers; None to leave it to Dynamo."""
        return counts.numbers(self, tx, variable)

    def counted(self, tx: Any, ids: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """``bincount`` of ids, where its length is known; None to leave it to Dynamo."""
        return bins.traced(tx, ids, args, named) if self.ledger.counts else None

    def read(self, tx: Any, variable: Any) -> Any:
        """A number is read out of a tensor; what Python gets in its place, or None."""
        return self.loops.read(tx, variable)

    def refused_before(self, found: Collection[Skipped]) -> None:
        """Have the report say these."""
        self.ledger.refusals += [new for new in found if new not in self.ledger.refusals]

    def report_skipped(self, error: Exception) -> None:
        """The frame ends here and runs in eager."""
        text = f"{first_line(error)} (this function runs in eager){control.place(error)}"
        stop = _torch_private.tracing_stop(error)
        self._skipped(self._report(graph_breaks=[text], stops=[*self.ledger.stops, stop], followed=self.follows(stop)))

    def leave(self, report: FusionReport) -> NoReturn:
        """Have Dynamo run this frame in eager: a piece of a layer with spread experts, which gathers what all of the layer gathers once."""
        self.ledger.refusals += [s for s in report.skipped if s.code != "experts-gathered" and s not in self.ledger.refusals]
        self._skipped(replace(report, graph_count=0))
        raise control.left("moefuse: a call of a layer gathers weights once, in eager")

    def follows(self, stop: Stop) -> list[str]:
        """The place of a break that comes of a refusal, or nothing."""
        found: list[str] = quietly(lambda: [stop.place] if self.gave_up and stop.by_data else [], otherwise=[])
        return found

    def _report(self, **found: Any) -> FusionReport:
        ledger = self.ledger
        return FusionReport(skipped=list(ledger.refusals), notes=list(ledger.notes), seen=frozenset(ledger.seen), **found)


def _last(tx: Any) -> str:
    """The instruction that ``tx`` runs; empty where its function has returned."""
    at = tx.instruction_pointer
    return "" if at is None else str(tx.instructions[at - 1].opname)
