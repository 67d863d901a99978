"""Indexing by tensors: the rows of an expert, the weights of a slot, slots in sorted order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.named import counted
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axis, atoms, extent, fresh
from moefuse.passes.ir.facts import (
    Domain,
    Entries,
    Fact,
    Finding,
    Index,
    Listed,
    Lost,
    Mask,
    Range,
    Rows,
    SlotMask,
    Sorted,
    Table,
    View,
    Weight,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import slot_masks, sparse_entries
from moefuse.passes.rules.routing.ids import is_integer, role_axes
from moefuse.passes.rules.rows.boolean_mask import by_any_mask, by_wide_mask
from moefuse.passes.rules.rows.by_rows import by_rows, range_by_order, with_none
from moefuse.passes.rules.rows.index import pick, stacked
from moefuse.passes.rules.rows.leaves import own_row, slot_value, token
from moefuse.passes.rules.rows.listed import as_list, items

_ALL = slice(None, None, None)


@rule("index_select")
def on_index_select(ctx: Context, node: Node, x: Node, dim: int, index: Node) -> Finding:
    return by_tensor(ctx, node, x, [*[_ALL] * normalize(dim, len(out_shape(x))), index])


@rule("embedding")
def on_embedding(ctx: Context, node: Node, ids: Node, table: Node) -> Finding:
    """``F.embedding(token, x)``. What its options are for, and their gradients, no op has."""
    return by_tensor(ctx, node, table, [ids])


def by_tensor(ctx: Context, node: Node, x: Node, items: list[Any]) -> Finding:
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


def _by_tensor(ctx: Context, node: Node, x: Node, items: list[Any]) -> Finding:
    base = ctx.fact(x)
    while isinstance(base, Mask | Table) and isinstance(items[0], int) and not isinstance(items[1], int | slice):
        base, items = pick(ctx, node, x, base, 0, items[0]), items[1:]  # ``gates[e, token]`` is ``gates[e][token]``
    found = _of_base(ctx, node, x, items, base)
    if found is None and isinstance(base, Weight):  # rows of a table are tokens, where it is one of embeddings
        return _of_base(ctx, node, x, items, View(fresh(out_shape(x)), ctx.first[x]))
    return found


def _of_base(ctx: Context, node: Node, x: Node, items: list[Any], base: Any) -> Finding:
    indices = [ctx.fact(i) if isinstance(i, Node) else i for i in items]
    first, tail = indices[0], indices[1:]
    plain = not [t for t in tail if t != _ALL]
    if isinstance(first, Index):
        return by_rows(ctx, node, x, base, first.selection, [first, *tail])
    if isinstance(first, Listed):
        return by_list(ctx, node, x, base, first, indices)
    if isinstance(first, SlotMask):
        return slot_masks.picked(ctx, base, first) if isinstance(base, Rows) and not tail else None
    if isinstance(first, Mask | Table):
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
        return with_none(found, tail) if isinstance(found, Rows) else found
    if isinstance(first, Range) and isinstance(base, View) and plain:
        return by_range(base, first)
    if isinstance(first, View) and isinstance(base, View) and is_integer(items[0]) and plain:
        return by_ids(ctx, base, first)
    return None


def by_list(ctx: Context, node: Node, x: Node, base: Any, first: Listed, indices: list[Any]) -> Listed | Lost | None:
    """``x[torch.cat(toks)]``, ``w[torch.cat(toks), torch.cat(slots)]``: what each expert takes, one behind the other."""
    if any(isinstance(f, Fact) and not (isinstance(f, Listed) and len(f.items) == len(first.items)) for f in indices):
        return None
    found = []
    for i, item in enumerate(items(first)):
        own = [items(f)[i] if isinstance(f, Listed) else f for f in indices]
        taken = by_rows(ctx, node, x, base, item.selection, own) if isinstance(item, Index) else None
        if not isinstance(taken, Rows | Index):
            return taken if isinstance(taken, Lost) else None
        found.append(taken)
    return as_list(node, first, found)


def by_ids(ctx: Context, base: View, ids: View) -> Finding:
    """``W[ids]``: each slot's expert weight."""
    routing = routing_of(ctx, ids)
    axes = role_axes(ids, routing) if routing is not None else None
    if axes is None or [(a.kind, a.index) for a in base.axes[0]] != [("d", 0)]:
        return None
    rest = stacked(base, base.axes[1:], routing=routing)
    return None if rest is None else replace(rest, axes=(*axes, *rest.axes))


def chosen_outputs(ctx: Context, base: Rows, items: list[Any], indices: list[Any]) -> Rows | None:
    """``y[arange(T)[:, None], ids]``, ``y[arange(T), ids[:, k]]`` (or the expert dimension first): the outputs of the chosen experts."""
    kinds = ["".join(sorted({a.kind for a in axis})) for axis in base.axes[:2]]
    if sorted(kinds) != ["e", "t"]:
        return None
    ids, numbers = indices[kinds.index("e")], indices[kinds.index("t")]
    routing = routing_of(ctx, ids) if isinstance(ids, View) and is_integer(items[kinds.index("e")]) else None
    roles = role_axes(ids, routing) if routing is not None else None
    if routing is None or roles is None or not isinstance(numbers, Range) or not same(numbers.size, routing.num_tokens):
        return None
    own = [{a.kind for a in axis} for axis in numbers.axes]
    if len(roles) != len(own) or own[1:] not in ([], [set()]) or [a.kind for a in roles[0]] != ["t"] or len(routing.tokens) != 1:
        return None
    if base.domain.routing is not None and base.domain.routing is not routing:
        return None
    return Rows((*roles, *base.axes[2:]), Domain("slots", routing), base.expr)


def by_range(base: View, index: Range) -> View | None:
    """``x[arange(T).repeat_interleave(K)]``, ``x[arange(T).expand(E, -1)]``: x repeated."""
    kinds = [a.kind for a in atoms(index.axes) if a.kind != "b"]
    if not (kinds == ["d"] or (not kinds and same(index.size, 1))) or not same(index.size, extent(base.axes[0])):
        return None
    rows = tuple(tuple(one for a in axis for one in (base.axes[0] if a.kind == "d" else (a,))) for axis in index.axes)
    return base.with_axes((*rows, *base.axes[1:]))


def by_order(ctx: Context, node: Node, base: Any, index: Sorted) -> Finding:
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
        return range_by_order(base, index, rows)
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
        return ctx.lost("tokens-differ", node, detail=f"{counted(extent(base.axes[0]))} rows are indexed by {counted(count)} sorted slots")
    if index.of == "slot":
        expr = slot_value(node, base, routing) or own_row(node, base)
    else:
        expr = token(node, base, [base.axes[0]], list(base.axes[1:]))
    if index.of == "inverse" or expr is None:
        return None
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in base.axes[1:]))
    return Rows(axes, domain, expr)
