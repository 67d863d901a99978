"""A tensor of all slots that experts fill in one after another: ``y[flat_ids == e] = expert(rows[flat_ids == e])``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.anti_unify import generalise
from moefuse.passes.ir.axes import Atom, Axes, extent
from moefuse.passes.ir.expr import Cast, weight_leaves
from moefuse.passes.ir.facts import Domain, Fill, Filled, Finding, Index, Lost, Mask, Part, Routing, Rows, Selection
from moefuse.passes.rules.routing.masks import selection, token_selection
from moefuse.passes.rules.sums.slots_together import whole as whole_by_slot


@dataclass
class _Whole:
    """By the identity of a fact of all slots: the fact, and what it was as parts."""

    before: dict[int, tuple[Any, Any]] = field(default_factory=dict)


def slots_of(where: list[Any]) -> tuple[Selection, bool] | None:
    """(the selection, whether slots are counted through) of an index that lists single slots of an expert; None for any other."""
    if len(where) == 1 and isinstance(where[0], Mask):
        found = selection(where[0], where[0].axes)
        flat = found is not None and found[1] == ("flat",)
        return (found[0], flat) if found is not None and (flat or found[1] == ("token", "slot")) else None
    if len(where) == 2 and isinstance(where[1], int):
        chosen_in = token_selection(where[0])
        return (chosen_in, False) if chosen_in is not None and chosen_in.slot == where[1] else None
    if not where or not all(isinstance(i, Index) for i in where):
        return None
    chosen = where[0].selection
    columns = [i.of for i in where if i.selection.same(chosen)]
    return (chosen, columns == ["flat"]) if columns in (["flat"], ["token", "slot"]) and len(columns) == len(where) else None


def fill_slots(ctx: Context, node: Node, target: Node, where: list[Any], value: Any) -> Finding:
    """One expert's rows put where they belong among all slots; None if the index is no selection of slots."""
    found, rows, current = slots_of(where), ctx.fact(value), ctx.fact(target)
    current = ctx.scratch(_Whole).before.get(id(current), (None, current))[1]
    if found is None or not isinstance(rows, Rows) or not isinstance(current, Fill | Filled):
        return None
    chosen, flat = found
    axes = _slot_axes(chosen.routing, out_shape(target), flat)
    if axes is None or rows.domain.selection is None or len(rows.axes) != 2 or not rows.axes[1]:
        return None
    if not rows.domain.selection.same(chosen):
        return ctx.lost("tokens-differ", node, detail="an expert's rows are not put where they were taken from")
    if isinstance(current, Fill) and not (current.value == 0.0 or current.value != current.value):
        return None
    before = current.parts if isinstance(current, Filled) else ()
    domains = [p.rows.domain for p in before]
    mine = (chosen.routing, chosen.expert, chosen.slot)
    if any(d.routing is not mine[0] or (d.expert, d.slot) == mine[1:] or (d.slot is None) != (mine[2] is None) for d in domains):
        return ctx.lost("experts-differ", node, expert=str(chosen.expert), detail="it writes where another one wrote")
    part = Part(_stored(node, target, value, rows), node)
    ctx.segments[node] = (part,)
    filled = Filled((*axes, rows.axes[1]), chosen.routing, (*before, part))
    whole = _whole(ctx, node, filled)
    return filled if whole is None else whole


def _stored(node: Node, target: Node, value: Node, rows: Rows) -> Rows:
    """The rows in the dtype of the tensor that they are written to."""
    mine, theirs = tensor(value), tensor(target)
    same_dtype = mine is None or theirs is None or mine.dtype == theirs.dtype
    return rows if same_dtype else replace(rows, expr=Cast(node, rows.expr, theirs.dtype))  # type: ignore[union-attr]


def _slot_axes(routing: Routing, shape: tuple[Any, ...], flat: bool) -> Axes | None:
    """The axes of a [slots, features] tensor, or of a [tokens, slots of a token, features] one; None for any other shape."""
    tokens = tuple(Atom("t", i, s) for i, s in enumerate(routing.tokens))
    slots = (Atom("k", 0, routing.top_k),)
    axes: Axes = ((*tokens, *slots),) if flat else (tokens, slots)
    whole = len(shape) == len(axes) + 1 and all(same(extent(a), s) for a, s in zip(axes, shape, strict=False))
    return axes if whole else None


def _whole(ctx: Context, node: Node, filled: Filled) -> Rows | Lost | None:
    """All slots, once every expert has written its own; None before that."""
    if filled.parts[0].rows.domain.slot is not None:
        found = whole_by_slot(ctx, node, filled.parts, filled.axes)
        if isinstance(found, Rows):
            ctx.scratch(_Whole).before[id(found)] = found, filled
        return found if filled.routing.choices is not None or isinstance(found, Rows) else None
    parts = {p.rows.domain.expert: p.rows for p in filled.parts}
    count, choices = len(parts), filled.routing.choices
    stacks = {shape_of(tensor(leaf.source))[0] for leaf in weight_leaves(filled.parts[0].rows.expr) if leaf.stacked}  # type: ignore[arg-type]
    if set(parts) != set(range(count)) or (choices is not None and count < choices) or stacks - {count}:
        return None
    expr = generalise([parts[e].expr for e in range(count)], list(range(count)), node)
    if isinstance(expr, Lost):
        return expr if count == choices else None
    whole = Rows(filled.axes, Domain("slots", filled.routing), expr)
    # Where nothing says how many experts there are, the next one may follow.
    ctx.scratch(_Whole).before[id(whole)] = whole, filled
    return whole


__all__ = ["fill_slots", "slots_of"]
