"""Assignments by index: read-modify-write of an accumulator, assignment of an expert's rows, inverting a permutation, un-sorting rows."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Atom, Axis
from moefuse.passes.ir.facts import Buffer, Domain, Fill, Index, Mask, Pieces, Rows, Selection, Sorted, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.masks import selection
from moefuse.passes.rules.routing.sort import assign_inverse
from moefuse.passes.rules.rows.advanced_index import tokens_together
from moefuse.passes.rules.sums import segments
from moefuse.passes.rules.sums.scatter_by_expert import fill_slots

_ALL = slice(None, None, None)


@rule("setitem")
def on_setitem(ctx: Context, node: Node, target: Node, index: Any, value: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if not items:
        return None
    filled = fill_slots(ctx, node, target, [ctx.fact(i) if isinstance(i, Node) else i for i in _tensors(items)], value)
    if filled is not None or any(i != _ALL for i in items[1:]):
        return filled
    where = ctx.fact(items[0]) if isinstance(items[0], Node) else None
    current = ctx.fact(target)
    if isinstance(items[0], slice) and isinstance(current, Fill | Pieces):
        return segments.fill(ctx, node, current, items[0].start, items[0].stop, value) if items[0].step is None else None
    if isinstance(where, Sorted) and isinstance(current, Fill):
        rows = ctx.fact(value)
        return unsort(rows, where) if isinstance(rows, Rows) else assign_inverse(ctx, node, target, where, value)
    chosen = _selection(where)
    return None if chosen is None else put(ctx, node, target, chosen, ctx.fact(value))


def put(ctx: Context, node: Node, target: Node, chosen: Selection, rows: Any) -> Any:
    """An accumulator whose rows at a selection are replaced: by themselves and an expert's rows, or by an expert's rows."""
    if isinstance(rows, Buffer) and rows.target is target and rows.rows is not None and rows.selection.same(chosen):
        return extend(ctx, node, target, rows.rows, once=not chosen.by_token)
    if isinstance(rows, Rows) and rows.domain.selection is not None and rows.domain.selection.same(chosen):
        before = ctx.fact(target)
        # Where a token has several experts, nothing may be lost: the one that writes is the first, and stands for no others.
        first = isinstance(before, Fill) and before.value == 0.0 and len(ctx.members(chosen.expert)) == 1
        if chosen.routing.top_k != 1 and not first:
            return ctx.lost("not-weighted", node)
        return extend(ctx, node, target, rows, once=False, replaced=True)
    return None


def _tensors(items: list[Any]) -> list[Any]:
    """An index without the full slices behind."""
    while items and items[-1] in (_ALL, Ellipsis):
        items = items[:-1]
    return items


def _selection(where: Any) -> Selection | None:
    if isinstance(where, Index) and where.of == "token":
        return where.selection
    if isinstance(where, Mask | Table):
        found = selection(where, tokens_together(where.axes)[1])
        return found[0] if found is not None and found[1] == ("token",) else None
    return None


def extend(ctx: Context, node: Node, target: Node, rows: Rows, *, once: bool, replaced: bool = False) -> Any:
    """The accumulator with one more expert's rows."""
    from moefuse.passes.rules.sums.reduce import accumulated

    return accumulated(ctx, node, target, rows, once=once, replaced=replaced)


def unsort(rows: Rows, index: Sorted) -> Rows | None:
    """``out[perm] = rows``: back to one row per (token, slot)."""
    routing = index.order.routing
    if rows.domain.name != "sorted" or rows.domain.order is not index.order or index.of != "slot":
        return None
    slots: Axis = (*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k))
    return Rows((slots, *rows.axes[1:]), Domain("slots", routing), rows.expr)


@rule("index_copy")
def on_index_copy(ctx: Context, node: Node, target: Node, dim: int, index: Node, source: Node) -> Any:
    where, rows, current = ctx.fact(index), ctx.fact(source), ctx.fact(target)
    if dim == 0 and isinstance(where, Sorted) and isinstance(rows, Rows) and isinstance(current, Fill):
        return unsort(rows, where)
    return None
