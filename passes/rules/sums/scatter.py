"""Scatters: of routing weights into a table, of an expert's rows into the sum, of sorted rows back to their slots."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.facts import Begun, Column, Fill, Finding, Index, Listed, Range, Rows, Sorted, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.counts import counts_of
from moefuse.passes.rules.routing.ids import is_integer, role_axes
from moefuse.passes.rules.routing.masks import constant
from moefuse.passes.rules.routing.tables import _lines_up
from moefuse.passes.rules.sums.accumulate import put, unsort
from moefuse.passes.rules.sums.listed import add


@rule("scatter", "scatter_add")
def on_scatter(ctx: Context, node: Node, target: Node, dim: int, index: Node, src: Any = None, *, value: Any = None) -> Finding:
    """The chosen weights written into a filled [tokens, E] tensor."""
    fill, view = ctx.fact(target), ctx.view(index)
    src = src if value is None else value
    shape = out_shape(node)
    ones = isinstance(fill, Fill) and fill.value == 0.0 and len(shape) == 1 and constant(ctx, src) == 1.0
    if ones and ctx.calls[node].name == "scatter_add":  # type: ignore[union-attr]
        return counts_of(ctx, node, index, shape[0])
    if isinstance(view, Column) and isinstance(fill, Fill | Begun) and is_integer(index):
        return slot_put(ctx, node, fill, view, dim, ctx.fact(src))
    if not isinstance(fill, Fill) or view is None or not is_integer(index):
        return scatter_rows(ctx, node, target, dim, index, src)
    routing = routing_of(ctx, view)
    axes = role_axes(view, routing) if routing is not None else None
    at = normalize(dim, len(shape))
    if routing is None or axes is None or at >= len(axes) or {a.kind for a in axes[at]} - {"k"} or not isinstance(shape[at], int):
        return scatter_rows(ctx, node, target, dim, index, src)
    adds = ctx.calls[node].name == "scatter_add"  # type: ignore[union-attr]
    if adds and fill.value != 0.0:
        return None
    table: Axes = tuple((Atom("e", 0, shape[at]),) if i == at else a for i, a in enumerate(axes))
    weight, number = (ctx.view(src), constant(ctx, src)) if src is not None else (None, None)
    adds = adds or routing.distinct
    exact = weight if adds and fill.value == 0.0 and weight is not None and _lines_up(weight, view) else None
    return Table(table, routing, fill.value, None, node, table, slots=exact, ones=number == 1.0 and fill.value == 0.0)


def slot_put(ctx: Context, node: Node, before: Fill | Begun, ids: Column, dim: int, weights: Any) -> Begun | Table | None:
    """``table.scatter_(1, ids[:, k:k + 1], weights[:, k:k + 1])``, one slot after the other."""
    routing = routing_of(ctx, ids.base)
    roles = role_axes(ids.base, routing) if routing is not None else None
    if routing is None or roles is None or not isinstance(weights, Column) or weights.slot != ids.slot or ids.axes[-1] or weights.axes[-1]:
        return None
    apart = routing.distinct or ctx.calls[node].name == "scatter_add"  # type: ignore[union-attr]
    size, last = out_shape(node)[-1], normalize(dim, len(out_shape(node))) == len(roles) - 1
    if not apart or not last or not isinstance(size, int) or not _lines_up(weights.base, ids.base) or len(out_shape(node)) != len(roles):
        return None
    table: Axes = (*roles[:-1], (Atom("e", 0, size),))
    put = before.put if isinstance(before, Begun) else frozenset[int]()
    begun = before.routing is routing and before.weights.root is weights.base.root if isinstance(before, Begun) else before.value == 0.0
    if not begun or ids.slot in put:
        return None
    put |= {ids.slot}
    if same(len(put), routing.top_k):
        return Table(table, routing, 0.0, None, node, table, slots=weights.base)
    return Begun(table, routing, weights.base, put)


def scatter_rows(ctx: Context, node: Node, target: Node, dim: int, index: Node, src: Any) -> Finding:
    """Rows of an expert added by an index expanded over the features."""

    adds = ctx.calls[node].name == "scatter_add"  # type: ignore[union-attr]
    return scatter_add_rows(ctx, node, target, dim, index, src) if adds else scatter_put_rows(ctx, node, target, dim, index, src)


def scatter_add_rows(ctx: Context, node: Node, target: Node, dim: int, index: Node, source: Any) -> Finding:
    """``out.scatter_add_(0, tok[:, None].expand(-1, H), rows)``."""
    rows, where = ctx.fact(source), ctx.fact(index)
    if not isinstance(rows, Rows | Listed) or dim != 0 or not isinstance(where, Index | Sorted | Range | Listed) or len(where.axes) != 2:
        return None
    if [a.kind for a in where.axes[1]] != ["b"] or not same(where.axes[1][0].size, out_shape(target)[-1]):
        return None
    return add(ctx, node, target, where, rows)


@rule("scatter_reduce")
def on_scatter_reduce(
    ctx: Context, node: Node, target: Node, dim: int, index: Node, src: Any, reduce: str, *, include_self: bool = True
) -> Finding:
    """``scatter_add`` by another name."""
    return scatter_add_rows(ctx, node, target, dim, index, src) if reduce == "sum" and include_self else None


def scatter_put_rows(ctx: Context, node: Node, target: Node, dim: int, index: Node, source: Any) -> Finding:
    """``out.scatter(0, perm[:, None].expand(-1, H), rows)``: back to one row per slot; by an expert's tokens, its rows in their place."""
    rows, where = ctx.fact(source), ctx.fact(index)
    if not isinstance(rows, Rows) or dim != 0 or not isinstance(where, Index | Sorted) or len(where.axes) != 2:
        return None
    if [a.kind for a in where.axes[1]] != ["b"]:
        return None
    if isinstance(where, Sorted):
        return unsort(rows, where) if isinstance(ctx.fact(target), Fill) else None
    whole = where.of == "token" and same(where.axes[1][0].size, out_shape(target)[-1])
    return put(ctx, node, target, where.selection, rows) if whole else None
