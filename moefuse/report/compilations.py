"""What is known of the frames and graphs of one ``torch.compile`` call, and the report that this comes to.

Of each frame, module and mode (gradients, training) it is about the graph that ran last. A module that runs the code of another one is
counted beside it.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from moefuse import _torch_private
from moefuse.program.module_tree import tree_of
from moefuse.program.runs import Ran, now
from moefuse.report.entries import Fused, Skipped, done_instead
from moefuse.report.report import FusionReport
from moefuse.report.reused_code import Served, watch

Mode = tuple[bool, bool | None]
"""Whether gradients are recorded, and whether a module is in training; None where there is no module."""


class Place(NamedTuple):
    """What a report is about: a frame, the mode it is compiled in, what tells apart modules that run its code, and the models around it.

    ``root``: the class of the module that was compiled; empty for a function.
    """

    frame: object
    mode: Mode
    module: object
    roots: dict[str, weakref.ref[nn.Module]]
    root: str


_KINDS = 16
"""So many graphs of a frame are known, besides the last; torch makes eight of one code."""

TOLD = ("lost", "nothing-found")
"""In place of a frame: what was said at the end of a call."""


@dataclasses.dataclass
class _Compilation:
    """What is known of one graph, or of a frame that has none.

    Attributes:
        made: when.
        ran: its last call; None where nobody knows.
        ended: when the call ended in which it was made; 0 before that.
        before: earlier ones of the same kind of call: for other sizes, or other hooks.
        lost: when what it has fused somewhere ran otherwise.
        times: when a module of it ran last, where several run its code.
    """

    frame: object
    report: FusionReport
    mode: Mode = (False, None)
    served: Served | None = None
    ran: Ran | None = None
    made: int = dataclasses.field(default_factory=now)
    ended: int = 0
    before: list[_Compilation] = dataclasses.field(default_factory=list)
    lost: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    times: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def last(self) -> int:
        return self.made if self.ran is None else self.ran.last

    def when(self, module: str) -> int:
        """The last time that a module of it ran."""
        return self.times.get(module, self.last)

    def in_call(self, start: int) -> bool:
        """Whether it is of a call that began at ``start``; what nobody knows of ran in each."""
        return self.last >= start or (self.ran is None and bool(self.report.fused))

    def whole(self) -> FusionReport:
        """The report with all modules that it is about, less what ran otherwise since."""
        report, self.times = (self.report, {}) if self.served is None else self.served.applied(self.report)
        kept = [f for f in report.fused if self.lost.get((f.module, f.location), 0) <= self.when(f.module)] if self.lost else report.fused
        return dataclasses.replace(report, fused=kept)


class Compilations:
    """The reports of several graphs, as one."""

    def __init__(self) -> None:
        self._known: dict[object, _Compilation] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self._root = ""
        self.epoch = _torch_private.epoch()

    def ended(self) -> None:
        """A call that has compiled something is at its end."""
        for known in self._all():
            known.ended = known.ended or now()

    def record(self, report: FusionReport, place: Place) -> None:
        """Remember one graph's report."""
        self._roots |= place.roots
        self._root = place.root or self._root
        key = (place.frame, place.mode, place.module)
        last = self._known.pop(key, None)
        # Those of other calls stay, and may be what runs the next time.
        before = [] if last is None else [*last.before, last][-_KINDS:]
        if last is not None:
            last.before = []
        self._known[key] = _Compilation(place.frame, report, place.mode, before=before)

    def _all(self) -> Iterator[_Compilation]:
        for known in self._known.values():
            yield from known.before
            yield known

    def _current(self) -> list[_Compilation]:
        """Of each kind of call what ran last."""
        return [max((*known.before, known), key=lambda one: one.last) for known in self._known.values()]

    def reports(self) -> list[FusionReport]:
        return [known.report for known in self._all()]

    def lose(self, concerns: Callable[[Fused], bool], start: int = 0) -> None:
        """What was fused here and ``concerns`` is not what a call ran that began at ``start``."""
        for known in self._all():
            if not start or not known.in_call(start):
                known.lost |= {(f.module, f.location): now() for f in known.whole().fused if concerns(f)}

    def fused_since(self, frame: object, since: int) -> bool:
        """Whether a frame has run fused since then."""
        return any(known.frame == frame and known.last > since and bool(known.report.fused) for known in self._all())

    def again(self, names: Collection[str], mode: Mode) -> list[object]:
        """Refusals of modules that have one of these names, or are inside of one, hold again in a mode; what they were recorded under."""
        found = [
            known
            for known in self._all()
            if alike(known.mode, mode) and any(is_in(s.module, name) for s in known.report.skipped for name in names)
        ]
        for known in found:
            known.made = known.ended = now()
        return [known.frame for known in found]

    def names(self, modules: Collection[nn.Module]) -> list[str]:
        """The names of some modules in what was compiled."""
        roots = {prefix: root for prefix, weak in self._roots.items() if (root := weak()) is not None}
        found = ((prefix, name, module) for prefix, root in roots.items() for name, module in root.named_modules())
        return [f"{prefix}.{name}".strip(".") for prefix, name, module in found if any(module is one for one in modules)]

    def in_call(self, start: int) -> FusionReport:
        """The report of what a call has compiled or run that began at ``start``."""
        return FusionReport.merged(known.whole() for known in self._all() if known.in_call(start))

    def fused_in_call(self, start: int, but: object = None) -> set[tuple[str, str]]:
        """Where something is fused that ran in a call, other than in one frame."""
        ran = (known for known in self._all() if known.frame != but and known.in_call(start))
        return {(f.module, f.location) for known in ran for f in known.whole().fused}

    def watched(
        self, report: FusionReport, compiled: _torch_private.CompiledFn, example_inputs: Sequence[object]
    ) -> _torch_private.CompiledFn:
        """The compiled graph of a recorded report, to call instead: it says when it runs, and for which modules Dynamo uses it."""
        found = next((known for known in self._known.values() if known.report is report), None)
        if found is None:
            return compiled
        instead = any(known.report.fused for known in found.before)
        compiled, found.served, found.ran = watch(report, compiled, example_inputs, always=instead)
        return compiled

    def withdraw(self, report: FusionReport) -> None:
        for key in [key for key, known in self._known.items() if known.report is report]:
            before = self._known.pop(key).before
            if before:
                self._known[key] = before[-1]
                before[-1].before = before[:-1]

    def merged(self) -> FusionReport | None:
        """One report; None if there is none."""
        latest: list[_Compilation] = []
        left: list[FusionReport] = []
        for known in reversed(self._current()):
            report = known.whole()
            left.append(_without(report, known.mode, [newer for newer in latest if newer.frame == known.frame]))
            latest.append(_Compilation(known.frame, report, known.mode, made=known.last, ended=known.ended, times=known.times))
        if not latest:
            return None
        for known, report in zip(latest, left, strict=True):
            refused = {f.module for f in known.report.fused if _refused_since(f.module, known, latest)}
            known.report, report.fused = _less(known.report, refused), _less(report, refused).fused
        for known, report in zip(latest, left, strict=True):
            others = [other for other in latest if alike(other.mode, known.mode)]
            instead = [f for other in others for f in other.report.fused]
            told = known.frame in TOLD
            same = [other for other in latest if other.frame == known.frame or told or not alike(other.mode, known.mode)]
            since = [other for other in others if other is not known]  # a graph that is refused in part is so each time that it runs
            kept = [s for s in report.skipped if not done_instead(s, instead) and not _fused_since(s.module, known, since)]
            report.skipped = [_beside(s, known, same) for s in kept]
        merged = FusionReport.merged(reversed(left))
        merged.modules = tuple((prefix, tree_of(root)) for prefix, weak in self._roots.items() if (root := weak()) is not None)
        merged.root = self._root
        return merged


def is_in(module: str, name: str) -> bool:
    """Whether a module is another one or inside of it."""
    return not name or f"{module}.".startswith(f"{name}.")


def _beside(skipped: Skipped, known: _Compilation, same: list[_Compilation]) -> Skipped:
    """A refusal, with whether the layer is fused too, and the mode in which it is not where it is in another one only."""
    if not _in_one_of(skipped.module, same, known.frame):
        return dataclasses.replace(skipped, fused_too=False, when="")
    fused = [other for other in same if _in_one_of(skipped.module, [other], known.frame)]
    when = "" if any(alike(other.mode, known.mode) for other in fused) else _words(known.mode, [other.mode for other in fused])
    return dataclasses.replace(skipped, fused_too=True, when=when)


def _words(mode: Mode, others: list[Mode]) -> str:
    """What tells a mode apart from all of some others."""
    if all(training not in (mode[1], None) for _, training in others):
        return "in training" if mode[1] else "in evaluation"
    return "" if any(gradients == mode[0] for gradients, _ in others) else f"{'with' if mode[0] else 'without'} gradients"


def _in_one_of(module: str, found: list[_Compilation], frame: object = None) -> bool:
    """Whether a module is one that is fused in some compilations, or belongs to it. Of another frame, a root is itself only."""
    entries = ((known.frame == frame, f.module) for known in found for f in known.report.fused)
    return any(is_in(module, layer) if layer or same else module == layer for same, layer in entries)


def _fused_since(module: str, known: _Compilation, others: list[_Compilation]) -> bool:
    """Whether a module ran fused in a call behind that in which it was refused."""
    start = known.made if known.frame in TOLD else known.ended or math.inf
    layers = ((f.module, other.when(f.module) > start) for other in others for f in other.report.fused)
    return any(later and (is_in(module, layer) if layer else module == layer) for layer, later in layers)


def _refused_since(layer: str, known: _Compilation, others: list[_Compilation]) -> bool:
    """Whether other code of the same frame, which is refused, ran for a module since its fused code did: others still run that one."""
    same = (other for other in others if other.frame == known.frame and alike(other.mode, known.mode))
    refused = ((s.module, other) for other in same for s in other.report.skipped)
    return any(is_in(module, layer) and other.when(module) > known.when(layer) for module, other in refused)


def fused_in(report: FusionReport) -> set[tuple[str, str]]:
    return {(f.module, f.location) for f in report.fused}


def alike(first: Mode, second: Mode) -> bool:
    """Whether two frames may be of one call; a function has no mode of training."""
    return first[0] == second[0] and (first[1] == second[1] or None in (first[1], second[1]))


def places(report: FusionReport) -> list[tuple[str, str]]:
    return [*((f.module, f.location) for f in report.fused), *((s.module, s.location) for s in report.skipped)]


def _less(report: FusionReport, layers: Collection[str]) -> FusionReport:
    return dataclasses.replace(report, fused=[f for f in report.fused if f.module not in layers])


def _without(report: FusionReport, mode: Mode, newer: list[_Compilation]) -> FusionReport:
    """A report less what later compilations of the same frame say: all of a layer in this mode, the same of a layer in another."""
    here = {place for other in newer if other.mode == mode for place in places(other.report) if place[0]}
    done = here | {(f.module, f.location) for other in newer if other.mode != mode for f in other.report.fused}
    said = [s for other in newer if other.mode != mode for s in other.report.skipped]
    return dataclasses.replace(
        report,
        fused=[f for f in report.fused if (f.module, f.location) not in done],
        skipped=[s for s in report.skipped if (s.module, s.location) not in here and s not in said],
    )


__all__ = ["TOLD", "Compilations", "Mode", "Place", "alike", "fused_in", "is_in", "places"]
