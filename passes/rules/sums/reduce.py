"""Where experts meet: sums over the slots of a token, over all experts, and accumulators that collect one expert after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same, same_shape
from moefuse.passes.infer.ranges import tells_none
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.anti_unify import generalise
from moefuse.passes.ir.axes import Atom, Axes, Axis, extent
from moefuse.passes.ir.expr import Gate, Op, walk
from moefuse.passes.ir.facts import (
    Combined,
    Counts,
    Domain,
    Fill,
    Index,
    Lost,
    Mask,
    Part,
    Picked,
    Range,
    Routing,
    Rows,
    Sorted,
    Stacked,
    Sum,
    Table,
    View,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import sparse_entries
from moefuse.passes.rules.routing.masks import over_slots
from moefuse.passes.rules.routing.offsets import with_zero
from moefuse.passes.rules.sums.segments import joined as joined_segments
from moefuse.passes.rules.sums.segments import segment_of


@rule("sum")
def on_sum(ctx: Context, node: Node, x: Any, *args: Any, **kwargs: Any) -> Any:
    names = dict(zip(("dim", "keepdim"), args, strict=False)) | kwargs
    dim, keepdim = names.get("dim", names.get("axis")), bool(names.get("keepdim", False))
    if len(args) > 1 and all(isinstance(a, int) and not isinstance(a, bool) for a in args):
        dim, keepdim = args, False
    fact = ctx.fact(x)
    if isinstance(fact, Mask) or (isinstance(fact, Table) and fact.ones):
        value = tensor(node)
        return over_slots(ctx, node, x, dim, keepdim) if value is None or tells_none(value.dtype) else None
    if isinstance(fact, Stacked):
        return _sum_of(node, fact) if dim == fact.dim and not keepdim else None
    if not isinstance(fact, Rows):
        return None
    rank = len(fact.axes)
    dims = sorted({normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,) if dim is not None else range(rank))})
    over = [a for d in dims for a in fact.axes[d] if not same(a.size, 1)] or [a for d in dims for a in fact.axes[d]]
    left = tuple((() if i in dims else a) for i, a in enumerate(fact.axes) if keepdim or i not in dims)
    if {a.kind for a in over} == {"f"}:
        return _over_features(ctx, node, x, dims, keepdim)
    if len(dims) == 1:
        return combined(ctx, node, fact, fact.axes[dims[0]], left)
    return ctx.lost("not-row-local", node, op="sum")


def _sum_of(node: Node, stacked: Stacked) -> Sum:
    return Sum(_plain_axes(node), None, tuple(Part(rows, node) for rows in stacked.items))


def _over_features(ctx: Context, node: Node, x: Any, dims: list[int], keepdim: bool) -> Any:
    from moefuse.passes.rules.rows.pointwise import over_features

    found = over_features(ctx, node, x, tuple(dims))
    if not isinstance(found, Rows):
        return found
    expr = found.expr
    return replace(found, expr=replace(expr, kwargs=(*expr.kwargs, ("keepdim", True)))) if isinstance(expr, Op) else None


def combined(ctx: Context, node: Node, rows: Rows, over: Axis, left: Axes) -> Any:
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


def accumulated(ctx: Context, node: Node, target: Node, rows: Rows, *, once: bool = False, replaced: bool = False) -> Any:
    """An accumulator with one more part, which is added to what stands there, or replaces it."""
    current = ctx.fact(target)
    part = Part(rows, node)
    shape = out_shape(target)
    axes: Axes = tuple((Atom("d", i, s),) for i, s in enumerate(shape))
    if isinstance(current, Sum):
        same_way = current.base is None or current.replaced == replaced
        return replace(current, parts=(*current.parts, part), once=current.once or once) if same_way else None
    if isinstance(current, Fill) and current.value == 0.0:
        return Sum(axes, None, (part,), once)
    own = isinstance(current, View) and (current.root is target or ctx.storage[target] is target)  # a clone is a tensor of its own
    return Sum(axes, target, (part,), once, replaced) if own or isinstance(current, Combined) else None


@rule("index_add", "index_reduce")
def on_index_add(ctx: Context, node: Node, target: Node, dim: int, index: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
    rows, where = ctx.fact(source), ctx.fact(index)
    if not isinstance(rows, Rows) or dim != 0 or args or kwargs.get("alpha", 1) != 1 or ctx.calls[node].name != "index_add":  # type: ignore[union-attr]
        return None
    return add_rows(ctx, node, target, where, rows)


def add_rows(ctx: Context, node: Node, target: Node, where: Any, rows: Rows) -> Any:
    """Rows added to the tokens they came from."""
    if isinstance(where, Index) and where.of == "token" and rows.domain.selection is not None:
        return accumulated(ctx, node, target, rows) if where.selection.same(rows.domain.selection) else None
    if (
        isinstance(where, Range)
        and rows.domain.name == "slots"
        and rows.domain.routing is not None
        and _token_of_slot(where, rows.domain.routing)
    ):
        base = _base(ctx, target)
        tokens = tuple(Atom("t", i, s) for i, s in enumerate(rows.domain.routing.tokens))
        return None if base is False else Combined((tokens, *rows.axes[1:]), rows, base)
    if isinstance(where, Sorted) and where.of == "slot" and where.order.routing.top_k > 1:
        from moefuse.passes.rules.sums.assign import unsort

        zeros = ctx.fact(target)
        return unsort(rows, where) if isinstance(zeros, Fill) and zeros.value == 0.0 else None
    each_token = isinstance(where, Sorted) and (where.of == "token" or (where.of == "slot" and where.order.routing.top_k == 1))
    if isinstance(where, Sorted) and each_token and rows.domain.order is where.order:
        base = _base(ctx, target)
        if base is False:
            return None
        tokens = tuple(Atom("t", i, s) for i, s in enumerate(where.order.routing.tokens))
        return Combined((tokens, *rows.axes[1:]), rows, base)
    return None


def _token_of_slot(where: Range, routing: Routing) -> bool:
    """``arange(T).repeat_interleave(K)``."""
    axis = where.axes[0] if len(where.axes) == 1 else ()
    names = [a.kind for a in axis if not same(a.size, 1)]
    expected = [kind for kind, size in (("d", routing.num_tokens), ("b", routing.top_k)) if not same(size, 1)]
    return names == expected and same(where.size, routing.num_tokens) and same(extent(axis), routing.num_tokens * routing.top_k)


def _base(ctx: Context, target: Node) -> Any:
    current = ctx.fact(target)
    if isinstance(current, Fill):
        return None if current.value == 0.0 else False
    return target if isinstance(current, View) and current.root is target else False


def scatter_add_rows(ctx: Context, node: Node, target: Node, dim: int, index: Node, source: Any) -> Any:
    """``out.scatter_add_(0, tok[:, None].expand(-1, H), rows)``."""
    rows, where = ctx.fact(source), ctx.fact(index)
    if not isinstance(rows, Rows) or dim != 0 or not isinstance(where, Index | Sorted) or len(where.axes) != 2:
        return None
    if [a.kind for a in where.axes[1]] != ["b"] or not same(where.axes[1][0].size, out_shape(target)[-1]):
        return None
    return add_rows(ctx, node, target, where, rows)


@rule("scatter_reduce")
def on_scatter_reduce(
    ctx: Context, node: Node, target: Node, dim: int, index: Node, src: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """``scatter_add`` by another name."""
    return scatter_add_rows(ctx, node, target, dim, index, src) if reduce == "sum" and include_self else None


def scatter_sorted(ctx: Context, target: Node, dim: int, index: Node, source: Any) -> Any:
    """``out.scatter(0, perm[:, None].expand(-1, H), rows)``: back to one row per slot."""
    from moefuse.passes.rules.sums.assign import unsort

    rows, where = ctx.fact(source), ctx.fact(index)
    full = isinstance(where, Sorted) and len(where.axes) == 2 and [a.kind for a in where.axes[1]] == ["b"]
    return unsort(rows, where) if full and isinstance(rows, Rows) and dim == 0 and isinstance(ctx.fact(target), Fill) else None


@rule("index_put")
def on_index_put(ctx: Context, node: Node, target: Node, indices: Any, values: Any, accumulate: bool = False) -> Any:
    from moefuse.passes.rules.sums.assign import on_setitem

    if not isinstance(indices, tuple | list) or not indices:
        return None
    if not accumulate:
        return on_setitem(ctx, node, target, tuple(indices), values)
    rows, where = ctx.fact(values), ctx.fact(indices[0]) if len(indices) == 1 else None
    if not isinstance(rows, Rows):
        return None
    if isinstance(where, Mask | Table) and rows.domain.selection is not None:
        from moefuse.passes.rules.sums.assign import _selection

        chosen = _selection(where)
        return accumulated(ctx, node, target, rows) if chosen is not None and chosen.same(rows.domain.selection) else None
    return add_rows(ctx, node, target, where, rows)


def add_to_sum(ctx: Context, node: Node, a: Any, b: Any) -> Any:
    """``acc + rows`` of one expert, in any order; None if neither side is an accumulation."""
    x, y = ctx.fact(a), ctx.fact(b)
    if isinstance(x, Sum) and isinstance(y, Sum):
        return _merged(x, y)
    for first, second, summed in ((x, y, b), (y, x, a)):
        if isinstance(first, Fill) and first.value == 0.0 and isinstance(second, Sum) and _same_tensor(node, summed):
            return replace(second, axes=_plain_axes(node))
    for first, second, source in ((x, y, a), (y, x, b)):
        if not isinstance(second, Rows) or not _selects(second):
            continue
        if isinstance(first, Sum) or (isinstance(first, Fill) and first.value == 0.0):
            return _grown(ctx, node, first, second)
        if isinstance(first, Rows) and _selects(first) and first.domain.name == "masked" and not first.domain.same(second.domain):
            return Sum(_plain_axes(node), None, (Part(first, node), Part(second, node)))
        if source == 0:
            return second
        if isinstance(first, View) and second.domain.name == "masked" and isinstance(source, Node) and first.root is source:
            return Sum(_plain_axes(node), source, (Part(second, node),))
    return None


def _grown(ctx: Context, node: Node, first: Any, rows: Rows) -> Sum | None:
    if rows.domain.name != "masked":
        return None
    part = Part(rows, node)
    if isinstance(first, Sum):
        return replace(first, axes=_plain_axes(node), parts=(*first.parts, part))
    return Sum(_plain_axes(node), None, (part,))


def _same_tensor(node: Node, other: Node) -> bool:
    """Whether a sum has the shape and dtype of one of its terms."""
    mine, theirs = tensor(node), tensor(other)
    return mine is not None and theirs is not None and mine.dtype == theirs.dtype and same_shape(out_shape(node), out_shape(other))


def _merged(x: Sum, y: Sum) -> Sum | None:
    """Two halves of one layer; two whole layers, or sums over different routings, stay two."""
    routings = {p.rows.domain.routing for p in (*x.parts, *y.parts)} - {None}
    if (x.base is not None and y.base is not None) or x.replaced or y.replaced or len(routings) > 1 or _experts(x) & _experts(y):
        return None
    return Sum(x.axes, x.base or y.base, (*x.parts, *y.parts), x.once or y.once)


def _experts(found: Sum) -> set[tuple[Any, int | None]]:
    return {(p.rows.domain.expert, p.rows.domain.slot) for p in found.parts}


def _plain_axes(node: Node) -> Axes:
    return tuple((Atom("d", i, s),) for i, s in enumerate(out_shape(node)))


def _selects(rows: Rows) -> bool:
    """Whether the routing table is already in the expression, so that adding means combining experts."""
    return rows.domain.name == "masked" and any(isinstance(e, Gate) for e in walk(rows.expr))


@rule("stack", "cat")
def on_stack(ctx: Context, node: Node, tensors: Any, dim: int = 0, **_: Any) -> Any:
    """Every expert's output beside the others': one dimension more, over the experts."""
    from moefuse.passes.match.cone import cone_rows

    joined = ctx.calls[node].name == "cat"  # type: ignore[union-attr]
    if not isinstance(tensors, tuple | list) or not tensors:
        return None
    tables = [ctx.fact(t) for t in tensors]
    if joined and segment_of(tables[0]) is not None:
        return joined_segments(ctx, node, tensors, tables, dim)
    if len(tensors) < 2:
        return None
    if joined and isinstance(tables[1], Counts):
        return with_zero(ctx, tensors)
    if not joined and all(isinstance(t, Table) for t in tables):
        return stacked_tables(node, tables, dim)
    rows: list[Rows] = []
    for item in tensors:
        fact = ctx.fact(item)
        found = fact if isinstance(fact, Rows) else cone_rows(ctx, node, item, None) if isinstance(fact, View) else None
        if found is None or found.domain.name != "masked":
            return None
        if joined:
            at = normalize(dim, len(found.axes))
            if found.axes[at]:
                return None
            found = found.with_axes((*found.axes[:at], *found.axes[at + 1 :]))
        rows.append(found)
    if any(r.domain.expert not in (None, i) for i, r in enumerate(rows)):
        return Stacked(tuple(rows), normalize(dim, len(out_shape(node)))) if all(_selects(r) for r in rows) else None
    routing = next((r.domain.routing for r in rows if r.domain.routing is not None), None)
    expr = generalise([r.expr for r in rows], list(range(len(rows))), node)
    if isinstance(expr, Lost):
        return expr
    axes = list(rows[0].axes)
    axes.insert(normalize(dim, len(axes) + 1), (Atom("e", 0, len(rows)),))
    return Rows(tuple(axes), Domain("dense", routing), expr)


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


@rule("gather", "take_along_dim")
def on_gather(ctx: Context, node: Node, x: Any, dim: Any, index: Any, **_: Any) -> Any:
    """The outputs of the chosen experts out of those of all experts."""
    from moefuse.passes.rules.routing.masks import is_integer, role_axes

    if not isinstance(dim, int):
        dim, index = index, dim
    rows, view, where = ctx.fact(x), ctx.view(index), ctx.fact(index)
    if isinstance(rows, Picked):
        return sparse_entries.gathered(node, rows, dim, where)
    if dim == 0 and isinstance(where, Index | Sorted) and len(where.axes) == 2 and [a.kind for a in where.axes[1]] == ["b"]:
        from moefuse.passes.rules.rows.advanced_index import by_tensor

        whole = same(where.axes[1][0].size, out_shape(x)[-1])
        return by_tensor(ctx, node, x, [index]) if whole else None
    if not isinstance(rows, Rows) or rows.domain.name != "dense" or view is None or not is_integer(index):
        return None
    at = normalize(dim, len(rows.axes))
    if [a.kind for a in rows.axes[at]] != ["e"]:
        return None
    rest = view.axes[:-1] if view.axes and all(a.kind == "b" for a in view.axes[-1]) else None
    plain = replace(view, axes=rest) if rest is not None else None
    routing = ctx.routing(plain) if plain is not None else None
    roles = role_axes(plain, routing) if plain is not None and routing is not None else None
    if roles is None or len(roles) != len(rows.axes) - 1 or (rows.domain.routing is not None and rows.domain.routing is not routing):
        return None
    if tensor(node) is None or [a.kind for a in roles[at]] not in (["k"], []):
        return None
    return Rows((*roles, rows.axes[-1]), Domain("slots", routing), rows.expr)
