"""The functions that users call: compile, explain."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from moefuse import _torch_private, pipeline
from moefuse import backend as _backend
from moefuse.capture import entry
from moefuse.config import Options
from moefuse.report import FusionReport

_Model = TypeVar("_Model", bound=Callable[..., Any])


def compile(
    model: _Model,
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> _Model:
    """``torch.compile(model, backend="moefuse", ...)``, with the options checked now instead of at the first call.

    Raises:
        OptionError: for an unknown option or an illegal value.
        RuntimeError: torch's own, for an unknown mode, or mode and options together.
    """
    _check_callable("compile", model)
    _backend.parse(mode, options)
    plain: Any = None if options is None else dict(options)
    compiled: Any = torch.compile(model, backend=_backend.backend, mode=mode, options=plain, dynamic=dynamic, fullgraph=fullgraph)
    return cast(_Model, compiled)


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> FusionReport:
    """Run ``model(*args, **kwargs)`` once and report what moefuse finds in it, without compiling for speed.

    A model that is compiled already is looked at from under its compilation. Nothing stays behind: neither what the user has compiled,
    nor Dynamo's counters, nor the random state is changed, and :func:`moefuse.last_report` still gives the last real compilation. What
    the model does by itself (a cache it fills, a buffer it updates) it does here too.

    Returns:
        The report; ``graph_breaks`` has every place where Dynamo left the graph, and frames that it did not trace at all.
    """
    _check_callable("explain", model)
    # Neither MOEFUSE_DISABLE nor MOEFUSE_STRICT is meant for a question.
    options = dataclasses.replace(Options.from_user(None)[0], enabled=True, strict=False)
    report = FusionReport()

    def fuse_only(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> _torch_private.CompiledFn:
        report.extend(pipeline.rewrite(gm, example_inputs, options, entry.frame()))
        return gm.forward

    def skipped(found: FusionReport, _own: Options, _owner: object) -> None:
        report.skipped += found.skipped

    entry.enable(fuse_only, lambda _arguments: options, skipped)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with (
        _torch_private.borrowed_dynamo() as log,
        _torch_private.not_compiled(model) as inner,
        torch.random.fork_rng(devices=devices),
    ):
        _torch_private.compile_apart(inner, fuse_only)(*args, **kwargs)
    report.graph_breaks = log.breaks
    note = entry.unavailable()
    report.notes += [note] if note is not None else []
    return report


def _check_callable(name: str, model: object) -> None:
    if not callable(model):
        raise TypeError(f"moefuse.{name} needs a module or a function, got {type(model).__name__}")
