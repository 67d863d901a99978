"""Layers whose experts have hooks, in programs that are compiled: they run as they are written, in eager mode, on every rank.

A hook in a loop over experts may break the graph, or be part of an expert's program, and which experts the loop calls depends on the tokens
of a rank: graphs of ranks would have other collectives. In eager mode they do not (``calls.py``). Whether experts have hooks is the same on
all ranks, and so it is what decides; it is asked before a frame is traced, and noted in the layer for Dynamo's guards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as of_all

from moefuse.capture.dynamo import hooks
from moefuse.errors import message
from moefuse.parallel import views
from moefuse.parallel.shard import holders_of
from moefuse.report.entries import Skipped
from moefuse.runtime import words

WHY = "_moefuse_hooked"
"""The attribute of a layer that says which hook its experts have; empty for none. A text, since Dynamo guards what a text is."""
RUNS = "_moefuse_as_written"
"""The attribute that is what runs the layer as it is written then."""

_KINDS = {
    "_forward_hooks": "register_forward_hook",
    "_forward_pre_hooks": "register_forward_pre_hook",
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_ADVICE = "hook the layer's input or output, or remove the hook before the call (the same on all ranks)"

Run = Callable[..., Any]


def note(layer: nn.Module, run: Run) -> str:
    """Have a layer know whether it runs by ``run``, and why; empty where its experts have no hooks. Dynamo must not look into ``run``."""
    why = why_as_written(layer)
    if why and vars(layer).get(WHY) != why:

        def as_written(*args: Any, **kwargs: Any) -> Any:
            with words.because(why):
                return run(*args, **kwargs)

        object.__setattr__(layer, RUNS, torch.compiler.disable(as_written, reason=f"{message('hook', {})}: {why}"))
    object.__setattr__(layer, WHY, why)
    return why


def why_as_written(layer: nn.Module) -> str:
    """The first hook of a module in a layer's experts, and what to do about it; empty if there is none."""
    inside = list(_inside(layer))
    registers = next((f"module.{name.replace('_', '_module_', 1)}" for own, name in _KINDS.items() if _global(own)), "")
    if registers:
        return f"torch.nn.modules.{registers} is for all modules, these experts too: their weights are gathered; {_ADVICE}"
    found = next(((m, name) for m in inside for own, name in _KINDS.items() if vars(m).get(own)), None)
    if found is None:
        return ""
    of, name = found
    return f"{_name(layer, of)} has one ({name}), so the layer runs as it is written, with gathered weights; {_ADVICE}"


def _global(own: str) -> bool:
    return any(getattr(of_all, "_global" + own, None) or ())


def _inside(layer: nn.Module) -> Iterator[nn.Module]:
    """The modules that a loop over experts may call or not: those below what holds the weights, and of the layer's own no router."""
    for holder in holders_of(layer):
        below = (module for module in holder.modules() if module is not holder)
        yield from (module for module in below if holder is not layer or not _holds(module))


def _holds(module: nn.Module) -> bool:
    """Whether a module has Parameters of its own; those of experts are the list's."""
    return any(parameter is not None for inner in module.modules() for parameter in inner._parameters.values())


def _layer(layer: nn.Module) -> str:
    return next((held.where.layer for held in holders_of(layer).values()), "")


def _name(layer: nn.Module, module: nn.Module) -> str:
    path = next((path for path, other in layer.named_modules() if other is module), type(module).__name__)
    return f"{_layer(layer)}.{path}".lstrip(".")


def prepare(root: nn.Module, _: Mapping[str, Any]) -> list[Skipped]:
    """Before a frame is traced: which layers in a module run as they are written, as refusals."""
    found = []
    for layer in root.modules():
        if views.is_spread(layer) and (why := note(layer, getattr(type(layer), views.ONCE))):
            code = inspect.unwrap(views.original(layer).forward).__code__
            place = f"{code.co_filename}:{code.co_firstlineno}"
            found.append(Skipped("hook", f"{message('hook', {})}: {why}", _layer(layer), place))
    return found


@functools.cache
def watch() -> None:
    """From now on each frame of ours is looked at before it is traced: there is a layer whose experts are spread."""
    hooks.before_tracing(prepare)
