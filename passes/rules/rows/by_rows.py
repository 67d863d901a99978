"""Values per token or slot, taken for the rows of one expert."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.gates import gate
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, extent, fresh
from moefuse.passes.ir.expr import Gate, SlotWeight
from moefuse.passes.ir.facts import (
    Buffer,
    Column,
    Fill,
    Finding,
    Index,
    Mask,
    Order,
    Range,
    Routing,
    Rows,
    Selection,
    Sorted,
    Sum,
    Table,
    View,
)
from moefuse.passes.rules.routing import slot_masks
from moefuse.passes.rules.routing.ids import is_slot_weight, row_axis
from moefuse.passes.rules.routing.masks import one_index
from moefuse.passes.rules.rows.index import basic
from moefuse.passes.rules.rows.leaves import row_domain, slot_gate, slot_value, take_rows, take_tokens

_ALL = slice(None, None, None)


def by_rows(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, indices: list[Any]) -> Finding:
    """``x[token_rows]``, ``w[token_rows, slot_rows]``, with None, full slices or a constant slot behind."""
    together = one_index(indices, out_shape(x))
    if together is not None and isinstance(base, View | Fill | Sum | Table | Mask | Rows):
        lead, index = together
        base, indices = base.with_axes((sum(base.axes[:lead], ()), *base.axes[lead:])), [index, *indices[lead:]]
    if isinstance(base, Mask):
        read, left = slot_masks.entries(node, base, chosen, indices, row_axis(node))
        return with_none(read, left) if isinstance(read, Rows) else read if not left else None
    given = list(itertools.takewhile(lambda i: isinstance(i, Index), indices))
    if not all(i.selection.same(chosen) for i in given):
        return None
    columns, rest = [i.of for i in given], indices[len(given) :]
    if isinstance(base, Fill) and columns in (["flat"], ["token", "slot"]) and _by_slot(base, chosen.routing):
        base = View(base.axes, x)  # routing weights that are all the same
    if columns == ["slot", "token"] and isinstance(base, View) and len(base.axes) == 2:  # ``w.t()[slot_rows, token_rows]``
        base, columns = base.with_axes(base.axes[::-1]), columns[::-1]
    if columns == ["flat"]:
        return by_slots(node, base, chosen, rest)
    if any(r is not None and r != _ALL for r in rest[1:]):
        return None
    rows = row_axis(node)
    if columns == ["token"]:
        return _by_tokens(ctx, node, x, base, chosen, rows, rest)
    if columns == ["token", "slot"] and isinstance(base, View):
        repeated = by_slots(node, slots_together(base), chosen, rest) if len(base.axes) == 3 else None
        if repeated is not None:
            return repeated
        if not is_slot_weight(base, chosen.routing):
            return ctx.lost("tokens-differ", node, detail="the routing weights are not [tokens, slots]")
        return with_none(Rows((rows,), row_domain(chosen), SlotWeight(node, base.root)), rest)
    return None


def _by_slot(fill: Fill, routing: Routing) -> bool:
    """Whether a tensor of one constant has an element for each slot and no more, in the dimensions that it was made with."""
    atoms = [a for axis in fill.axes for a in axis]
    return all(a.kind == "d" for a in atoms) and same(extent(tuple(atoms)), routing.num_tokens * routing.top_k)


def by_slots(node: Node, base: Any, chosen: Selection, rest: list[Any]) -> Finding:
    """``w.flatten()[slots]``: a value per slot, for the slots of an expert."""
    rows = row_axis(node)
    if isinstance(base, Range) and len(base.axes) == 1 and len(base.axes[0]) == 2:
        found = range_by_order(base, Sorted((), Order(chosen.routing, node), "slot"), rows)
        return Index((rows,), chosen, "token") if found is not None and found.of == "token" and not rest else None
    expr = slot_value(node, base, chosen.routing) if isinstance(base, View) else None
    slots = chosen.routing.num_tokens * chosen.routing.top_k
    if expr is None or not same(extent(base.axes[0]), slots):
        return None
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in base.axes[1:]))
    return with_none(Rows(axes, row_domain(chosen), expr), rest)


def _by_tokens(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, rows: Axis, rest: list[Any]) -> Finding:
    """A value per token, for the tokens of an expert."""
    if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
        base = View(fresh(out_shape(x)), x)
    if isinstance(base, Rows):
        behind = None if any(r not in (None, _ALL) for r in rest) else take_rows(base, chosen, rows)
        return None if behind is None else with_none(behind, rest)
    if isinstance(base, Fill | Sum):
        return Buffer((rows, *features_of(base)), x, chosen, node) if not rest else None
    if isinstance(base, Column) and chosen.slot == base.slot:
        return with_none(slot_gate(node, base, chosen, rows), rest)
    if isinstance(base, Table):
        return by_column(node, base, chosen, rows, rest)
    if not isinstance(base, View):
        return None
    if len(base.axes) == 2 and rest and chosen.slot is not None and rest[0] in (chosen.slot, slice(chosen.slot, chosen.slot + 1)):
        axes: Axes = (rows,) if isinstance(rest[0], int) else (rows, ())
        return with_none(Rows(axes, row_domain(chosen), Gate(node, base.root, True, False, chosen.expert)), rest[1:])
    taken = take_tokens(ctx, node, x, base, chosen, rows)
    if rest and isinstance(rest[0], int | slice) and rest[0] != _ALL:
        part = basic(ctx, node, x, taken, [_ALL, rest[0]]) if isinstance(taken, Rows) else taken
        return with_none(part, rest[1:]) if isinstance(part, Rows) else part
    return with_none(taken, rest) if isinstance(taken, Rows) else taken


def features_of(base: Fill | Sum) -> Axes:
    """The dimensions of an accumulator behind its tokens, as features of a row."""
    return tuple((Atom("f", i, extent(b)),) for i, b in enumerate(base.axes[1:]) if b)


def by_column(node: Node, base: Table, chosen: Selection, rows: Axis, rest: list[Any]) -> Rows | None:
    """The weight of the expert out of a routing table."""
    if not slot_masks.same_ids(base.routing, chosen.routing):
        return None
    if not chosen.by_token and not chosen.routing.distinct:
        return None  # a token may have several such rows, and each would have the weights of all of them
    if base.expert is None and rest and rest[0] in (chosen.expert, slice(chosen.expert, int(chosen.expert) + 1)):
        axes = base.axes[:1] if not isinstance(rest[0], slice) else (base.axes[0], ())
        base, rest = replace(base.with_axes(axes), expert=chosen.expert), rest[1:]
    found = of_expert(node, base, chosen, rows)
    return None if found is None else with_none(found, rest)


def of_expert(node: Node, base: Table, chosen: Selection, rows: Axis) -> Rows | None:
    """What a column of a table has for the rows of its expert."""
    weights = None if base.slots is None else base.slots.root
    if base.expert != chosen.expert or not slot_masks.same_slots(base.routing, chosen.routing, weights):
        return None
    if chosen.routing.kept is not None and chosen.routing.kept is base.root:
        base = replace(base, slots=None)  # what says who is left is read, not what it was made of
    weight = gate(node, base)
    return None if weight is None else Rows((rows, *base.axes[1:]), row_domain(chosen), weight)


def with_none(rows: Rows, rest: list[Any]) -> Rows | None:
    axes = rows.axes
    for r in rest:
        if r is None:
            axes = (*axes, ())
        elif r != _ALL:
            return None
    return rows.with_axes(axes)


def slots_together(base: Any) -> Finding:
    """A [tokens, slots of a token, features] tensor as one of [slots, features]."""
    return replace(base, axes=(base.axes[0] + base.axes[1], *base.axes[2:])) if isinstance(base, View) and len(base.axes) == 3 else None


def range_by_order(base: Range, index: Sorted, rows: Axis) -> Sorted | None:
    """``arange(T).repeat_interleave(K)[perm]``: the token of each sorted slot."""
    axis = base.axes[0]
    routing = index.order.routing
    repeated = len(axis) == 2 and axis[0].kind == "d" and axis[1].kind == "b" and same(axis[1].size, routing.top_k)
    if len(base.axes) == 1 and repeated and same(base.size, routing.num_tokens):
        return Sorted((rows,), index.order, "token")
    return Sorted((rows,), index.order, "slot") if len(base.axes) == 1 and same(base.size, routing.num_tokens * routing.top_k) else None
