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
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from moefuse import _torch_private, called, explaining, slow_paths
from moefuse.module_names import roots_of
from moefuse.module_tree import tree_of
from moefuse.report import Fused, FusionReport, Reports, done_instead
from moefuse.runs import Ran, now
from moefuse.served import Served, watch

Mode = tuple[bool, bool | None]
"""Whether gradients are recorded, and whether a module is in training; None where there is no module."""


class Place(NamedTuple):
    """What a report is about: a frame, the mode it is compiled in, what tells apart modules that run its code, and the models around it."""

    frame: object
    mode: Mode
    module: object
    roots: dict[str, weakref.ref[nn.Module]]


class Lost(NamedTuple):
    """What a frame has no longer fused, and all reports that there were then."""

    fused: list[Fused]
    known: list[FusionReport]
    frame: object


_Once = dict[object, dict[tuple[str, str], tuple[Fused, frozenset[str]]]]
"""For a frame: what was fused where, and the names of the weights."""

_KINDS = 16
"""So many graphs of a frame are known, besides the last; torch makes eight of one code."""

_TOLD = ("lost", "nothing-found")
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

    @property
    def last(self) -> int:
        return self.made if self.ran is None else self.ran.last

    def in_call(self, start: int) -> bool:
        """Whether it is of a call that began at ``start``; what nobody knows of ran in each."""
        return self.last >= start or (self.ran is None and bool(self.report.fused))

    def whole(self) -> FusionReport:
        """The report with all modules that it is about, less what ran otherwise since."""
        report = self.report if self.served is None else self.served.applied(self.report)
        kept = [f for f in report.fused if self.lost.get((f.module, f.location), 0) <= self.last] if self.lost else report.fused
        return dataclasses.replace(report, fused=kept)


class Compilations:
    """The reports of several graphs, as one."""

    def __init__(self) -> None:
        self._known: dict[object, _Compilation] = {}
        self._roots: dict[str, weakref.ref[nn.Module]] = {}
        self.epoch = _torch_private.epoch()

    def ended(self) -> None:
        """A call that has compiled something is at its end."""
        for known in self._all():
            known.ended = known.ended or now()

    def record(self, report: FusionReport, place: Place) -> None:
        """Remember one graph's report."""
        self._roots |= place.roots
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
            if _alike(known.mode, mode) and any(is_in(s.module, name) for s in known.report.skipped for name in names)
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
            *before, last = [*self._known.pop(key).before, None]
            if before:
                last, earlier = before[-1], before[:-1]
                last.before = earlier
                self._known[key] = last

    def merged(self) -> FusionReport | None:
        """One report; None if there is none."""
        latest: list[_Compilation] = []
        left: list[FusionReport] = []
        for known in reversed(self._current()):
            report = known.whole()
            left.append(_without(report, known.mode, [newer for newer in latest if newer.frame == known.frame]))
            latest.append(_Compilation(known.frame, report, known.mode, made=known.last, ended=known.ended))
        if not latest:
            return None
        everywhere = {f.module for known in latest for f in known.report.fused}
        for known, report in zip(latest, left, strict=True):
            instead = [f for other in latest if _alike(other.mode, known.mode) for f in other.report.fused]
            since = [other for other in latest if _alike(other.mode, known.mode) and _later(other, known)]
            same = [other for other in latest if other.frame == known.frame]
            told = known.frame in _TOLD
            kept = [s for s in report.skipped if not done_instead(s, instead) and not _in_one_of(s.module, since)]
            report.skipped = [
                dataclasses.replace(s, fused_too=s.module in everywhere if told else _in_one_of(s.module, same)) for s in kept
            ]
        merged = FusionReport.merged(reversed(left))
        merged.modules = tuple((prefix, tree_of(root)) for prefix, weak in self._roots.items() if (root := weak()) is not None)
        return merged


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
    roots = {prefix: weakref.ref(root) for prefix, root in roots_of(traced).items()} if traced is not None else {}
    if frame is None:
        # A direct call of the backend has no frame number; its reports stand side by side.
        frame = object() if report.graph_count else _TOLD[0]
    return Place(frame, _mode(traced) if mode is None else mode, _module(traced, report), roots)


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
        done = _fused(report)
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
        lost = _gone(kept, frame, modules) if not known or any(place in _TOLD for place in known) else []
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


def is_in(module: str, name: str) -> bool:
    """Whether a module is another one or inside of it."""
    return not name or f"{module}.".startswith(f"{name}.")


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


def _in_one_of(module: str, found: list[_Compilation]) -> bool:
    """Whether a module is, or belongs to, one that is fused in some compilations."""
    return any(is_in(module, f.module) for known in found for f in known.report.fused)


def _later(other: _Compilation, known: _Compilation) -> bool:
    """Whether one ran in a call behind that in which another was made."""
    if known.frame in _TOLD:
        return other.made > known.made
    return bool(known.ended) and other.made > known.ended


def _fused(report: FusionReport) -> set[tuple[str, str]]:
    return {(f.module, f.location) for f in report.fused}


def _alike(first: Mode, second: Mode) -> bool:
    """Whether two frames may be of one call; a function has no mode of training."""
    return first[0] == second[0] and (first[1] == second[1] or None in (first[1], second[1]))


def _places(report: FusionReport) -> list[tuple[str, str]]:
    return [*((f.module, f.location) for f in report.fused), *((s.module, s.location) for s in report.skipped)]


def _without(report: FusionReport, mode: Mode, newer: list[_Compilation]) -> FusionReport:
    """A report less what later compilations of the same frame say: all of a layer in this mode, the same of a layer in another."""
    here = {place for other in newer if other.mode == mode for place in _places(other.report) if place[0]}
    done = here | {(f.module, f.location) for other in newer if other.mode != mode for f in other.report.fused}
    said = [s for other in newer if other.mode != mode for s in other.report.skipped]
    return dataclasses.replace(
        report,
        fused=[f for f in report.fused if (f.module, f.location) not in done],
        skipped=[s for s in report.skipped if (s.module, s.location) not in here and s not in said],
    )
