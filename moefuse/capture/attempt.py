"""One attempt of Dynamo at one frame: what is assumed in it, and the ways in which it is given up for another."""

from __future__ import annotations

import itertools
import logging
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from moefuse import _torch_private
from moefuse.capture import dummies
from moefuse.capture.bytecode import Code
from moefuse.capture.dynamo import control, relations, values
from moefuse.capture.ledger import Ledger, refusals
from moefuse.capture.opened import Elements, Loop, Scope
from moefuse.errors import CODES, first_line
from moefuse.passes.graph import symbols
from moefuse.passes.graph.assumptions import Assumption, Place, Undischarged
from moefuse.passes.graph.module_names import Matching, ModuleNames
from moefuse.program.breaks import Stop, code_at
from moefuse.report.doors import module_names
from moefuse.report.entries import Skipped
from moefuse.report.report import FusionReport

log = logging.getLogger("moefuse.capture")

OTHER_WAY = (
    "on its other way other code runs (an `else`, break, return or raise); "
    "where that is a pass for experts without tokens, none is needed: fused, all experts have gradients"
)
_ATTEMPTS = itertools.count(1)


class Attempt:
    """What is assumed in one attempt, what is open, and how it is given up.

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
        self.open: list[Scope] = []  # the innermost last
        self.loops_made: list[Loop] = []
        self.dummies: list[tuple[Assumption, list[torch.fx.Node]]] = []  # passes of experts without tokens, and what they recorded
        self.numpy = False
        self.elements: list[Elements] = []
        self.has_graph = False
        self.fused = False  # whether experts are, in the graph of this attempt
        self.related: Sequence[relations.Input] = []  # what the graph is given, where it writes to some of that
        self.crossed = False  # whether it does so between experts that are one op now
        self.registering = False
        self.asserted = False  # whether an assertion is in the graph at which Dynamo would break it
        self._between: dict[int, int] = {}  # statements of the frame itself outside of all scopes, and how many nodes there were then
        self._cut = False  # whether this attempt's graph ends at the ledger's cut
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
    def makes_leaves(self) -> bool:
        """Whether Dynamo shall trace tensors that are made with ``requires_grad=True``."""
        return self.ledger.makes_leaves

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

    def assume(self, tx: Any, assumption: Assumption) -> None:
        """Put an assumption on record: no graph of this frame is used before it is discharged."""
        self.only_outside_of_dummies()
        assumption.graph = values.graph_of(tx)
        self.assumptions.append(assumption)

    def only_outside_of_dummies(self) -> None:
        """Something is about to be assumed: of what shall come to nothing, every way would have to be seen."""
        for scope in self.open:
            if scope.then is not None:
                self.refuse(scope.assumption, OTHER_WAY)

    def represented(self) -> list[Loop]:
        """The loops around this place of which representatives are traced."""
        return [s.loop for s in self.open if s.loop is not None and s.loop.represented]

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

    def unroll(self, why: str) -> NoReturn:
        """Start the frame again, with every row traced."""
        self.ledger.unroll = True
        log.debug("tracing this frame again, row by row: %s", why)
        raise control.restart(self.log, "moefuse: representatives do not do")

    def asks_for_rows(self, tx: Any, number: Any) -> None:
        """A branch, at which Dynamo is about to stop, depends on a number: the user is told if that is how many tokens an expert has."""
        from moefuse.passes.prove.concerns import counts_rows

        found = symbols.unbacked(number) if number is not None else set()
        if not found or not symbols.undecided(number) or self._told(tx):
            return
        if any(counts_rows(graph, found) for graph in dict.fromkeys((values.graph_of(tx), values.whole_graph_of(tx)))):
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
        other = {s.assumption for s in self.open if s.then is not None}
        problems = [Undischarged(p.assumption, OTHER_WAY) if p.assumption in other else p for p in problems]
        if not ledger.unroll and any(loop.represented for loop in self.loops_made):
            self.unroll("; ".join(p.detail for p in problems) or why)
        ledger.off = True
        ledger.met = self.related if self.crossed and not ledger.unrelated else ()
        attempt = next(_ATTEMPTS)
        for new in skipped or refusals(problems):
            if new not in ledger.refusals:
                ledger.refusals.append(replace(new, given_up=True, attempt=attempt))
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

    def leaves_missed(self) -> NoReturn:
        """Start the frame again: the program can tell that its leaves have no gradients in the graph."""
        self.ledger.makes_leaves = False
        raise control.restart(self.log, "moefuse: gradients of a tensor that the call makes can be seen behind the graph")

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
        early = [Undischarged(s.assumption, _left_in(s.assumption, stop)) for s in self.open]
        early += [Undischarged(a, OTHER_WAY) for a, nodes in self.dummies if not dummies.gives_no_gradients(nodes)]
        early += [Undischarged(e.length, "not every element is looped over") for e in self.elements if len(e.done) < len(e.nodes)]
        return early or [
            Undischarged(row, _left_in(row, stop))
            for loop in self.loops_made
            if not loop.finished and loop.done != loop.count and (row := loop.row())
        ]

    @property
    def traces_data(self) -> bool:
        """Whether sizes that depend on data are in the graph only because of moefuse."""
        return self.active and self.flags

    def check_closed(self, stop: Stop | None = None) -> None:
        """Before anything is done with a graph: no scope is open.

        Args:
            stop: the break that ended the graph, if one did.
        """
        problems = self.unsettled(stop)
        if problems:
            self._leave(problems, stop)

    def check_worth(self, fused: bool, stop: Stop | None = None) -> None:
        """A graph that breaks, and in which no loop was captured and no experts are fused, breaks where it always did."""
        changed = self.asserted or (self.traces_data and self.ledger.broken and (self._cut or not self.assumptions))
        if changed and not fused:
            self._leave([], stop)

    @property
    def cut(self) -> bool:
        """Whether the graph is to end where Dynamo can next break it."""
        return self._cut

    def cause(self, stop: Stop | None) -> Stop | None:
        """Why a graph ends early, from what Dynamo says of it."""
        return self.ledger.cut[1] if self._cut and self.ledger.cut is not None and stop is not None else stop

    def try_cut(self, tx: Any, error: Exception) -> None:
        """Start the frame again, to end its graph in front of the loop in which it breaks: Dynamo would run all of the frame in eager."""
        if not self.traces_data or self.ledger.cut is not None or self.open or not control.breaks_in_loop(error):
            return
        if tx.instruction_pointer is None:
            return
        loop = self.code_of(tx).outermost_loop(tx.instruction_pointer - 1)
        at = max((at for at in self._between if loop is not None and at < loop), default=None)
        if at is None or not any(
            symbols.unbacked_in(n.meta.get("example_value")) for n in list(tx.output.graph.nodes)[: self._between[at]]
        ):
            return
        self.ledger.cut = (at, _torch_private.tracing_stop(error))
        log.debug("tracing this frame again, up to the loop in which the graph breaks: %s", first_line(error))
        raise control.restart(self.log, "moefuse: the graph breaks in a loop")

    def _leave(self, problems: list[Undischarged], stop: Stop | None) -> NoReturn:
        self.ledger.stops += [] if stop is None else [stop]
        self.retreat(problems, why="the graph breaks, and capture has changed nothing but where")


def _left_in(assumption: Assumption, stop: Stop | None) -> str:
    """Why a scope is open where a graph ends: the statement that opened it, and the one at which the graph breaks."""
    opened = code_at(assumption.location)
    inside = f"it is left early (`{opened}`)" if opened else "it is left early, or the graph breaks in it"
    if stop is None or not stop.stack:
        return inside
    breaks = code_at(f"{stop.stack[-1][0]}:{stop.stack[-1][1]}")
    return f"in what `{opened}` decides about the graph breaks, at `{breaks}` ({stop.text})" if opened and breaks else inside
