"""Which report :func:`moefuse.last_report` returns.

One report per ``torch.compile`` call (``model.compile()`` is one too): every frame that Dynamo compiled for it, and of each frame, module
and mode (gradients, training) the graph that ran last, so that a recompilation for new shapes is not counted twice
(``report/compilations.py``). ``last_report()`` is the report of the ``torch.compile`` call that compiled something most recently, in any
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moefuse import _torch_private
from moefuse.machine import slow_paths
from moefuse.passes.graph.module_names import roots_of
from moefuse.program import called
from moefuse.report import quietly
from moefuse.report.compilations import TOLD, Compilations, Mode, Place, fused_in, is_in, places
from moefuse.report.entries import Fused
from moefuse.report.report import FusionReport, Reports


class Lost(NamedTuple):
    """What a frame has no longer fused, and all reports that there were then."""

    fused: list[Fused]
    known: list[FusionReport]
    frame: object


_Once = dict[object, dict[tuple[str, str], tuple[Fused, frozenset[str]]]]
"""For a frame: what was fused where, and the names of the weights."""


_lock = threading.Lock()
_compilations: Compilations | None = None


class _Kept(NamedTuple):
    """What is known of a ``torch.compile`` call; ``once``: what has ever been fused for it, whichever compiled something since."""

    owner: weakref.ref[Any]
    compilations: Compilations
    once: _Once


_kept: dict[int, _Kept] = {}
"""The ``torch.compile`` calls that have compiled something, in this order, by identity."""


def place(report: FusionReport, frame: object | None = None, mode: Mode | None = None) -> Place:
    """The frame (unless that is given) and the module that Dynamo is compiling, which a report of it is recorded under."""
    frame, traced = _torch_private.frame_id() if frame is None else frame, _torch_private.traced()
    found = roots_of(traced) if traced is not None else {}
    roots = {prefix: weakref.ref(root) for prefix, root in found.items()}
    itself = None if traced is None else getattr(traced.function, "__self__", traced.function)
    root = type(found.get("", itself)).__name__ if isinstance(itself, nn.Module) else ""
    if frame is None:
        # A direct call of the backend has no frame number; its reports stand side by side.
        frame = object() if report.graph_count else TOLD[0]
    return Place(frame, _mode(traced) if mode is None else mode, _module(traced, report), roots, root)


def _of(owner: object) -> _Kept | None:
    """What a ``torch.compile`` call has compiled, unless that is gone with a reset."""
    found = _kept.get(id(owner))
    return found if found is not None and found.owner() is owner and found.compilations.epoch is _torch_private.epoch() else None


def _all() -> list[Compilations]:
    """What is still there of all ``torch.compile`` calls."""
    owners = [owner for known in _kept.values() if (owner := known.owner()) is not None]
    return [known.compilations for owner in owners if (known := _of(owner)) is not None]


def _kept_for(owner: object) -> _Kept:
    found = _of(owner)
    if found is None:
        alive = [known for known in _kept.values() if (other := known.owner()) is not None and other is not owner]
        left = {id(known.owner()): known for known in alive if known.compilations.epoch is _torch_private.epoch()}
        _kept.clear()
        _kept.update(left)
        found = _kept[id(owner)] = _Kept(weakref.ref(owner), Compilations(), {})
    return found


def record(report: FusionReport, owner: object | None = None, at: Place | None = None) -> None:
    """Remember one graph's report under the current ``torch.compile`` call and place (``owner``, ``at``, if known already)."""
    global _compilations
    owner = _torch_private.torch_compile_call() if owner is None else owner
    with _lock:
        kept = None if owner is None else _kept_for(owner)
        _compilations = Compilations() if kept is None else kept.compilations
        at = place(report) if at is None else at
        _compilations.record(report, at)
        if kept is not None:
            kept.once.setdefault(at.frame, {}).update({(f.module, f.location): (f, report.weights) for f in report.fused})


def lost(report: FusionReport, owner: object | None) -> Lost | None:
    """What an earlier compilation of a frame has fused, and the one that is made now, and not recorded yet, runs without a word of it."""
    frame = place(report).frame
    with _lock:
        kept = _of(owner)
        if kept is None or report.skipped:
            return None
        done = fused_in(report)
        once = kept.once.get(frame, {})
        found = [f for where, (f, weights) in once.items() if weights & report.seen and where not in done]
        # Other modules run this code, and have weights of the same names in it.
        module = _method_of(_torch_private.traced())
        names = kept.compilations.names([module]) if module is not None and found else []
        found = [f for f in found if any(is_in(f.module, name) for name in names)] if names else found
        return Lost(found, kept.compilations.reports(), frame) if found else None


def limited(owner: object, frame: object, modules: Collection[nn.Module]) -> list[Fused]:
    """What was fused in a frame with these modules, whose code torch compiles no further; no report says any longer that it is."""
    with _lock:
        kept = _of(owner)
        return [] if kept is None else _gone(kept, frame, modules)


def fused_since(owner: object, frame: object, since: int) -> bool:
    """Whether a frame has run fused since then."""
    with _lock:
        kept = _of(owner)
        return kept is not None and kept.compilations.fused_since(frame, since)


def unsaid(owner: object, frame: object, modules: Collection[nn.Module], insists: bool) -> list[Fused]:
    """As :func:`limited`; nothing where a report has a refusal of them in this mode, unless each call is to raise (``insists``)."""
    with _lock:
        kept = _of(owner)
        if kept is None:
            return []
        known = kept.compilations.again(kept.compilations.names(modules), _mode(None))
        # A refusal with a reason says so of a mode; experts that were lost are what no report calls fused.
        lost = _gone(kept, frame, modules) if not known or any(place in TOLD for place in known) else []
        return lost if not known or insists else []


def _gone(kept: _Kept, frame: object, modules: Collection[nn.Module]) -> list[Fused]:
    known = [f for f, _ in kept.once.get(frame, {}).values()]
    names = kept.compilations.names(modules)
    found = [f for f in known if any(is_in(f.module, name) for name in names)] if names else known
    # Another layer's code runs it, and was compiled with that one's name.
    found = found or [dataclasses.replace(known[0], module=name) for name in names if known]
    places = {(f.module, f.location) for f in found}
    kept.compilations.lose(lambda f: (f.module, f.location) in places)
    return found


def give_up(lost: Lost, owner: object | None, start: int = 0) -> list[Fused]:
    """Of what was lost, what no other frame has fused in a call that began at ``start``; no report says any longer that it is."""
    with _lock:
        kept = _of(owner)
        if kept is None:
            return lost.fused
        compilations = kept.compilations
        since = [report for report in compilations.reports() if not any(report is known for known in lost.known)]
        done = {(f.module, f.location) for report in since for f in report.fused}
        done |= compilations.fused_in_call(start, but=lost.frame) if start else set()
        left = [f for f in lost.fused if (f.module, f.location) not in done]
        gone = {(f.module, f.location) for f in left}
        compilations.lose(lambda f: (f.module, f.location) in gone)
        refused = [skipped.module for report in since for skipped in report.skipped if skipped.module]
        return [f for f in left if not any(is_in(module, f.module) for module in refused)]


def ended(owner: object) -> None:
    """See :meth:`Compilations.ended`."""
    with _lock:
        kept = _of(owner)
        if kept is not None:
            kept.compilations.ended()


def lose(owner: object, concerns: Callable[[Fused], bool], start: int) -> None:
    """See :meth:`Compilations.lose`."""
    with _lock:
        kept = _of(owner)
        if kept is not None:
            kept.compilations.lose(concerns, start)


def watched(report: FusionReport, compiled: _torch_private.CompiledFn, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
    """See :meth:`Compilations.watched`."""
    with _lock:
        return compiled if _compilations is None else _compilations.watched(report, compiled, example_inputs)


def withdraw(report: FusionReport) -> None:
    """Forget a graph that the compiler behind moefuse gave up on: Dynamo comes back with parts of it, or the user has the error."""
    with _lock:
        if _compilations is not None:
            _compilations.withdraw(report)


def report_of(owner: object) -> FusionReport | None:
    """The report of a ``torch.compile`` call, if it has compiled anything."""
    with _lock:
        kept = _of(owner)
        return None if kept is None else kept.compilations.merged()


def report_in_call(start: int) -> FusionReport:
    """What ran or was compiled in a call that began at ``start``, of whichever ``torch.compile`` call."""
    with _lock:
        return FusionReport.merged(known.in_call(start) for known in _all())


@contextlib.contextmanager
def set_aside() -> Iterator[None]:
    """What is compiled in this block is in no report behind it, neither in one of its own nor in those that there were."""
    global _compilations
    with _lock:
        before, kept, _compilations = _compilations, dict(_kept), None
        _kept.clear()
    try:
        yield
    finally:
        with _lock:
            _compilations = before
            _kept.clear()
            _kept.update(kept)


def last_report() -> FusionReport | None:
    """The report of the most recent compilation through moefuse, or None if there was none.

    It covers every frame of the ``torch.compile`` call that compiled something most recently, the latest compilation of each, and the
    layers that have run so far with the code of an equal one; the object is a copy and does not change afterwards. Of models whose layers
    are compiled one by one, :func:`moefuse.reports` has all. Where modules call moefuse's ops outside of ``torch.compile``
    (``experts_implementation="moefuse"``), and nothing else is to say, it says that; :func:`moefuse.explain` has their names.
    """
    with _lock:
        report = None if _compilations is None else _compilations.merged()
    found = called.texts() if report is None or not (report.fused or report.skipped) else []
    if found:
        report = FusionReport() if report is None else report
        report.called = found
    return _with_notes(report)


def reports() -> Reports:
    """The reports of all ``torch.compile`` calls since ``torch.compiler.reset()`` whose functions or modules are still there.

    A tuple with one :class:`FusionReport` for each, in the order in which they were compiled for the first time. Its text is one table.
    """
    with _lock:
        found = [known.merged() for known in _all()]
    return Reports(report for report in map(_with_notes, found) if report is not None)


def _with_notes(report: FusionReport | None) -> FusionReport | None:
    if report is not None:
        report.notes += [note for note in quietly.notes() if note not in report.notes]
    if report is not None and report.fused:
        report.notes += [note for note in slow_paths.notes() if note not in report.notes]
    return report


def _module(traced: _torch_private.Traced | None, report: FusionReport) -> object:
    """What tells the compilations of one frame apart that stand side by side: the module whose method it is, else those it has code of."""
    owner = _method_of(traced)
    if owner is not None:
        return id(owner)
    return frozenset(module for module, _ in places(report))


def _mode(traced: _torch_private.Traced | None) -> Mode:
    """In which a frame is compiled: what is fused in one may be refused in the other."""
    return torch.is_grad_enabled(), getattr(_method_of(traced) if traced is not None else _called(), "training", None)


def _called() -> object:
    """The module that is compiled, around a call that Dynamo is not compiling for."""
    call = _torch_private.running_call()
    return None if call is None else getattr(call.function, "__self__", call.function)


def _method_of(traced: _torch_private.Traced | None) -> nn.Module | None:
    """The module whose method is traced: the first argument, or in what is behind a break the variable with the usual name."""
    scope = traced.local_scope if traced is not None else {}
    owner = scope.get("self", next(iter(scope.values()), None))
    return owner if isinstance(owner, nn.Module) and not isinstance(owner, nn.ModuleList) else None
