"""Indexing by tensors: the rows of an expert, the weights of a slot, slots in sorted order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, extent, fresh
from moefuse.passes.ir.expr import Gate, SlotWeight
from moefuse.passes.ir.facts import (
    Buffer,
    Column,
    Domain,
    Entries,
    Fact,
    Fill,
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
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import sparse_entries
from moefuse.passes.rules.routing.masks import is_integer, role_axes, row_axis, selection
from moefuse.passes.rules.rows.index import pick, stacked
from moefuse.passes.rules.rows.leaves import gate, is_slot_weight, own_row, row_domain, slot_gate, slot_value, take_tokens, token

_ALL = slice(None, None, None)


@rule("index_select")
def on_index_select(ctx: Context, node: Node, x: Node, dim: int, index: Node) -> Any:
    return by_tensor(ctx, node, x, [*[_ALL] * normalize(dim, len(out_shape(x))), index])


@rule("embedding")
def on_embedding(ctx: Context, node: Node, ids: Node, table: Node, *_: Any, **__: Any) -> Any:
    return by_tensor(ctx, node, table, [ids])


def by_tensor(ctx: Context, node: Node, x: Node, items: list[Any]) -> Any:
    """Indexing by tensors, perhaps with None in front or full slices behind."""
    added = 0
    while added < len(items) and items[added] is None:
        added += 1
    found = _by_tensor(ctx, node, x, items[added:])
    if not added or not isinstance(found, Fact):
        return found
    if isinstance(found, Rows) and found.axes and found.axes[0]:
        found = found.with_axes(((found.axes[0][0]._replace(size=out_shape(node)[added]),), *found.axes[1:]))
    return found.with_axes((*((),) * added, *found.axes))


def _by_tensor(ctx: Context, node: Node, x: Node, items: list[Any]) -> Any:
    indices = [ctx.fact(i) if isinstance(i, Node) else i for i in items]
    base, first, tail = ctx.fact(x), indices[0], indices[1:]
    plain = not [t for t in tail if t != _ALL]
    if isinstance(first, Index):
        return by_rows(ctx, node, x, base, first.selection, [first, *tail])
    if isinstance(first, Mask | Table):
        from moefuse.passes.rules.rows.boolean_mask import by_wide_mask

        wide = not tail and [a.kind for a in first.axes[-1]] == ["b"]
        return by_wide_mask(ctx, node, x, first) if wide else by_any_mask(ctx, node, x, base, first, tail)
    if isinstance(base, Rows) and base.domain.name == "dense" and len([i for i in indices if i != _ALL]) == 2:
        return chosen_outputs(ctx, base, items, indices)
    if isinstance(first, Sorted) and isinstance(base, Entries):
        return sparse_entries.taken(node, base, first, tail)
    if isinstance(first, Sorted) and isinstance(base, Table):
        return sparse_entries.rows_of_table(node, base, first, tail)
    if isinstance(first, Sorted) and (plain or len(getattr(base, "axes", ())) == 1):
        found = by_order(ctx, node, base, first)
        return _with_none(found, tail) if isinstance(found, Rows) else found
    if isinstance(first, Range) and isinstance(base, View) and plain:
        return by_range(base, first)
    if isinstance(first, View) and isinstance(base, View) and is_integer(items[0]) and plain:
        return by_ids(ctx, base, first)
    return None


def by_any_mask(ctx: Context, node: Node, x: Node, base: Any, mask: Mask | Table, tail: list[Any]) -> Any:
    """``x[mask]``, perhaps with a column behind, for a mask over tokens, or tokens and slots."""
    lead, axes = tokens_together(mask.axes)
    found = selection(mask, axes)
    new = bool(tail) and all(t is None for t in tail)  # dimensions of size one behind
    if found is None or (len(tail) > 1 and not new):
        return None
    if lead > 1 and isinstance(base, View | Table):
        base = base.with_axes((sum(base.axes[:lead], ()), *base.axes[lead:]))
    if isinstance(mask, Table) and isinstance(base, Table) and tail:
        return _by_column(node, base, found[0], row_axis(node), tail)
    if new:
        taken = by_mask(ctx, node, x, base, *found)
        return _with_none(taken, tail) if isinstance(taken, Rows) else taken
    if tail:
        column = isinstance(mask, Table) and isinstance(tail[0], int) and isinstance(base, View)
        base = pick(ctx, node, x, base, len(base.axes) - 1, tail[0]) if column else None
    return by_mask(ctx, node, x, base, *found)


def tokens_together(axes: Axes) -> tuple[int, Axes]:
    """(how many dimensions in front count tokens, the axes of a mask with those as one): a boolean index goes through them in order."""
    lead = next((i for i, axis in enumerate(axes) if not axis or {a.kind for a in axis} != {"t"}), len(axes))
    order = [a.index for axis in axes[:lead] for a in axis]
    return (lead, (sum(axes[:lead], ()), *axes[lead:])) if lead > 1 and order == sorted(order) else (1, axes)


def by_ids(ctx: Context, base: View, ids: View) -> Any:
    """``W[ids]``: each slot's expert weight."""
    routing = ctx.routing(ids)
    axes = role_axes(ids, routing) if routing is not None else None
    if axes is None or base.axes[0] != (Atom("d", 0, base.axes[0][0].size),):
        return None
    rest = stacked(base, base.axes[1:], routing=routing)
    return None if rest is None else replace(rest, axes=(*axes, *rest.axes))


def chosen_outputs(ctx: Context, base: Rows, items: list[Any], indices: list[Any]) -> Rows | None:
    """``y[arange(T)[:, None], ids]`` (or with the expert dimension first): the outputs of the chosen experts."""
    kinds = ["".join(sorted({a.kind for a in axis})) for axis in base.axes[:2]]
    if sorted(kinds) != ["e", "t"]:
        return None
    ids, numbers = indices[kinds.index("e")], indices[kinds.index("t")]
    routing = ctx.routing(ids) if isinstance(ids, View) and is_integer(items[kinds.index("e")]) else None
    roles = role_axes(ids, routing) if routing is not None else None
    if routing is None or roles is None or not isinstance(numbers, Range) or not same(numbers.size, routing.num_tokens):
        return None
    if len(roles) != 2 or len(numbers.axes) != 2 or numbers.axes[1] or [a.kind for a in roles[0]] != ["t"] or len(routing.tokens) != 1:
        return None
    if base.domain.routing is not None and base.domain.routing is not routing:
        return None
    return Rows((*roles, *base.axes[2:]), Domain("slots", routing), base.expr)


def by_range(base: View, index: Range) -> View | None:
    """``x[arange(T).repeat_interleave(K)]``: x repeated."""
    axis = index.axes[0] if len(index.axes) == 1 else ()
    if not axis or axis[0].kind != "d" or any(a.kind != "b" for a in axis[1:]) or not same(index.size, extent(base.axes[0])):
        return None
    return base.with_axes(((*base.axes[0], *axis[1:]), *base.axes[1:]))  # type: ignore[no-any-return]


def by_rows(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, indices: list[Any]) -> Any:
    """``x[token_rows]``, ``w[token_rows, slot_rows]``, with None, full slices or a constant slot behind."""
    columns = []
    for i in indices:
        if not isinstance(i, Index):
            break
        if not i.selection.same(chosen):
            return None
        columns.append(i.of)
    rest = indices[len(columns) :]
    if columns == ["flat"]:
        return _by_slots(node, base, chosen, rest)
    if any(r is not None and r != _ALL for r in rest[1:]):
        return None
    rows = row_axis(node)
    if columns == ["token"]:
        return _by_tokens(ctx, node, x, base, chosen, rows, rest)
    if columns == ["token", "slot"] and isinstance(base, View):
        repeated = _by_slots(node, _slots_together(base), chosen, rest) if len(base.axes) == 3 else None
        if repeated is not None:
            return repeated
        if not is_slot_weight(base, chosen.routing):
            return ctx.lost("tokens-differ", node, detail="the routing weights are not [tokens, slots]")
        return _with_none(Rows((rows,), row_domain(chosen), SlotWeight(node, base.root)), rest)
    return None


def _by_slots(node: Node, base: Any, chosen: Selection, rest: list[Any]) -> Any:
    """``w.flatten()[slots]``: a value per slot, for the slots of an expert."""
    rows = row_axis(node)
    if isinstance(base, Range) and len(base.axes) == 1 and len(base.axes[0]) == 2:
        found = _range_by_order(base, Sorted((), Order(chosen.routing, node), "slot"), rows)
        return Index((rows,), chosen, "token") if found is not None and found.of == "token" and not rest else None
    expr = slot_value(node, base, chosen.routing) if isinstance(base, View) else None
    slots = chosen.routing.num_tokens * chosen.routing.top_k
    if expr is None or not same(extent(base.axes[0]), slots):
        return None
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in base.axes[1:]))
    return _with_none(Rows(axes, row_domain(chosen), expr), rest)


def _by_tokens(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, rows: Axis, rest: list[Any]) -> Any:
    """A value per token, for the tokens of an expert."""
    if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
        base = View(fresh(out_shape(x)), x)
    if isinstance(base, Fill | Sum):
        return Buffer((rows, *_features(base)), x, chosen) if not rest else None
    if isinstance(base, Column) and chosen.slot == base.slot:
        return _with_none(slot_gate(node, base, chosen, rows), rest)
    if isinstance(base, Table):
        return _by_column(node, base, chosen, rows, rest)
    if not isinstance(base, View):
        return None
    if rest and isinstance(rest[0], int):
        slot = chosen.slot == rest[0]
        return _with_none(Rows((rows,), row_domain(chosen), Gate(node, base.root, True, False, chosen.expert)), rest[1:]) if slot else None
    taken = take_tokens(ctx, node, base, chosen, rows)
    return _with_none(taken, rest) if isinstance(taken, Rows) else taken


def _features(base: Fill | Sum) -> Axes:
    """The dimensions of an accumulator behind its tokens, as features of a row."""
    return tuple((Atom("f", i, extent(b)),) for i, b in enumerate(base.axes[1:]) if b)


def same_ids(table: Routing, chosen: Routing) -> bool:
    """Whether a table has an entry for every slot of a routing: it is of the same, or of one with more slots."""
    return table is chosen or (chosen.kept is not None and table.kept is None and table.node is chosen.node)


def _by_column(node: Node, base: Table, chosen: Selection, rows: Axis, rest: list[Any]) -> Rows | None:
    """The weight of the expert out of a routing table."""
    if not same_ids(base.routing, chosen.routing):
        return None
    if chosen.routing.kept is not None and chosen.routing.kept is base.root:
        base = replace(base, slots=None)  # what says who is left is read, not what it was made of
    if base.expert is None and rest and rest[0] == chosen.expert:
        return _with_none(Rows((rows,), row_domain(chosen), gate(node, replace(base, expert=chosen.expert))), rest[1:])
    same_expert = base.expert == chosen.expert
    return _with_none(Rows((rows, *base.axes[1:]), row_domain(chosen), gate(node, base)), rest) if same_expert else None


def _with_none(rows: Rows, rest: list[Any]) -> Rows | None:
    axes = rows.axes
    for r in rest:
        if r is None:
            axes = (*axes, ())
        elif r != _ALL:
            return None
    return rows.with_axes(axes)  # type: ignore[no-any-return]


def by_mask(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, columns: tuple[str, ...]) -> Any:
    """``x[mask]`` with a boolean mask over tokens, or over tokens and slots."""
    rows = row_axis(node)
    if columns == ("token",):
        if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
            base = View(fresh(out_shape(x)), x)
        if isinstance(base, Fill | Sum):
            return Buffer((rows, *_features(base)), x, chosen)
        if isinstance(base, Column) and chosen.slot == base.slot:
            return slot_gate(node, base, chosen, rows)
        if isinstance(base, View):
            return take_tokens(ctx, node, base, chosen, rows)
        if isinstance(base, Table) and base.expert == chosen.expert and same_ids(base.routing, chosen.routing):
            return Rows((rows, *base.axes[1:]), row_domain(chosen), gate(node, base))
        return None
    if columns == ("flat",):
        return _by_slots(node, base, chosen, [])
    if isinstance(base, View) and is_slot_weight(base, chosen.routing) and columns == ("token", "slot"):
        return Rows((rows,), row_domain(chosen), SlotWeight(node, base.root))
    return _by_slots(node, _slots_together(base), chosen, []) if columns == ("token", "slot") else None


def _slots_together(base: Any) -> Any:
    """A [tokens, slots of a token, features] tensor as one of [slots, features]."""
    return replace(base, axes=(base.axes[0] + base.axes[1], *base.axes[2:])) if isinstance(base, View) and len(base.axes) == 3 else None


def by_order(ctx: Context, node: Node, base: Any, index: Sorted) -> Any:
    """Indexing by the sorted order of all slots, by its tokens, or by its inverse."""
    order, routing = index.order, index.order.routing
    rows: Axis = (Atom("r", 0, routing.num_tokens * routing.top_k if routing.kept is None else out_shape(node)[0]),)
    domain = Domain("sorted", routing, order=order)
    if isinstance(base, Rows) and base.domain.name == "sorted" and index.of == "inverse" and base.domain.order is order:
        slots: Axis = (*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k))
        return replace(base, axes=(slots, *base.axes[1:]), domain=Domain("slots", routing))
    if isinstance(base, Rows) and base.domain.name == "slots" and index.of == "slot" and base.domain.same(Domain("slots", routing)):
        return replace(base, axes=(rows, *base.axes[1:]), domain=domain)
    if isinstance(base, Range) and index.of == "slot" and base.axes:
        return _range_by_order(base, index, rows)
    if isinstance(base, Sorted) and base.of == "slot" and index.of == "slot":
        return None
    if not isinstance(base, View):
        return None
    if index.of == "slot" and base.root is routing.node and len(base.axes) == 1:
        return Sorted((rows,), order, "ids")
    if index.of == "ids":
        rest = stacked(base, base.axes[1:], routing=routing, order=order)
        return None if rest is None else replace(rest, axes=(rows, *rest.axes))
    count = routing.num_tokens if index.of == "token" else routing.num_tokens * routing.top_k
    if not same(extent(base.axes[0]), count):
        return ctx.lost("tokens-differ", node, detail=f"{extent(base.axes[0])} rows are indexed by {count} sorted slots")
    if index.of == "slot":
        expr = slot_value(node, base, routing) or own_row(node, base)
    else:
        expr = token(node, base, [base.axes[0]], list(base.axes[1:]))
    if index.of == "inverse" or expr is None:
        return None
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in base.axes[1:]))
    return Rows(axes, domain, expr)


def _range_by_order(base: Range, index: Sorted, rows: Axis) -> Sorted | None:
    """``arange(T).repeat_interleave(K)[perm]``: the token of each sorted slot."""
    axis = base.axes[0]
    routing = index.order.routing
    repeated = len(axis) == 2 and axis[0].kind == "d" and axis[1].kind == "b" and same(axis[1].size, routing.top_k)
    if len(base.axes) == 1 and repeated and same(base.size, routing.num_tokens):
        return Sorted((rows,), index.order, "token")
    return Sorted((rows,), index.order, "slot") if len(base.axes) == 1 and same(base.size, routing.num_tokens * routing.top_k) else None
