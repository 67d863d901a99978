"""Boolean masks as broad as what they select from: ``x.masked_select(mask[:, None])`` lists features one by one, ``masked_scatter`` puts
them back in the same order. With a mask over the rows of one expert that is ``x[mask]`` and ``out[mask] = rows``, seen flat.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import Size, product, same, same_shape
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Axes, atoms, extent, fresh
from moefuse.passes.ir.expr import SlotWeight
from moefuse.passes.ir.facts import (
    Buffer,
    Column,
    Fact,
    Fill,
    Finding,
    Index,
    Lost,
    Mask,
    Range,
    Rows,
    Selection,
    SlotMask,
    Sum,
    Table,
    View,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import by_expert, slot_masks
from moefuse.passes.rules.routing.ids import is_slot_weight, row_axis
from moefuse.passes.rules.routing.masks import selection, tokens_together
from moefuse.passes.rules.rows.by_rows import by_column, by_rows, by_slots, features_of, of_expert, slots_together, with_none
from moefuse.passes.rules.rows.index import basic, cut, pick
from moefuse.passes.rules.rows.leaves import row_domain, slot_gate, take_rows, take_tokens

_ALL = slice(None, None, None)


@rule("masked_select")
def on_masked_select(ctx: Context, node: Node, x: Node, mask: Node) -> Finding:
    """``x.masked_select(mask[:, None])``, ``weights.masked_select(mask)``."""
    where, rows = ctx.fact(mask), ctx.fact(x)
    if isinstance(where, SlotMask):
        return slot_masks.picked(ctx, rows, where) if isinstance(rows, Rows) else None
    if by_expert.is_map(where) and same_shape(out_shape(x), out_shape(mask)):
        return by_expert.selected(ctx, node, rows, where)
    return by_wide_mask(ctx, node, x, where) if isinstance(where, Mask | Table) else None


def by_wide_mask(ctx: Context, node: Node, x: Node, mask: Mask | Table) -> Finding:
    """``x.masked_select(mask[:, None])``: the features of an expert's tokens, one row behind the other."""
    narrow, base = by_rows_of(mask, out_shape(x)), ctx.fact(x)
    if narrow is None or not isinstance(base, Fact):
        return None
    rank = len(narrow.axes)
    found = by_any_mask(ctx, node, x, base, narrow, [])
    if not isinstance(found, Rows | Buffer):
        return found
    rows = found.axes[0][0]._replace(size=out_shape(node)[0] / product(out_shape(x)[rank:]))
    features = (a._replace(kind="f", index=0) for a in atoms(base.axes[rank:]) if not same(a.size, 1))
    return found.with_axes(((rows, *features),))


def by_rows_of(mask: Mask | Table, shape: tuple[Size, ...]) -> Mask | Table | None:
    """A mask that is broadcast over the features of a tensor, without them; None if it is not as long as the tensor's other dimensions."""
    last = max((i for i, axis in enumerate(mask.axes) if any(a.kind != "b" for a in axis)), default=-1)
    lead: Axes = mask.axes[: last + 1]
    fits = len(mask.axes) == len(shape) and all(same(extent(axis), s) for axis, s in zip(lead, shape, strict=False))
    return mask.with_axes(lead) if lead and fits else None


def by_any_mask(ctx: Context, node: Node, x: Node, base: Any, mask: Mask | Table, tail: list[Any]) -> Finding:
    """``x[mask]``, perhaps with a column behind (``w[mask, k]``, ``w[mask, k:k + 1]``), for a mask over tokens, or tokens and slots."""
    if by_expert.is_map(mask) and not tail and len(out_shape(x)) == 2:
        return by_expert.selected(ctx, node, base, mask)  # type: ignore[arg-type]
    lead, axes = tokens_together(mask.axes)
    found = selection(mask, axes)
    new = [t for t in tail if t is None]  # dimensions of size one behind
    tail = tail[: len(tail) - len(new)]
    if found is not None and isinstance(base, Mask) and tail:  # ``(one_hot(ids, E) * w)[mask, k, e]``
        return by_rows(ctx, node, x, base, found[0], [Index((row_axis(node),), found[0], found[1][0]), *tail, *new])
    if found is None or len(tail) > 1 or None in tail:
        return None
    if lead > 1 and isinstance(base, View | Table | Mask | Rows):
        base = base.with_axes((sum(base.axes[:lead], ()), *base.axes[lead:]))
    if isinstance(mask, Table) and isinstance(base, Table) and tail:
        return by_column(node, base, found[0], row_axis(node), [*tail, *new])
    column = _column(ctx, node, x, base, tail[0]) if tail and isinstance(mask, Table) and isinstance(base, View) else None
    own = isinstance(column, Column) and column.slot == found[0].slot
    taken = by_mask(ctx, node, x, column if own else base, *found)
    if tail and isinstance(taken, Rows) and not own:
        taken = basic(ctx, node, x, taken, [_ALL, *tail])
    if isinstance(taken, Rows):
        return with_none(taken, new)
    return taken if not new or isinstance(taken, Lost) else None


def _column(ctx: Context, node: Node, x: Node, base: View, at: Any) -> Finding:
    """One column of a tensor, by its number or as a slice of one; a tensor of one column stays a view."""
    last = len(base.axes) - 1
    if isinstance(at, int):
        return pick(ctx, node, x, base, last, at)
    return cut(ctx, node, base, last, at) if isinstance(at, slice) else None


def by_mask(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, columns: tuple[str, ...]) -> Finding:
    """``x[mask]`` with a boolean mask over tokens, or over tokens and slots."""
    rows = row_axis(node)
    if columns == ("token",):
        if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
            base = View(fresh(out_shape(x)), x)
        if isinstance(base, Range):  # ``arange(T)[mask]``: the numbers of the tokens
            return Index((rows,), chosen, "token") if len(base.axes) == 1 and same(base.size, chosen.routing.num_tokens) else None
        if isinstance(base, Fill | Sum):
            return Buffer((rows, *features_of(base)), x, chosen, node)
        if isinstance(base, Mask):
            return slot_masks.taken(base, chosen, rows)
        if isinstance(base, Rows):
            return take_rows(base, chosen, rows)
        if isinstance(base, Column) and chosen.slot == base.slot:
            return slot_gate(node, base, chosen, rows)
        if isinstance(base, View):
            return take_tokens(ctx, node, x, base, chosen, rows)
        return of_expert(node, base, chosen, rows) if isinstance(base, Table) else None
    if isinstance(base, Mask):
        return slot_masks.entry(node, base, chosen, rows, columns)
    if columns == ("flat",):
        return by_slots(node, base, chosen, [])
    if isinstance(base, View) and is_slot_weight(base, chosen.routing) and columns == ("token", "slot"):
        return Rows((rows,), row_domain(chosen), SlotWeight(node, base.root))
    return by_slots(node, slots_together(base), chosen, []) if columns == ("token", "slot") else None
