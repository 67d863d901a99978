"""Sums over experts: over the slots of a token, over all experts, and accumulators that collect one expert after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import PRODUCTS
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.cone import cone_rows
from moefuse.passes.infer.joined_features import joined as joined_features
from moefuse.passes.infer.ranges import tells_none
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.anti_unify import generalise
from moefuse.passes.ir.axes import Atom, Axes, Axis, extent, fresh
from moefuse.passes.ir.expr import Op, Token, walk
from moefuse.passes.ir.facts import (
    Combined,
    Counts,
    Domain,
    Fill,
    Finding,
    Index,
    Listed,
    Lost,
    Mask,
    Part,
    Picked,
    Range,
    Rows,
    SlotMask,
    Sorted,
    Span,
    Stacked,
    Sum,
    Table,
    View,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import slot_masks, sparse_entries
from moefuse.passes.rules.routing.ids import is_integer, role_axes
from moefuse.passes.rules.routing.masks import one_index, over_slots, token_selection
from moefuse.passes.rules.routing.offsets import listed as numbers, with_zero
from moefuse.passes.rules.rows.advanced_index import by_range, by_tensor
from moefuse.passes.rules.rows.index import without_features
from moefuse.passes.rules.rows.listed import listed
from moefuse.passes.rules.rows.pointwise import domain_of
from moefuse.passes.rules.rows.reductions import over_features
from moefuse.passes.rules.sums.accumulate import accumulated, plain_axes, selects
from moefuse.passes.rules.sums.add import merged, times
from moefuse.passes.rules.sums.assign import on_setitem
from moefuse.passes.rules.sums.listed import add
from moefuse.passes.rules.sums.segments import is_sorted, joined as joined_segments, segment_of
from moefuse.passes.rules.sums.slots_together import stacked_slots


@rule("sum")
def on_sum(ctx: Context, node: Node, x: Any, *given: Any, dim: Any = None, keepdim: Any = False, dtype: Any = None) -> Finding:
    if len(given) > 1 and not isinstance(given[-1], bool):
        dim = given  # ``x.sum(0, 1)``
    elif given:
        dim, keepdim = given[0], given[1] if len(given) > 1 else keepdim
    fact = ctx.fact(x)
    if isinstance(fact, Mask) or (isinstance(fact, Table) and fact.ones):
        value = tensor(node)
        return over_slots(ctx, node, x, dim, keepdim) if value is None or tells_none(value.dtype) else None
    if isinstance(fact, SlotMask):
        return slot_masks.summed(ctx, node, fact, dim, keepdim)
    if isinstance(fact, Stacked):
        return _sum_of(node, fact) if dim == fact.dim and not keepdim else None
    if not isinstance(fact, Rows):
        return None
    rank = len(fact.axes)
    dims = sorted({normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,) if dim is not None else range(rank))})
    over = [a for d in dims for a in fact.axes[d] if not same(a.size, 1)] or [a for d in dims for a in fact.axes[d]]
    left = tuple((() if i in dims else a) for i, a in enumerate(fact.axes) if keepdim or i not in dims)
    if {a.kind for a in over} == {"f"}:
        return _over_features(ctx, node, x, dims, dtype)
    if len(dims) == 1:
        return combined(ctx, node, fact, fact.axes[dims[0]], left)
    return ctx.lost("not-row-local", node, op="sum")


def _sum_of(node: Node, stacked: Stacked) -> Sum | None:
    first, *rest = stacked.items
    if isinstance(first, Rows):
        return Sum(plain_axes(node), None, tuple(Part(rows, node) for rows in stacked.items if isinstance(rows, Rows)))
    whole: Sum | None = first
    for other in rest:
        whole = merged(whole, other) if whole is not None and isinstance(other, Sum) else None
    return None if whole is None else replace(whole, axes=plain_axes(node))


def _over_features(ctx: Context, node: Node, x: Any, dims: list[int], dtype: Any) -> Finding:
    found = over_features(ctx, node, x, tuple(dims), dtype=dtype)
    if not isinstance(found, Rows):
        return found
    expr = found.expr
    return replace(found, expr=replace(expr, kwargs=(*expr.kwargs, ("keepdim", True)))) if isinstance(expr, Op) else None


def combined(ctx: Context, node: Node, rows: Rows, over: Axis, left: Axes) -> Finding:
    """Rows summed over ``over``: the whole region if that is the slots of a token, or every expert."""
    kinds = [a.kind for a in over if not same(a.size, 1)] or [a.kind for a in over]
    slots = rows.domain.name == "slots" and (
        kinds == ["k"] or (not kinds and rows.domain.routing is not None and rows.domain.routing.top_k == 1)
    )
    if slots or (rows.domain.name == "dense" and kinds == ["e"]):
        return Combined(left, rows)
    if rows.domain.name == "dense" and rows.domain.routing is None and not kinds:
        return None  # one stacked layer that every token goes through: shared experts
    return ctx.lost("not-row-local", node, op="sum")


@rule("index_add")
def on_index_add(ctx: Context, node: Node, target: Node, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Finding:
    rows, where = ctx.fact(source), ctx.fact(index)
    if dim != 0 or not isinstance(alpha, int | float):
        return None
    if isinstance(rows, Rows):
        return add(ctx, node, target, where, times(node, rows, alpha))
    return add(ctx, node, target, where, rows) if isinstance(rows, Listed) and alpha == 1 else None


@rule("index_put")
def on_index_put(ctx: Context, node: Node, target: Node, indices: Any, values: Any, accumulate: bool = False) -> Finding:
    if not isinstance(indices, tuple | list) or not indices:
        return None
    if not accumulate:
        return on_setitem(ctx, node, target, tuple(indices), values)
    indices = without_features(ctx, indices, out_shape(target))
    rows, where = ctx.fact(values), ctx.fact(indices[0]) if len(indices) == 1 else _one(ctx, target, indices)
    if not isinstance(rows, Rows | Listed):
        return None
    if isinstance(where, Mask | Table) and isinstance(rows, Rows) and rows.domain.selection is not None:
        chosen = token_selection(where)
        return accumulated(ctx, node, target, rows) if chosen is not None and chosen.same(rows.domain.selection) else None
    return add(ctx, node, target, where, rows)


def _one(ctx: Context, target: Node, indices: Any) -> Finding:
    """``b, t`` as one index of the tokens."""
    together = one_index([ctx.fact(i) for i in indices], out_shape(target))
    return together[1] if together is not None and together[0] == len(indices) else None


@rule("vstack")
def on_vstack(ctx: Context, node: Node, tensors: Any) -> Finding:
    if not isinstance(tensors, tuple | list) or not all(isinstance(t, Node) and len(out_shape(t)) > 1 for t in tensors):
        return None
    return _joined(ctx, node, tensors, [ctx.fact(t) for t in tensors], 0)


@rule("stack", "cat")
def on_stack(ctx: Context, node: Node, tensors: Any, dim: int = 0) -> Finding:
    if not isinstance(tensors, tuple | list) or not tensors:
        return None
    facts = [ctx.fact(t) for t in tensors]
    joined = ctx.calls[node].name == "cat"  # type: ignore[union-attr]
    if joined and segment_of(facts[0]) is not None:
        return joined_segments(ctx, node, tensors, facts, dim)
    if isinstance(facts[0], Span):
        flat = not facts[0].axes if not joined else len(facts[0].axes) == 1  # 0-d tensors beside each other, or vectors of one element
        return numbers(ctx, tensors) if flat else None
    if len(tensors) < 2:
        return None
    if joined and all(isinstance(f, Rows) for f in facts) and (beside := _beside(ctx, node, facts, dim)) is not None:
        return beside
    found = _joined(ctx, node, tensors, facts, dim) if joined else _stacked(ctx, node, facts, dim)
    return found if found is not None else _outputs(ctx, node, tensors, dim, joined)


def _beside(ctx: Context, node: Node, rows: list[Rows], dim: int) -> Rows | None:
    """Features of the same rows beside each other: a body that was computed in parts."""
    domain = domain_of(rows)
    if (
        domain is None
        or normalize(dim, len(out_shape(node))) != len(rows[0].axes) - 1
        or any([a.kind for a in r.axes[-1]] != ["f"] for r in rows)
    ):
        return None
    expr = joined_features(ctx, node, [r.expr for r in rows])
    return None if expr is None else Rows((*rows[0].axes[:-1], (Atom("f", 0, out_shape(node)[-1]),)), domain, expr)


def _joined(ctx: Context, node: Node, tensors: Any, facts: list[Any], dim: int) -> Finding:
    if len(facts) == 2 and dim == 0 and is_sorted(facts[0]) and isinstance(facts[1], Fill):
        return facts[0] if same(extent(facts[1].axes[0]), 0) else None  # padding by as many rows as no expert has: none
    return with_zero(ctx, tensors) if isinstance(facts[1], Counts) else listed(ctx, node, tensors, facts, dim)


def _stacked(ctx: Context, node: Node, facts: list[Any], dim: int) -> Finding:
    if all(isinstance(f, Table) for f in facts):
        return stacked_tables(node, facts, dim)
    slots = stacked_slots(ctx, node, facts, dim)
    if slots is not None:
        return slots
    return Stacked(tuple(facts), normalize(dim, len(out_shape(node)))) if all(isinstance(f, Sum) for f in facts) else None


def _outputs(ctx: Context, node: Node, tensors: Any, dim: int, joined: bool) -> Finding:
    """Every expert's output beside the others': one dimension more, over the experts."""
    rows: list[Rows] = []
    for item in tensors:
        fact = ctx.fact(item)
        of, reader = (fact.root, item) if joined and isinstance(fact, View) and _with_one_more(fact, dim) else (item, node)
        found = fact if isinstance(fact, Rows) else cone_rows(ctx, reader, of, None) if isinstance(fact, View) else None
        if found is None or found.domain.name != "masked":
            return None
        if joined and of is item:
            at = normalize(dim, len(found.axes))
            if found.axes[at]:
                return None
            found = found.with_axes((*found.axes[:at], *found.axes[at + 1 :]))
        rows.append(found)
    if any(r.domain.expert not in (None, i) for i, r in enumerate(rows)):
        return Stacked(tuple(rows), normalize(dim, len(out_shape(node)))) if all(selects(r) for r in rows) else None
    routing = next((r.domain.routing for r in rows if r.domain.routing is not None), None)
    expr = generalise([r.expr for r in rows], list(range(len(rows))), node)
    if isinstance(expr, Lost):
        return _mixed(ctx, rows) or expr
    axes = list(rows[0].axes)
    axes.insert(normalize(dim, len(axes) + 1), (Atom("e", 0, len(rows)),))
    return Rows(tuple(axes), Domain("dense", routing), expr)


def _with_one_more(view: View, dim: int) -> bool:
    """Whether a view is all of its root, with one dimension more: ``y.unsqueeze(dim)``."""
    at, value = normalize(dim, len(view.axes)), tensor(view.root)
    return value is not None and not view.axes[at] and (*view.axes[:at], *view.axes[at + 1 :]) == fresh(shape_of(value))


def _mixed(ctx: Context, rows: list[Rows]) -> Lost | None:
    """Experts on parts of one tensor, as long for each: places that tokens were put into, or what a product has mixed out of all tokens
    (soft mixtures of experts: Puigcerver et al. 2024)."""
    inputs = [next((e.source for e in walk(r.expr) if isinstance(e, Token)), None) for r in rows]
    made = {ctx.storage[n] for n in inputs if n is not None}
    if len(made) != 1 or len(set(inputs)) != len(rows):
        return None
    (root,) = made
    call = ctx.calls[root]
    mixes = call is not None and call.name in PRODUCTS
    parts = f"{named(root)} has as many rows for each expert, filled or not, and the experts run on those"
    detail = f"`{call.name}` mixes all tokens into rows for each expert, and the experts run on those" if mixes and call else parts
    return ctx.lost("capacity", root if call is not None else next(n for n in inputs if n is not None), detail=detail)


def stacked_tables(node: Node, tables: list[Table], dim: int) -> Table | None:
    """One column for each expert, beside each other: the whole table."""
    first = tables[0]
    if any(
        t.routing is not first.routing or t.expert != i or t.fill != first.fill or t.negated or t.slot is not None
        for i, t in enumerate(tables)
    ):
        return None
    axes = list(first.axes)
    axes.insert(normalize(dim, len(axes) + 1), (Atom("e", 0, len(tables)),))
    exact = first.slots is not None and all(t.slots is not None and t.slots.root is first.slots.root for t in tables)
    return replace(
        first,
        axes=tuple(axes),
        expert=None,
        root=node,
        root_axes=tuple(axes),
        slots=first.slots if exact else None,
        ones=all(t.ones for t in tables),
    )


@rule("take_along_dim")
def on_take_along_dim(ctx: Context, node: Node, x: Any, indices: Any, dim: Any = None) -> Finding:
    """``gather``, whose arguments are broadcast; without a dimension, out of all elements in a row."""
    return on_gather(ctx, node, x, dim, indices) if isinstance(dim, int) else None


@rule("gather")
def on_gather(ctx: Context, node: Node, x: Any, dim: Any, index: Any) -> Finding:
    """The outputs of the chosen experts out of those of all experts."""
    rows, view, where = ctx.fact(x), ctx.view(index), ctx.fact(index)
    if isinstance(rows, Picked):
        return sparse_entries.gathered(node, rows, dim, where)
    if isinstance(rows, Rows) and rows.domain.name == "selected":
        return slot_masks.gathered(node, rows, dim, where)
    if dim == 0 and isinstance(where, Index | Sorted | Range) and len(where.axes) == 2 and [a.kind for a in where.axes[1]] == ["b"]:
        whole = same(where.axes[1][0].size, out_shape(x)[-1])
        if isinstance(where, Range):
            return by_range(rows, where.with_axes(where.axes[:1])) if whole and isinstance(rows, View) else None
        return by_tensor(ctx, node, x, [index]) if whole else None
    if not isinstance(rows, Rows) or rows.domain.name != "dense" or view is None or not is_integer(index):
        return None
    at = normalize(dim, len(rows.axes))
    if [a.kind for a in rows.axes[at]] != ["e"]:
        return None
    rest = view.axes[:-1] if view.axes and all(a.kind == "b" for a in view.axes[-1]) else None
    plain = replace(view, axes=rest) if rest is not None else None
    routing = routing_of(ctx, plain) if plain is not None else None
    roles = role_axes(plain, routing) if plain is not None and routing is not None else None
    if roles is None or len(roles) != len(rows.axes) - 1 or (rows.domain.routing is not None and rows.domain.routing is not routing):
        return None
    if tensor(node) is None or [a.kind for a in roles[at]] not in (["k"], []):
        return None
    return Rows((*roles, rows.axes[-1]), Domain("slots", routing), rows.expr)
