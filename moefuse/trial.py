"""Compilations on trial, for :func:`moefuse.explain`: what Dynamo, moefuse and Inductor's front say about a call, and about later calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moefuse import _torch_private, pipeline
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.report import FusionReport
from moefuse.undo import taken_back

_Call = Callable[..., Any]

_CALLS = 4
"""Calls that compile something, each of them, before explain says that all later ones will."""


def explain(model: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusionReport:
    """The report of :func:`moefuse.explain`."""
    # Neither MOEFUSE_DISABLE nor MOEFUSE_STRICT is meant for a question.
    options = dataclasses.replace(Options.from_user(None)[0], enabled=True, strict=False)
    with _torch_private.not_compiled(model) as inner:
        trial = _Trial(options)
        with _torch_private.borrowed_dynamo() as log, taken_back(inner, args, kwargs):
            trial.compiled(inner)(*args, **kwargs)
        report = trial.report()
        report.graph_breaks = log.breaks
        if report.fused:
            report.notes += _later_calls(inner, args, kwargs, options, report)
    note = entry.unavailable()
    report.notes += [note] if note is not None else []
    return report


def _later_calls(model: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, first: FusionReport) -> list[str]:
    """What changes behind the first call: by sizes that vary, and by what each call leaves behind for the next."""
    trial, graphs, report = _Trial(options), [0], FusionReport()
    with _torch_private.borrowed_dynamo() as log, taken_back(model, args, kwargs):
        call = trial.compiled(model, dynamic=True)
        try:
            while len(graphs) < 2 or (len(graphs) <= _CALLS and graphs[-1] > graphs[-2]):
                call(*args, **kwargs)
                graphs.append(len(trial.reports))
                report = trial.report() if len(graphs) == 2 else report
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            return [f"a later call, where sizes vary, raises {type(error).__name__}: {text}"]
    notes = []
    if len(report.fused) < len(first.fused):
        known = {(skipped.code, skipped.location) for skipped in first.skipped}
        why = [f"{s.code} at {s.location}: {s.message}" for s in trial.report().skipped if (s.code, s.location) not in known]
        why += [reason for reason in log.breaks if reason not in first.graph_breaks]
        notes.append(f"from the second size on, {len(report.fused)} of {len(first.fused)} are fused: {'; '.join(dict.fromkeys(why))}")
    if graphs[-1] > graphs[-2]:
        reason = f", each for one value of its own ({log.recompiles[-1]})" if log.recompiles else ""
        notes.append(f"every call compiles another graph{reason}; from torch's recompile_limit on all of it runs in eager")
    return notes


class _Trial:
    """A Dynamo backend that compiles up to where Inductor writes code, and what it found."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.reports: list[FusionReport] = []
        self._skipped = FusionReport()

    def compiled(self, model: _Call, dynamic: bool | None = None) -> _Call:
        def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
            report = pipeline.rewrite(gm, example_inputs, self._options, entry.frame())
            compiled = _torch_private.compile_front(gm, example_inputs)
            # Behind the compiler: where it gives up on a graph, Dynamo comes back with parts of it.
            self.reports.append(report)
            return compiled

        entry.enable(backend, lambda _arguments: self._options, self._frame_skipped)
        return _torch_private.compile_apart(model, backend, dynamic)

    def report(self) -> FusionReport:
        merged = FusionReport()
        for report in self.reports:
            merged.extend(report)
        merged.skipped += self._skipped.skipped
        return merged

    def _frame_skipped(self, found: FusionReport, _own: Options, _owner: object) -> None:
        self._skipped.skipped += found.skipped
