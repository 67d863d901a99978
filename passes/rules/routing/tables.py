"""Dense routing tables [tokens, E]: scatters of the chosen weights, and what softmax, sigmoid or a product make of them.

What matters is the value where an expert was *not* chosen: a table is a routing weight only when that is exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import FILLS
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.operands import padded, real
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.facts import Column, Fill, Finding, Mask, Routing, Table, View
from moefuse.passes.rules import rule


@rule(*FILLS)
def on_fill(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Finding:
    value = tensor(node)
    if value is None:
        return None
    name = ctx.calls[node].name  # type: ignore[union-attr]
    content = 0.0 if "zeros" in name else 1.0 if "ones" in name else math.nan
    if "full" in name:
        given = kwargs.get("fill_value", args[1] if len(args) == 2 else args[-1] if args else None)
        if not isinstance(given, int | float):
            return None
        content = float(given)
    return Fill(tuple((Atom("d", i, s),) for i, s in enumerate(shape_of(value))), content)


def _lines_up(weight: View, ids: View) -> bool:
    """Whether a source tensor is indexed as the ids are: the same dims in the same order."""
    return [[a.index for a in axis if a.kind == "d"] for axis in weight.axes] == [
        [a.index for a in axis if a.kind == "d"] for axis in ids.axes
    ]


def unary(ctx: Context, node: Node, table: Table, *args: Any, **kwargs: Any) -> Table | None:
    """A pointwise function of a table: computed once on the fill value to learn what unchosen experts become."""
    call = ctx.calls[node]
    value = tensor(node)
    if call is None or value is None or any(isinstance(a, Node) for a in (*args, *kwargs.values())):
        return None
    at_fill = torch.full((1,), table.fill, dtype=torch.float64)
    function = getattr(at_fill, call.name, None) or getattr(torch.nn.functional, call.name, None)
    if function is None:
        return None
    try:
        fill = float(function(*args, **kwargs) if hasattr(at_fill, call.name) else function(at_fill, *args, **kwargs))
    except (TypeError, RuntimeError):
        return None
    return derived(node, table, fill)


def derived(node: Node, table: Table, fill: float) -> Table:
    """A table computed from another; its values are read from the graph."""
    whole = table.expert is None
    return replace(table, fill=fill, root=node if whole else None, root_axes=table.axes if whole else (), slots=None, ones=False)


def table_with(ctx: Context, node: Node, name: str, table: Table, other: Any, table_first: bool) -> Finding:
    """A table and a plain tensor or number: zero stays zero under a product or when it is divided."""
    axes = _broadcast(table, other, node)
    if axes is None:
        return None
    if name == "mul" or (name == "div" and table_first):
        if table.fill != 0.0:
            return None
        if isinstance(other, Table):
            return _product(node, table, other)
        if isinstance(other, View) and table.ones and (table.expert is not None or _of_its_slot(table, other)):
            return _column(node, replace(table, axes=axes), other)
        return derived(node, replace(table, axes=axes), 0.0)
    return None


def _product(node: Node, a: Table, b: Table) -> Table | None:
    """A table times the 0/1 table of the same routing and expert is the table."""
    if a.routing is not b.routing or (a.expert, a.slot) != (b.expert, b.slot) or b.fill != 0.0:
        return None
    if a.ones or b.ones:
        kept = b if a.ones else a
        return kept if kept.expert is not None else replace(kept, root=node, root_axes=kept.axes)
    return derived(node, a, 0.0) if a.expert is None else None


def _column(node: Node, table: Table, other: View) -> Table | None:
    """One expert's 0/1 column times a value per token: a routing weight when there is one slot per token."""
    if isinstance(other, Column) and _of_its_slot(table, other):
        whole = table.expert is None
        return replace(table, slots=other.base, ones=False, root=node if whole else None, root_axes=table.axes if whole else ())
    if table.routing.top_k != 1:
        return None
    return replace(table, slots=other, ones=False) if _per_token(other, table.routing) else None


def _of_its_slot(table: Table, other: View) -> bool:
    """Whether a value is the column of the slot that a table speaks of."""
    return isinstance(other, Column) and table.slot == other.slot and not same(table.routing.top_k, 1)


def _per_token(view: View, routing: Routing) -> bool:
    dims = [a for axis in view.axes for a in axis if a.kind == "d" and not same(a.size, 1)]
    extent: Any = 1
    for a in dims:
        extent = extent * a.size
    return same(extent, routing.num_tokens)


def _broadcast(table: Table, other: Any, node: Node) -> Axes | None:
    rank = len(out_shape(node))
    axes = padded(table.axes, rank)
    if not isinstance(other, View | Table | Mask):
        return axes
    return None if any(not real(mine) and real(axis) for mine, axis in zip(axes, padded(other.axes, rank), strict=True)) else axes
