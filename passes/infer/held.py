"""Parameters in float32 behind a cast to 16 bits: the op takes them as they are and rounds them as it reads them, so no copy is kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.ops.held import holds
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Axes
from moefuse.passes.ir.facts import View, Weight


def rounds(node: Node, x: Node) -> bool:
    """Whether ``node`` rounds ``x`` from float32 to 16 bits, both here and with a gradient."""
    before, after = tensor(x), tensor(node)
    here = before is not None and after is not None and before.device == after.device
    return here and holds(before.dtype, after.dtype) and not (before.requires_grad and not after.requires_grad)  # type: ignore[union-attr]


def uncast(ctx: Context, value: Any) -> Any:
    """A view or weight of a cast Parameter as one of the Parameter, if nothing writes to that; any other fact as it is."""
    call = ctx.calls.get(value.root) if isinstance(value, View | Weight) else None
    source = call.args[0] if call is not None and call.name == "to" else None
    if not isinstance(source, Node) or not rounds(value.root, source):
        return value
    inner = ctx.fact(source)
    if not isinstance(inner, View) or inner.root.op not in ("placeholder", "get_attr") or ctx.writes.get(ctx.storage[inner.root]):
        return value
    if not _plain(inner.axes):
        return value
    if isinstance(value, Weight):
        same = [axis[0].index for axis in inner.axes] == [*range(len(inner.axes))]
        return replace(value, root=inner.root) if same else value
    return value if not _plain(value.axes) else View(tuple(inner.axes[axis[0].index] for axis in value.axes), inner.root)


def _plain(axes: Axes) -> bool:
    """Whether each dimension is one of the root's."""
    return all(len(axis) == 1 and axis[0].kind == "d" for axis in axes)
