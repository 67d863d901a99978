"""Compilations on trial, for :func:`moefuse.explain`: what Dynamo, moefuse and Inductor's front say about a call, and about later calls."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.diagnosis.doors import missed_layers
from moefuse.diagnosis.undo import taken_back
from moefuse.machine import slow_paths
from moefuse.pipeline import rewrite
from moefuse.report.compilations import Compilations
from moefuse.report.doors import history
from moefuse.report.report import FusionReport

_Call = Callable[..., Any]

_CALLS = 4
"""Calls that compile something, each of them, before explain says that all later ones will."""

_SIZES = 4
"""Sizes of the inputs that are tried with one more."""


def explain(model: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FusionReport:
    """The report of :func:`moefuse.explain`."""
    # Neither MOEFUSE_DISABLE nor MOEFUSE_STRICT is meant for a question.
    trial = _Trial(dataclasses.replace(Options.from_user(None)[0], enabled=True, strict=False))
    with _torch_private.not_compiled(model) as inner, _torch_private.borrowed_dynamo() as log:
        call = trial.compiled(inner)
        with taken_back(inner, args, kwargs):
            try:
                call(*args, **kwargs)
            except Exception as error:
                log.refresh()
                told = trial.taken()
                told.graph_breaks = log.breaks
                error.add_note(f"what moefuse.explain had found when the call raised this:\n{told}")
                raise
            log.refresh()
            report = trial.taken()
            report.graph_breaks = log.breaks
            report.skipped += missed_layers.missing(report, (inner, *args, *kwargs.values()), trial.options)
            if report.fused:
                report.notes += _again(trial, lambda: call(*args, **kwargs), log)
        for size in later_sizes((args, kwargs)) if report.fused else ():
            with _torch_private.borrowed_dynamo() as later, taken_back(inner, args, kwargs):
                more, named = _grown((args, kwargs), size)
                report.notes += _with_size(trial, lambda: call(*more, **named), size, report, later)  # noqa: B023
    note = entry.unavailable()
    report.notes += [note] if note is not None else []
    report.notes += slow_paths.notes() if report.fused else []
    return report


def _again(trial: _Trial, call: Callable[[], object], log: _torch_private.TraceLog) -> list[str]:
    """Call until nothing is compiled, and say so if that has no end."""
    for _ in range(_CALLS):
        try:
            call()
        except Exception as error:
            return [f"a second call raises {_text(error)}"]
        if not trial.taken().graph_count:
            return []
    log.refresh()
    reason = f", each for one value of its own ({log.recompiles[-1]})" if log.recompiles else ""
    return [f"every call compiles another graph{reason}; from torch's recompile_limit on all of it runs in eager"]


def _with_size(trial: _Trial, call: Callable[[], object], size: int, first: FusionReport, log: _torch_private.TraceLog) -> list[str]:
    """What the first call fused and a call with one more than ``size`` somewhere does not, which makes Dynamo trace that as a symbol."""
    try:
        with quiet():
            call()
    except Exception as error:
        # Most sizes of most inputs are not the caller's to choose.
        return [f"where inputs have another size than {size}, {_text(error)}"] if _torch_private.compiler_failed(error) else []
    finally:
        report = trial.taken()
    log.refresh()
    known = {(skipped.code, skipped.location) for skipped in first.skipped}
    refused = [f"{s.code} at {s.location}: {s.message}" for s in report.skipped if (s.code, s.location) not in known]
    broken = [reason for reason in log.breaks if reason not in first.graph_breaks]
    # A frame that does not see this size is not compiled again, and what is fused in it stays.
    fewer = len(report.fused) < len(first.fused) and (broken or report.graph_count >= first.graph_count)
    if not refused and not fewer:
        return []
    return [f"less is fused where inputs have another size than {size}: {'; '.join(dict.fromkeys(refused + broken))}"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without log messages: Dynamo reports, as an error of the program, that it cannot take another size."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def later_sizes(inputs: Any) -> list[int]:
    """Some sizes that inputs have; Dynamo compiles zero and one apart from all others, whoever chooses them."""
    found: dict[int, None] = {}

    def look(value: torch.Tensor) -> torch.Tensor:
        if not isinstance(value, torch.nn.Parameter):
            found.update(dict.fromkeys(size for size in value.shape if size > 1))
        return value

    _torch_private.map_tensors(look, inputs)
    return list(found)[:_SIZES]


def _grown(inputs: Any, size: int) -> Any:
    """Inputs with one more wherever they have ``size``: the first entry once again."""

    def grow(value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.nn.Parameter) or size not in value.shape:
            return value
        with torch.no_grad():
            more = value
            for dim in [i for i, n in enumerate(value.shape) if n == size]:
                more = torch.cat((more, more.narrow(dim, 0, 1)), dim)
        return more.requires_grad_(value.requires_grad)

    return _torch_private.map_tensors(grow, inputs)


class _Trial:
    """A Dynamo backend that compiles up to where Inductor writes code, and what it found."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._found = Compilations()

    def compiled(self, model: _Call) -> _Call:
        def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
            frame = entry.frame()
            report, saved = rewrite.rewrite_and_keep(gm, example_inputs, self.options, frame)
            compiler = functools.partial(_torch_private.compile_front, gm, example_inputs)
            compiled = rewrite.compile_or_restore(gm, report, saved, frame, compiler)
            # Behind the compiler: where it gives up on a graph, Dynamo comes back with parts of it.
            self._found.record(report, history.place(report))
            return self._found.watched(report, compiled, example_inputs)

        entry.enable(backend, lambda _arguments: self.options, self._frame_skipped)
        return _torch_private.compile_isolated(model, backend)

    def taken(self) -> FusionReport:
        """What was found since the last time."""
        found, self._found = self._found, Compilations()
        return found.merged() or FusionReport()

    def _frame_skipped(self, found: FusionReport, _own: Options, _owner: object) -> None:
        self._found.record(found, history.place(found))
