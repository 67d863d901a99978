"""Grad mode and autocast at every node: operations that switch them stand in the graph."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call
from moefuse.passes.graph.op_classes import MODES

Mode = tuple[bool, tuple[str, ...]]
"""Whether gradients are recorded, and the autocast contexts from the outermost on."""


def modes(calls: Mapping[Node, Call | None]) -> dict[Node, Mode]:
    """The mode behind every node, of calls in the order of the program."""
    found: dict[Node, Mode] = {}
    mode: Mode = (torch.is_grad_enabled(), ())
    for node, call in calls.items():
        if call is not None and call.name in MODES:
            mode = _switched(call, *mode)
        found[node] = mode
    return found


def _switched(call: Call, grad: bool, casts: tuple[str, ...]) -> Mode:
    """Grad mode and autocast contexts after a switch."""
    if call.name == "_set_grad_enabled":
        return bool(call.args[0]), casts
    if call.name.startswith("_exit"):
        return grad, casts[:-1]
    return grad, (*casts, str(call.args))
