"""Grad mode and autocast at every node: operations that switch them stand in the graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.op_classes import MODES

Mode = tuple[bool, tuple[tuple[Any, ...], ...]]
"""Whether gradients are recorded, and the autocast contexts from the outermost on: (device type, dtype, enabled, cache enabled) of each."""


def modes(calls: Mapping[Node, Call | None]) -> dict[Node, Mode]:
    """The mode behind every node, of calls in the order of the program."""
    found: dict[Node, Mode] = {}
    mode: Mode = (torch.is_grad_enabled(), ())
    for node, call in calls.items():
        if call is not None and call.name in MODES:
            mode = _switched(call, *mode)
        found[node] = mode
    return found


@contextlib.contextmanager
def entered(mode: Mode) -> Iterator[None]:
    """The autocast contexts of a mode, for nodes that run outside of their graph."""
    with contextlib.ExitStack() as stack:
        for device, dtype, enabled, cached in mode[1]:
            stack.enter_context(torch.autocast(device, dtype, enabled=enabled, cache_enabled=cached))
        yield


def autocast_dtype(mode: Mode, device: str) -> torch.dtype | None:
    """What autocast rounds to on a type of device, None where it is off; outside of the graph's own contexts the caller's counts."""
    own = [context for context in mode[1] if context[0] == device]
    if not own:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    _, dtype, enabled, _ = own[-1]
    return (dtype or torch.get_autocast_dtype(device)) if enabled else None


def _switched(call: Call, grad: bool, casts: tuple[tuple[Any, ...], ...]) -> Mode:
    """Grad mode and autocast contexts after a switch."""
    if call.name == "_set_grad_enabled":
        return bool(call.args[0]), casts
    if call.name.startswith("_exit"):
        return grad, casts[:-1]
    return grad, (*casts, call.args)
