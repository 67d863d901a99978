"""What views of the expert ids count: tokens and slots, and the rows of a selection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import product, same, shape_of
from moefuse.passes.infer.ranges import holds
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, atoms, extent
from moefuse.passes.ir.facts import Column, Routing, View


def is_integer(node: object) -> bool:
    """Whether a node is an integer tensor."""
    value = tensor(node)
    return value is not None and value.dtype in (torch.int64, torch.int32)


def as_ids(ctx: Context, node: Node, highest: int) -> View | None:
    """The view of ids that a tensor is, perhaps in another dtype, in which 0 to ``highest`` are themselves and nothing else is."""
    view, value = ctx.view(node), tensor(node)
    if view is None or value is None or is_integer(node):
        return view
    if value.dtype == torch.bool or not holds(value.dtype, (0, highest)):
        return None
    if not value.dtype.is_floating_point:  # whose cast is known to keep every id, where it is a view of them
        return view if is_integer(view.base.root if isinstance(view, Column) else view.root) else None
    return _uncast(ctx, view)


def _uncast(ctx: Context, view: View) -> View | None:
    """A view of floats as one of the integers that these were; what is too high for a float stays above what it can hold."""
    if isinstance(view, Column):
        base = _uncast(ctx, view.base)
        return replace(view, base=base) if type(base) is View else None
    call = ctx.calls.get(view.root)
    source = call.args[0] if call is not None and call.name == "to" and call.args and ctx.storage[view.root] not in ctx.writes else None
    own, before = ctx.view(view.root), ctx.view(source)
    if not isinstance(source, Node) or own is None or before is None or not is_integer(source):
        return None
    if isinstance(before, Column):
        return before if view.axes == own.axes else None
    made, old = list(atoms(own.axes)), list(atoms(before.axes))
    if len(made) != len(old) or not all(a.kind == b.kind == "d" and same(a.size, b.size) for a, b in zip(made, old, strict=True)):
        return None
    names = {a.index: b for a, b in zip(made, old, strict=True)}
    return replace(view, root=before.root, axes=tuple(tuple(names[a.index] if a.kind == "d" else a for a in axis) for axis in view.axes))


def role_axes(view: View, routing: Routing) -> Axes | None:
    """The axes of a view of the ids, as tokens and slots."""
    last = len(routing.tokens)
    out: list[Axis] = []
    for axis in view.axes:
        new: list[Atom] = []
        for a in axis:
            if a.kind == "b" and not same(a.size, 1):
                return None
            if a.kind == "d":
                new.append(Atom("k", 0, a.size) if routing.has_slots and a.index == last else Atom("t", a.index, a.size))
        out.append(tuple(new))
    return tuple(out)


def every_slot(axis: Axis, routing: Routing) -> bool:
    """Whether an axis counts through all slots, token by token."""
    names = [(a.kind, a.index) for a in axis if not same(a.size, 1)]
    return names == sorted(names, key=lambda a: ("tk".index(a[0]), a[1])) and same(extent(axis), routing.num_tokens * routing.top_k)


def all_of_them(axes: Axes | None, routing: Routing) -> bool:
    """Whether a view of the ids, in whatever order, shows each of them once."""
    return axes is not None and same(product(extent(a) for a in axes), routing.num_tokens * routing.top_k)


def row_axis(node: Node) -> Axis:
    """The rows of a selection, with the length Dynamo gave the node."""
    shape = out_shape(node)
    return (Atom("r", 0, shape[0] if shape else 0),)


def out_length(node: Node) -> Any:
    """The length of the first tensor a node returns."""
    value = fake(node)
    first = value[0] if isinstance(value, tuple | list) and value else value
    return shape_of(first)[0] if isinstance(first, torch.Tensor) and first.dim() else 0


def is_slot_weight(view: View, routing: Routing) -> bool:
    """Whether a plain tensor has one number for each slot, in the order of the slots."""
    dims = [a.index for axis in view.axes for a in axis if a.kind == "d"]
    total: Any = 1
    for axis in view.axes:
        total = total * extent(axis)
    return dims == sorted(dims) and same(total, routing.num_tokens * routing.top_k)
