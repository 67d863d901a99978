"""Layers to measure by themselves: one of each kind that was fused, with the inputs that it gets in the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moefuse import _torch_private
from moefuse.gains.compare import Compared
from moefuse.report.entries import Fused
from moefuse.report.grouping import grouped_fused, module_names
from moefuse.report.report import FusionReport


@dataclass(frozen=True)
class Layer:
    """A module and a call of it.

    Attributes:
        name: of all layers that it stands for.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def of(model: Callable[..., Any], report: FusionReport, whole: Compared) -> tuple[list[Layer], list[str]]:
    """(the layers, notes on what cannot be measured by itself). One call in eager shows what they are given."""
    if not isinstance(model, nn.Module):
        return [], ["layers are measured by themselves in modules only"] if report.fused else []
    found: list[Layer] = []
    alone: list[str] = []
    kinds = [(group[0], module_names([fused.module for fused in group], report.root)) for group in grouped_fused(report.fused)]
    seen = _seen(model, [first for first, _ in kinds], whole)
    for first, name in kinds:
        place = _called(first.module, seen)
        if place:
            module, args, kwargs = seen[place]
            shown = name if place == first.module else f"{place} with {name}"
            found.append(Layer(shown, module, args, kwargs))
        elif first.module:
            alone.append(f"{name} is not measured by itself: it is not called as a module")
    return found, alone


def _called(path: str, seen: dict[str, Any]) -> str:
    """The nearest module at or around a path that is called; empty for the model, which is measured already."""
    while path and path not in seen:
        path = path.rpartition(".")[0]
    return path


def _seen(model: nn.Module, wanted: list[Fused], whole: Compared) -> dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Path -> module and arguments of the first call, of the modules with fused layers and those around them."""
    modules = dict(model.named_modules())
    paths = {".".join(parts[:n]) for fused in wanted for parts in [fused.module.split(".")] for n in range(1, len(parts) + 1)}
    seen: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = {}

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in seen:
                given, named = _torch_private.map_tensors(_kept, (args, kwargs))
                seen[path] = (module, given, named)

        return hook

    whole.prepare()
    with contextlib.ExitStack() as hooks:
        for path in paths & set(modules) - {""}:
            handle = modules[path].register_forward_pre_hook(note(path), with_kwargs=True)
            hooks.callback(handle.remove)
        whole.call.once(whole.function)
    return seen


def _kept(value: Tensor) -> Tensor:
    """As it is now: what follows in the model may write to it."""
    if isinstance(value, nn.Parameter):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)
