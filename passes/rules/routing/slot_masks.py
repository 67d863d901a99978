"""Which of its slots sent a row to its expert: ``ids[tok] == e``, and the routing weight that this picks out of ``w[tok]``.

A token that has each expert once has one such slot: then the sum of its weights is that slot's, and ``argmax`` gives its number.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis
from moefuse.passes.ir.expr import Cast, Expr, Gate, SlotWeight, Token
from moefuse.passes.ir.facts import Domain, Index, Mask, Routing, Rows, Selection, SlotMask
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.ids import is_slot_weight
from moefuse.passes.rules.routing.masks import constant

_ALL = slice(None, None, None)


def entries(node: Node, base: Mask, chosen: Selection, items: list[Any], rows: Axis) -> tuple[Rows | SlotMask | None, list[Any]]:
    """``(one_hot(ids, E) * w[..., None])[tok, slot, e]``, ``(ids == e)[tok]``; and what of the index is left."""
    left, columns = list(items), []
    for at, axis in enumerate(base.axes):
        item = left[0] if left else _ALL
        number = base.expert is None and {a.kind for a in axis} == {"e"}
        if number and not (isinstance(item, int) and not isinstance(item, bool) and item == chosen.expert):
            return None, left
        if number:
            base = replace(base, axes=(*base.axes[:at], *base.axes[at + 1 :]), expert=chosen.expert)
        elif item == _ALL:
            columns.append("")
        elif isinstance(item, Index) and item.selection.same(chosen):
            columns.append(item.of)
        elif _is_slot(item, axis, chosen):
            columns.append("its slot")
        else:
            return None, left
        left = left[1:]
    if columns == ["token", ""]:
        return taken(base, chosen, rows), left
    found = entry(node, base, chosen, rows, tuple(c.removeprefix("its ") for c in columns))
    return replace(found, expr=_all(node, found.expr, chosen)) if found is not None and "its slot" in columns else found, left


def _is_slot(item: Any, axis: Axis, chosen: Selection) -> bool:
    """Whether a number is that of the slot in which all of a selection's tokens chose their expert."""
    size = axis[0].size if [a.kind for a in axis] == ["k"] else None
    slot = 0 if same(chosen.routing.top_k, 1) else chosen.slot  # the only one
    return type(item) is int and slot is not None and isinstance(size, int) and item in (slot, slot - size)


def entry(node: Node, base: Mask, chosen: Selection, rows: Axis, columns: tuple[str, ...]) -> Rows | None:
    """``(w * (ids == e))[tok, slot]``: where an expert was chosen, the weight of that slot."""
    kinds = [{a.kind for a in axis if not same(a.size, 1)} or {a.kind for a in axis} for axis in base.axes]
    named = {"token": {"t"}, "slot": {"k"}}
    if base.negated or base.weight is None or base.expert != chosen.expert or not same_ids(base.routing, chosen.routing):
        return None
    if sorted(columns) != ["slot", "token"] or kinds != [named[column] for column in columns]:
        return None
    own = is_slot_weight(base.weight, base.routing)
    return Rows((rows,), _domain(chosen), SlotWeight(node, base.weight.root)) if own else None


def same_ids(table: Routing, chosen: Routing) -> bool:
    """Whether a table has an entry for every slot of a routing: it is of the same, or of one with more slots."""
    return table is chosen or (not chosen.whole and table.whole and table.node is chosen.node)


def same_slots(table: Routing, chosen: Routing, weight: Node | None = None) -> bool:
    """Whether what a table has for an expert and a token is of the slots of a selection: it may have left out others of the same expert.

    Of a token that has each expert once there is one such slot. Slots whose ``weight`` is zero add nothing, but to gradients.
    """
    zero = weight is not None and chosen.kept is weight and chosen.above is None and chosen.by_slot and chosen.valid is None
    zero = zero and (value := tensor(weight)) is not None and not value.requires_grad
    return same_ids(table, chosen) and (table is chosen or chosen.distinct or zero)


def taken(base: Mask, chosen: Selection, rows: Axis) -> SlotMask | None:
    """``(ids == e)[tok]``."""
    if not same_slots(base.routing, chosen.routing) or base.expert != chosen.expert or chosen.slot is not None or len(base.axes) != 2:
        return None
    if [{a.kind for a in axis} - {"b"} for axis in base.axes] != [{"t"}, {"k"}]:
        return None
    weight = None if base.weight is None else SlotWeight(base.weight.root, base.weight.root)
    return SlotMask((rows, _slots(chosen)), chosen, base.negated, weight)


def compared(ctx: Context, node: Node, ids: Rows, expert: Any, negated: bool) -> SlotMask | None:
    """``ids[tok] == e``."""
    chosen, leaf = ids.domain.selection, ids.expr
    if chosen is None or chosen.slot is not None or not isinstance(leaf, Token) or len(ids.axes) != 2 or isinstance(expert, bool):
        return None
    if not isinstance(expert, int) or expert != chosen.expert or not (chosen.routing.whole or chosen.routing.distinct):
        return None
    all_of_it = leaf.source is chosen.routing.node and leaf.width == chosen.routing.top_k and chosen.routing.columns is None
    return SlotMask((ids.axes[0], _slots(chosen)), chosen, negated) if all_of_it else None


def _slots(chosen: Selection) -> Axis:
    return (Atom("k", 0, chosen.routing.top_k),)


def weighted(mask: SlotMask, weights: Any) -> SlotMask | None:
    """``w[tok] * (ids[tok] == e)``."""
    if not isinstance(weights, Rows) or mask.weight is not None or mask.negated or len(weights.axes) != len(mask.axes):
        return None
    weight = _of_slot(weights.expr, mask.selection)
    same_rows = weights.domain.selection is not None and weights.domain.selection.same(mask.selection)
    return replace(mask, weight=weight) if same_rows and weight is not None else None


def product(x: Any, y: Any) -> SlotMask | None:
    """:func:`weighted`, of two factors in any order; None where neither is such a mask."""
    return weighted(x, y) if isinstance(x, SlotMask) else weighted(y, x) if isinstance(y, SlotMask) else None


def cast(mask: SlotMask, node: Node, dtype: torch.dtype) -> SlotMask:
    """The mask, or its weights, in another dtype."""
    return mask if mask.weight is None else replace(mask, weight=Cast(node, mask.weight, dtype))


def kept(ctx: Context, mask: SlotMask, keep: Any, other: Any) -> SlotMask | None:
    """``torch.where(ids[tok] == e, w[tok], 0)``."""
    zero = constant(ctx, other) == 0
    return weighted(replace(mask, negated=False), ctx.fact(keep)) if zero else None


def _of_slot(expr: Expr, chosen: Selection) -> Expr | None:
    """What a row has for each slot, ``w[tok]``, as what it has for its own."""
    if isinstance(expr, Cast):
        inner = _of_slot(expr.child, chosen)
        return None if inner is None else replace(expr, child=inner)
    own = isinstance(expr, Token) and not expr.by_slot and expr.width == chosen.routing.top_k
    return SlotWeight(expr.node, expr.source) if own and isinstance(expr, Token) else None


def summed(ctx: Context, node: Node, mask: SlotMask, dim: Any, keepdim: Any) -> Rows | None:
    """``(w[tok] * (ids[tok] == e)).sum(-1)``: of a token with two such slots both, as long as it has one row."""
    if mask.weight is None or mask.negated or not isinstance(dim, int) or normalize(dim, 2) != 1:
        return None
    if not mask.selection.by_token:
        return _row(mask, mask.weight, keepdim) if mask.selection.routing.distinct else None
    return _row(mask, _all(node, mask.weight, mask.selection), keepdim)


def _all(node: Node, weight: Expr, chosen: Selection) -> Expr:
    """The weights of all slots of a token that chose the expert."""
    if isinstance(weight, Cast):
        return replace(weight, child=_all(node, weight.child, chosen))
    return Gate(node, weight.source, True, False, chosen.expert) if isinstance(weight, SlotWeight) else weight


def _row(mask: SlotMask, weight: Expr, keepdim: Any = False) -> Rows:
    return Rows((mask.axes[0], ()) if keepdim else (mask.axes[0],), _domain(mask.selection), weight)


def _domain(chosen: Selection) -> Domain:
    return Domain("selected", chosen.routing, selection=chosen, expert=chosen.expert)


def column(node: Node, weights: Rows, axes: Axes, at: int) -> Rows | None:
    """``w[tok][:, k]``, of rows that chose their expert in slot k."""
    chosen = weights.domain.selection
    if chosen is None or chosen.slot is None or at not in (chosen.slot, chosen.slot - chosen.routing.top_k) or len(weights.axes) != 2:
        return None
    weight = _of_slot(weights.expr, chosen)
    return None if weight is None else replace(weights, axes=axes, expr=_all(node, weight, chosen))


def picked(ctx: Context, weights: Rows, mask: SlotMask) -> Rows | None:
    """``w[tok][ids[tok] == e]``: one for each row, where each has one."""
    found = weighted(mask, weights) if mask.selection.routing.distinct else None
    return None if found is None or found.weight is None else _row(found, found.weight)


def gathered(node: Node, weights: Rows, dim: int, index: Any) -> Rows | None:
    """``w[tok].gather(1, slot)``: the weight of the row's slot."""
    chosen = weights.domain.selection
    if not isinstance(index, Index) or index.of != "slot" or chosen is None or not chosen.same(index.selection):
        return None
    if len(weights.axes) != 2 or normalize(dim, 2) != 1 or len(index.axes) != 2 or not same(out_shape(node)[1], 1):
        return None
    weight = _of_slot(weights.expr, chosen)
    return None if weight is None else replace(weights, axes=(weights.axes[0], ()), expr=weight)


@rule("argmax")
def on_argmax(ctx: Context, node: Node, x: Node, dim: int | None = None, keepdim: bool = False) -> Index | None:
    """``(ids[tok] == e).int().argmax(-1)``: the first slot, which is the only one where each expert is once in a token."""
    mask = ctx.fact(x)
    if not isinstance(mask, SlotMask) or mask.weight is not None or mask.negated or dim is None or normalize(dim, 2) != 1:
        return None
    if not mask.selection.by_token and not mask.selection.routing.distinct:
        return None
    return Index((mask.axes[0], ()) if keepdim else (mask.axes[0],), mask.selection, "slot")
