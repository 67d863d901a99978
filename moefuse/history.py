"""Which report :func:`moefuse.last_report` returns.

One report per ``torch.compile`` call (``model.compile()`` is one too): every frame that Dynamo compiled for it, and of each frame, module
and mode (gradients, training) the latest compilation, so that a recompilation for new shapes replaces its predecessor and is not counted
twice. A module that runs the code of another one is counted beside it. ``last_report()`` is the report of the ``torch.compile`` call that
compiled something most recently, in any thread.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from moefuse import _torch_private, explaining, slow_paths
from moefuse.module_names import roots_of
from moefuse.module_tree import tree_of
from moefuse.report import Fused, FusionReport, done_instead
from moefuse.served import Served, watch


class Place(NamedTuple):
    """What a report is about: a frame, the mode it is compiled in, what tells apart modules that run its code, and the models around it."""

    frame: object
    mode: tuple[bool, bool | None]
    module: object
    roots: dict[str, weakref.ref[nn.Module]]


class Lost(NamedTuple):
    """What a frame has no longer fused, and all reports that there were then."""

    fused: list[Fused]
    known: list[FusionReport]


_Once = dict[tuple[object, object], dict[tuple[str, str], tuple[Fused, frozenset[str]]]]
"""For a frame and a mode: what was fused where, and the names of the weights."""


@dataclasses.dataclass
class _Compilation:
    frame: object
    report: FusionReport
    mode: tuple[bool, bool | None] = (False, None)
    served: Served | None = None


class Compilations:
    """The reports of several graphs, as one."""

    def __init__(self) -> None:
        self._known: dict[object, _Compilation] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}

    def record(self, report: FusionReport, place: Place) -> None:
        """Remember one graph's report."""
        self._roots |= place.roots
        key = (place.frame, place.mode, place.module)
        self._known.pop(key, None)
        self._known[key] = _Compilation(place.frame, report, place.mode)

    def reports(self) -> list[FusionReport]:
        return [known.report for known in self._known.values()]

    def forget(self, lost: list[Fused]) -> None:
        """The code in which this was fused is not what the latest calls run."""
        for known in self._known.values():
            known.report = dataclasses.replace(known.report, fused=[f for f in known.report.fused if f not in lost])

    def watched(
        self, report: FusionReport, compiled: _torch_private.CompiledFn, example_inputs: Sequence[object]
    ) -> _torch_private.CompiledFn:
        """The compiled graph of a recorded report, to call instead: it says for which modules Dynamo uses it."""
        found = next((known for known in self._known.values() if known.report is report), None)
        if found is None:
            return compiled
        compiled, found.served = watch(report, compiled, example_inputs)
        return compiled

    def withdraw(self, report: FusionReport) -> None:
        for key in [key for key, known in self._known.items() if known.report is report]:
            del self._known[key]

    def merged(self) -> FusionReport | None:
        """One report; None if there is none."""
        latest: list[_Compilation] = []
        left: list[FusionReport] = []
        for known in reversed(list(self._known.values())):
            report = known.served.applied(known.report) if known.served is not None else known.report
            left.append(_without(report, known.mode, [newer for newer in latest if newer.frame == known.frame]))
            latest.append(_Compilation(known.frame, report, known.mode))
        if not latest:
            return None
        fused = {(known.frame, f.module) for known in latest for f in known.report.fused}
        for known, report in zip(latest, left, strict=True):
            instead = [f for other in latest if _alike(other.mode, known.mode) for f in other.report.fused]
            kept = [s for s in report.skipped if not done_instead(s, instead)]
            report.skipped = [dataclasses.replace(s, fused_too=(known.frame, s.module) in fused) for s in kept]
        merged = FusionReport.merged(reversed(left))
        merged.modules = tuple((prefix, tree_of(root)) for prefix, weak in self._roots.items() if (root := weak()) is not None)
        return merged


_lock = threading.Lock()
_owner: object | None = None
_compilations = Compilations()


def place(report: FusionReport, frame: object | None = None) -> Place:
    """The frame (unless that is given) and the module that Dynamo is compiling, which a report of it is recorded under."""
    frame, traced = _torch_private.frame_id() if frame is None else frame, _torch_private.traced()
    roots = {prefix: weakref.ref(root) for prefix, root in roots_of(traced).items()} if traced is not None else {}
    # A direct call of the backend has no frame number; its reports stand side by side.
    return Place(object() if frame is None else frame, _mode(traced), _module(traced, report), roots)


def record(report: FusionReport, owner: object | None = None, at: Place | None = None) -> None:
    """Remember one graph's report under the current ``torch.compile`` call and place (``owner``, ``at``, if known already)."""
    global _owner, _compilations
    owner = _torch_private.torch_compile_call() if owner is None else owner
    with _lock:
        if owner is None or owner is not _owner:
            _owner, _compilations = owner, Compilations()
        at = place(report) if at is None else at
        _compilations.record(report, at)
        once = _once(owner).setdefault((at.frame, at.mode), {})
        once.update({(f.module, f.location): (f, report.weights) for f in report.fused})


def _once(owner: object | None) -> _Once:
    """What has ever been fused for a ``torch.compile`` call, whichever compiled something since."""
    found: _Once = {} if owner is None else vars(owner).setdefault("moefuse_fused_once", {})
    return found


def lost(report: FusionReport, owner: object | None) -> Lost | None:
    """What an earlier compilation of a frame has fused, and the one that is made now, and not recorded yet, runs without a word of it."""
    at = place(report)
    with _lock:
        once = _once(owner).get((at.frame, at.mode), {})
        done = {(f.module, f.location) for f in report.fused}
        found = [f for where, (f, weights) in once.items() if weights & report.seen and where not in done]
        return Lost(found, _compilations.reports() if owner is _owner else []) if found and not report.skipped else None


def give_up(lost: Lost, owner: object | None) -> list[Fused]:
    """Of what was lost, what nothing has fused that was compiled since; no report says any longer that it is."""
    with _lock:
        if owner is not _owner:
            return lost.fused
        since = (report for report in _compilations.reports() if not any(report is known for known in lost.known))
        done = {(f.module, f.location) for report in since for f in report.fused}
        left = [f for f in lost.fused if (f.module, f.location) not in done]
        _compilations.forget(left)
        return left


def watched(report: FusionReport, compiled: _torch_private.CompiledFn, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
    """See :meth:`Compilations.watched`."""
    with _lock:
        return _compilations.watched(report, compiled, example_inputs)


def withdraw(report: FusionReport) -> None:
    """Forget a graph that the compiler behind moefuse gave up on: Dynamo comes back with parts of it, or the user has the error."""
    with _lock:
        _compilations.withdraw(report)


def report_of(owner: object) -> FusionReport | None:
    """The report of a ``torch.compile`` call, if that is the one that compiled something most recently."""
    with _lock:
        return _compilations.merged() if owner is _owner else None


def last_report() -> FusionReport | None:
    """The report of the most recent compilation through moefuse, or None if there was none.

    It covers every frame of the ``torch.compile`` call that compiled something most recently, the latest compilation of each, and the
    layers that have run so far with the code of an equal one; the object is a copy and does not change afterwards.
    """
    with _lock:
        report = _compilations.merged()
    if report is not None:
        report.notes += [note for note in explaining.notes() if note not in report.notes]
    if report is not None and report.fused:
        report.notes += [note for note in slow_paths.notes() if note not in report.notes]
    return report


def _module(traced: _torch_private.Traced | None, report: FusionReport) -> object:
    """What tells the compilations of one frame apart that stand side by side: the module whose method it is, else those it has code of."""
    owner = _method_of(traced)
    if owner is not None:
        return id(owner)
    return frozenset(module for module, _ in _places(report))


def _mode(traced: _torch_private.Traced | None) -> tuple[bool, bool | None]:
    """In which a frame is compiled: what is fused in one may be refused in the other."""
    return torch.is_grad_enabled(), getattr(_method_of(traced), "training", None)


def _method_of(traced: _torch_private.Traced | None) -> nn.Module | None:
    """The module whose method is traced: the first argument, or in what is behind a break the variable with the usual name."""
    scope = traced.local_scope if traced is not None else {}
    owner = scope.get("self", next(iter(scope.values()), None))
    return owner if isinstance(owner, nn.Module) and not isinstance(owner, nn.ModuleList) else None


def _alike(first: tuple[bool, bool | None], second: tuple[bool, bool | None]) -> bool:
    """Whether two frames may be of one call; a function has no mode of training."""
    return first[0] == second[0] and (first[1] == second[1] or None in (first[1], second[1]))


def _places(report: FusionReport) -> list[tuple[str, str]]:
    return [*((f.module, f.location) for f in report.fused), *((s.module, s.location) for s in report.skipped)]


def _without(report: FusionReport, mode: tuple[bool, bool | None], newer: list[_Compilation]) -> FusionReport:
    """A report less what later compilations of the same frame say: all of a layer in this mode, the same of a layer in another."""
    here = {place for other in newer if other.mode == mode for place in _places(other.report) if place[0]}
    done = here | {(f.module, f.location) for other in newer if other.mode != mode for f in other.report.fused}
    said = [s for other in newer if other.mode != mode for s in other.report.skipped]
    return dataclasses.replace(
        report,
        fused=[f for f in report.fused if (f.module, f.location) not in done],
        skipped=[s for s in report.skipped if (s.module, s.location) not in here and s not in said],
    )
