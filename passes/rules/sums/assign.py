"""Assignments by index: read-modify-write of an accumulator, assignment of an expert's rows, inverting a permutation, un-sorting rows."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import Size, product, same
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import atoms, extent
from moefuse.passes.ir.facts import Buffer, Fill, Finding, Mask, Pieces, Rows, Sorted, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.masks import one_index, selection, token_selection, tokens_together
from moefuse.passes.rules.routing.sort import assign_inverse
from moefuse.passes.rules.rows.boolean_mask import by_rows_of
from moefuse.passes.rules.rows.index import up_to_last, without_features
from moefuse.passes.rules.sums import segments
from moefuse.passes.rules.sums.accumulate import put, unsort
from moefuse.passes.rules.sums.scatter_by_expert import fill_slots

_ALL = slice(None, None, None)


@rule("setitem")
def on_setitem(ctx: Context, node: Node, target: Node, index: Any, value: Any) -> Finding:
    items = without_features(ctx, up_to_last(index if isinstance(index, tuple) else [index], len(out_shape(target))), out_shape(target))
    if not items:
        return None
    filled = fill_slots(ctx, node, target, [ctx.fact(i) if isinstance(i, Node) else i for i in items], value)
    together = one_index([ctx.fact(i) if isinstance(i, Node) else i for i in items], out_shape(target)) if filled is None else None
    if together is not None and not any(i != _ALL for i in items[together[0] :]):
        return put(ctx, node, target, together[1].selection, ctx.fact(value))
    if filled is not None or any(i != _ALL for i in items[1:]):
        return filled
    where = ctx.fact(items[0]) if isinstance(items[0], Node) else None
    current = ctx.fact(target)
    if isinstance(items[0], slice) and isinstance(current, Fill | Pieces):
        return segments.fill(ctx, node, current, items[0].start, items[0].stop, value) if items[0].step is None else None
    if isinstance(where, Sorted) and isinstance(current, Fill):
        rows = ctx.fact(value)
        return unsort(rows, where) if isinstance(rows, Rows) else assign_inverse(ctx, node, target, where, value)
    chosen = token_selection(where)
    return None if chosen is None else put(ctx, node, target, chosen, ctx.fact(value))


@rule("index_copy")
def on_index_copy(ctx: Context, node: Node, target: Node, dim: int, index: Node, source: Node) -> Finding:
    where, rows, current = ctx.fact(index), ctx.fact(source), ctx.fact(target)
    if dim == 0 and isinstance(where, Sorted) and isinstance(rows, Rows) and isinstance(current, Fill):
        return unsort(rows, where)
    return on_setitem(ctx, node, target, (*[_ALL] * normalize(dim, len(out_shape(target))), index), source)


@rule("masked_scatter")
def on_masked_scatter(ctx: Context, node: Node, target: Node, mask: Node, source: Node) -> Finding:
    """``zeros.masked_scatter(mask[:, None], rows)``: an expert's rows where they came from."""
    where, rows, shape = ctx.fact(mask), ctx.fact(source), out_shape(target)
    narrow = by_rows_of(where, shape) if isinstance(where, Mask | Table) else None
    if narrow is None or not isinstance(rows, Rows | Buffer):
        return None
    if not _in_order(rows, product(shape[len(narrow.axes) :])):
        return ctx.lost("tokens-differ", node, detail="an expert's rows are not put back as they stand")
    filled = fill_slots(ctx, node, target, [narrow], source)
    if filled is not None:
        return filled
    found = selection(narrow, tokens_together(narrow.axes)[1])
    if found is None or found[1] != ("token",):
        return None
    elsewhere = ctx.lost("tokens-differ", node, detail="an expert's rows are not put where they were taken from")
    return put(ctx, node, target, found[0], rows) or elsewhere


def _in_order(rows: Rows | Buffer, width: Size) -> bool:
    """Whether the elements come row by row, ``width`` of each."""
    flat = atoms(rows.axes)
    if [a.kind for a in flat] != ["r", *["f"] * (len(flat) - 1)]:
        return False
    features = [a.index for a in flat[1:]]
    return features == sorted(features) and same(extent(flat[1:]), width)
