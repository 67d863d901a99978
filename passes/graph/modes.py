"""Grad mode and autocast at every node: operations that switch them stand in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.op_classes import MODES

Contexts = tuple[tuple[Any, ...], ...]


class Mode(NamedTuple):
    """What operations run under. Inference mode computes what no_grad does.

    Attributes:
        grad: whether gradients are recorded.
        casts: the autocast contexts that change something, from the outermost on: (device type, dtype, enabled, cache enabled) of each.
    """

    grad: bool
    casts: Contexts


def modes(calls: Mapping[Node, Call | None]) -> dict[Node, Mode]:
    """The mode behind every node, of calls in the order of the program."""
    found: dict[Node, Mode] = {}
    before: dict[Node, Mode] = {}
    mode = ambient()
    for node, call in calls.items():
        if call is not None and call.name in MODES:
            before[node] = mode
            mode = _left(mode, before[call.args[0]], call.name) if call.args[0] in before else _switched(mode, call)
        found[node] = mode
    return found


def ambient() -> Mode:
    """The caller's mode."""
    return Mode(torch.is_grad_enabled(), ())


@contextlib.contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """The autocast contexts of a mode, for nodes that run outside of their graph."""
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, cached in mode.casts:
            stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached))
        yield


def autocast_dtype(mode: Mode, device: str) -> torch.dtype | None:
    """What autocast rounds to on a type of device, None where it is off; outside of the graph's own contexts the caller's counts."""
    own = [context for context in mode.casts if context[0] == device]
    if not own:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    _, dtype, enabled, _ = own[-1]
    return (dtype or torch.get_autocast_dtype(device)) if enabled else None


def _switched(mode: Mode, call: Call) -> Mode:
    """The mode behind a switch, or behind the beginning of a context."""
    if call.name == "_set_grad_enabled":
        return mode._replace(grad=bool(call.args[0]))
    if call.name == "_enter_inference_mode":
        # Inference mode switched off records gradients, also inside of no_grad.
        return mode._replace(grad=not call.args[0])
    device = call.args[0]
    inside = mode._replace(casts=(*mode.casts, call.args))
    # A context that asks for what is there changes nothing.
    return mode if autocast_dtype(inside, device) == autocast_dtype(mode, device) else inside


def _left(mode: Mode, before: Mode, name: str) -> Mode:
    """The mode behind the end of a context, in front of which there was another."""
    if name == "_exit_autocast":
        return mode._replace(casts=before.casts)
    return mode._replace(grad=before.grad)
