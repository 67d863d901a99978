"""Measuring a model in eager, with Inductor and with moefuse, and each kind of layer that moefuse fused by itself."""

from __future__ import annotations

import contextlib
import gc
import math
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from moefuse import _torch_private, backend
from moefuse.capture.dynamo import inside
from moefuse.gains import layers
from moefuse.gains.compare import WAYS, Compared, Made, opened
from moefuse.gains.gains import Gains
from moefuse.gains.rows import EAGER, INDUCTOR, MOEFUSE
from moefuse.pipeline import publish
from moefuse.report import history
from moefuse.report.report import FusionReport
from moefuse.tuning import sites
from moefuse.tuning.measure.progress import Progress

OF_THE_MODEL = 0.5
"""Share of the budget that the whole model has, where there are layers to measure."""


def ways(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """In eager, and two compilations that know nothing of each other."""
    return {
        EAGER: function,
        INDUCTOR: _torch_private.compile_isolated(function, "inductor"),
        MOEFUSE: _torch_private.compile_isolated(function, backend.backend),
    }


def run(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    train: bool,
    budget_s: float,
    progress: bool,
    made: Made = ways,
    clock: Callable[[], float] = time.perf_counter,
) -> Gains:
    """:func:`moefuse.benchmark`; see there. Tests bring their own calls (``made``) and their own clock."""
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not 0 < budget_s < math.inf:
        raise ValueError(f"budget_s must be a positive number of seconds, got {budget_s!r}")
    start = time.monotonic()
    bar = Progress(WAYS + 1, progress, "moefuse.benchmark", "step", lines=sys.stderr.isatty())
    try:
        with _torch_private.not_compiled(model) as inner, _left_as_it_was(), _in_mode(inner, train), bar:
            found = _measured(inner, args, kwargs, train, budget_s, bar, made, clock)
    finally:
        gc.collect()  # what was compiled here holds memory in circles
    found.seconds = time.monotonic() - start
    return found


def _measured(
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    budget_s: float,
    bar: Progress,
    made: Made,
    clock: Callable[[], float],
) -> Gains:
    _refuse_lazy(inner)
    with opened(inner, args, kwargs, train, made, clock) as whole:
        whole.warm_up(bar)
        report = history.last_report() or FusionReport()
        captured, notes = layers.of(inner, report, whole)
        bar.more(len(captured) * (WAYS + 1))
        share = budget_s * OF_THE_MODEL if captured else budget_s
        model = whole.timed(share, bar, fused=bool(report.fused))
    found = Gains(model, train=train, device=_device(whole), report=report, notes=[*whole.notes, *notes])
    for layer in captured:
        with history.set_aside(), opened(layer.module, layer.args, layer.kwargs, train, made, clock) as alone:
            alone.warm_up(bar, layer.name)
            own = history.last_report()
            found.layers.append(alone.timed((budget_s - share) / len(captured), bar, layer.name, own is not None and bool(own.fused)))
        found.notes += alone.notes
    if not whole.devices:
        found.notes.append("memory is measured on CUDA devices only")
    return found


@contextlib.contextmanager
def _left_as_it_was() -> Iterator[None]:
    """Dynamo, reports, warnings and what warmup would find are what they were when the block ends."""
    with history.set_aside(), publish.warned_later(), sites.set_aside(), inside.set_aside(), _torch_private.borrowed_dynamo():
        yield


@contextlib.contextmanager
def _in_mode(model: Callable[..., Any], train: bool) -> Iterator[None]:
    """In training with gradients, or in inference without; modules that are in the mode already stay, and all others go back to theirs."""
    owner = getattr(model, "__self__", model)
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    before = [module.training for module in modules]
    if isinstance(owner, nn.Module) and owner.training != train:
        owner.train(train)
    try:
        with torch.set_grad_enabled(train):
            yield
    finally:
        for module, mode in zip(modules, before, strict=True):
            module.training = mode


def _refuse_lazy(model: Callable[..., Any]) -> None:
    owner = getattr(model, "__self__", model)
    if isinstance(owner, nn.Module) and any(map(nn.parameter.is_lazy, owner.parameters())):
        raise ValueError("moefuse.benchmark: the model has weights without a shape (lazy modules): call it once first")


def _device(whole: Compared) -> str:
    names = dict.fromkeys(torch.cuda.get_device_name(device) for device in whole.devices)
    threads = torch.get_num_threads()
    return ", ".join(names) or f"CPU, {platform.machine()}, {threads} thread{'s' if threads != 1 else ''}"
