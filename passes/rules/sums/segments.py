"""Sorted slots cut where one expert's slots end: each piece is that expert's rows, and all of them in a row are the sorted slots again."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.infer.symbolic_sizes import refine, settle
from moefuse.passes.ir.anti_unify import generalise, specialise
from moefuse.passes.ir.axes import Atom, Axes, Axis, extent
from moefuse.passes.ir.expr import Expr, weight_leaves
from moefuse.passes.ir.facts import (
    Domain,
    Fact,
    Fill,
    Finding,
    Index,
    Lost,
    Many,
    Order,
    Part,
    Pieces,
    Routing,
    Rows,
    Selection,
    Sorted,
    Span,
)
from moefuse.passes.rules.routing.offsets import bound
from moefuse.passes.rules.routing.sort import slot_rows

_OF = {"slot": "flat", "token": "token"}


def of_bounds(ctx: Context, node: Node, fact: Fact, start: Any, stop: Any) -> Finding:
    """``sorted[start:stop]``."""
    if _all_of_them(ctx, fact, start, stop):
        rows, *rest = fact.axes
        return fact.with_axes(((rows[0]._replace(size=out_shape(node)[0]),), *rest))
    found = _expert(ctx, start, stop)
    if found is None:
        return _unknown(ctx, node, fact)
    length = out_shape(node)[0] if tensor(node) is not None and out_shape(node) else 0
    return piece(ctx, node, fact, *found, length)


def of_sizes(ctx: Context, node: Node, fact: Any, sizes: Any) -> Finding:
    """``sorted.split(counts.tolist())``: a piece for each expert, from the first on."""
    known = [ctx.fact(s) for s in sizes]
    values = fake(node)
    if any(not isinstance(s, Span) or (s.start, s.stop) != (e, e + 1) for e, s in enumerate(known)) or not isinstance(values, tuple | list):
        return _unknown(ctx, node, fact)
    lengths = [shape_of(v)[0] for v in values]
    pieces = [piece(ctx, node, fact, s.routing, e, n) for e, (s, n) in enumerate(zip(known, lengths, strict=True))]
    return next((p for p in pieces if isinstance(p, Lost)), Many(tuple(pieces)))


def _all_of_them(ctx: Context, fact: Any, start: Any, stop: Any) -> bool:
    """``sorted[:sum(counts)]``: every slot, where no id is that of another expert."""
    first, last = bound(ctx, start), bound(ctx, stop) if stop is not None else None
    if first is None or first[1] != 0 or last is None or last[0] is None:
        return False
    order = fact.order if isinstance(fact, Sorted) else fact.domain.order
    return order is not None and order.routing is last[0] and last[0].kept is None and last[0].within(last[1])


def _expert(ctx: Context, start: Any, stop: Any) -> tuple[Routing, int] | None:
    """The one expert whose sorted slots lie between two offsets."""
    low, high = bound(ctx, start), bound(ctx, stop) if stop is not None else None
    if low is None or high is None or high[0] is None or high[1] != low[1] + 1 or low[0] not in (None, high[0]):
        return None
    return high[0], low[1]


def _unknown(ctx: Context, node: Node, fact: Any) -> Lost | None:
    text = "the rows are cut where no expert's rows are known to end"
    return ctx.lost("tokens-differ", node, detail=text) if isinstance(fact, Rows) and fact.domain.routing is not None else None


def piece(ctx: Context, node: Node, fact: Any, routing: Routing, expert: int, length: Any) -> Finding:
    """The rows of one expert out of all sorted slots."""
    order = fact.order if isinstance(fact, Sorted) else fact.domain.order
    if order is None or order.routing is not routing:
        return ctx.lost("tokens-differ", node, detail="rows sorted by one routing are cut by the counts of another")
    chosen = Selection(routing, expert, by_token=False, order=order)
    axes: Axes = ((Atom("r", 0, length),), *fact.axes[1:])
    if isinstance(fact, Sorted):
        return Index(axes, chosen, _OF[fact.of]) if fact.of in _OF else None
    expr = specialise(fact.expr, expert)
    if expr is None:
        return ctx.lost("missing-experts", node, detail=f"there are counts of {expert + 1} experts or more, and weights of fewer")
    return Rows(axes, Domain("selected", routing, selection=chosen, expert=expert), expr)


def is_sorted(fact: Any) -> bool:
    """Whether the first dimension of a value is all sorted slots."""
    if isinstance(fact, Rows) and fact.domain.name != "sorted":
        return False
    return isinstance(fact, Rows | Sorted) and bool(fact.axes) and [a.kind for a in fact.axes[0]] == ["r"]


def segment_of(fact: Any) -> tuple[Order, int] | None:
    """(order, expert) of the rows of a piece."""
    if not isinstance(fact, Rows) or fact.domain.selection is None or fact.domain.selection.order is None:
        return None
    return fact.domain.selection.order, fact.domain.selection.expert


def joined(ctx: Context, node: Node, tensors: Any, facts: list[Any], dim: Any) -> Finding:
    """``cat(pieces)``: the sorted slots again, if every expert's piece is there, in its place."""
    known = [segment_of(f) for f in facts]
    if dim != 0 or None in known:
        return None
    found = complete(ctx, node, tuple(Part(f, t) for f, t in zip(facts, tensors, strict=True)))
    routing = found.domain.routing if isinstance(found, Rows) else None
    if isinstance(found, Rows) and routing is not None and routing.kept is None and routing.choices == len(facts):
        settle(ctx.sizes, [f.axes[0][0].size for f in facts], extent(found.axes[0]))
        refine(ctx.sizes, node)
    return found


def complete(ctx: Context, node: Node, parts: tuple[Part, ...], *, filled: bool = False) -> Finding:
    """All sorted slots, of the pieces of experts 0, 1, 2, ..."""
    order = segment_of(parts[0].rows)[0]  # type: ignore[index]
    if any(segment_of(p.rows) != (order, e) for e, p in enumerate(parts)):
        return ctx.lost("tokens-differ", node, detail="the experts' rows are not put together in the order in which they were sorted")
    expr = generalise([p.rows.expr for p in parts], list(range(len(parts))), node)
    if isinstance(expr, Lost):
        return expr
    problem = _all_there(ctx, node, order.routing, expr, len(parts), filled)
    if problem is not None:
        return problem
    ctx.segments[node] = parts
    first = parts[0].rows
    rows: Axis = slot_rows(order.routing) if order.routing.kept is None else (Atom("r", 0, out_shape(node)[0]),)
    return Rows((rows, *first.axes[1:]), Domain("sorted", order.routing, order=order), expr)


def _all_there(ctx: Context, node: Node, routing: Routing, expr: Expr, count: int, filled: bool) -> Lost | None:
    """Whether ``count`` experts are all that there are: as many as weights, or as scores that the ids were chosen by.

    A tensor that is ``filled`` has all of its rows from the beginning; rows that are put beside each other must come to all slots.
    """
    leaves = weight_leaves(expr)
    sizes = {shape_of(tensor(leaf.source))[0] for leaf in leaves if leaf.stacked}  # type: ignore[arg-type]
    if filled or not leaves:
        sizes = sizes or {routing.choices}
    sizes |= {len(leaf.parts) for leaf in leaves if leaf.parts}
    if sizes == {count}:
        return None
    return ctx.lost(
        "missing-experts", node, present=f"0..{count - 1}", count=" and ".join(str(size) for size in sizes if size is not None) or "more"
    )


def fill(ctx: Context, node: Node, current: Any, start: Any, stop: Any, value: Any) -> Finding:
    """``out[start:stop] = rows``, with experts in order."""
    rows = ctx.fact(value)
    found, where = segment_of(rows), _expert(ctx, start, stop)
    if found is None or not isinstance(rows, Rows):
        return None
    order, expert = found
    if where is None or where[0] is not order.routing or where[1] != expert:
        return ctx.lost("tokens-differ", node, detail="an expert's rows are not put where they were taken from")
    slots = order.routing.num_tokens * order.routing.top_k
    before = current.parts if isinstance(current, Pieces) else ()
    if expert != len(before) or len(current.axes) != len(rows.axes) or not same(extent(current.axes[0]), slots):
        return ctx.lost("tokens-differ", node, detail="the experts' rows are not put together in the order in which they were sorted")
    if not isinstance(current, Pieces) and not (isinstance(current, Fill) and (current.value == 0.0 or current.value != current.value)):
        return None
    part = Part(rows, node)
    parts = (*before, part)
    whole = complete(ctx, node, parts, filled=True)
    ctx.segments[node] = (part,)
    return whole if isinstance(whole, Rows) else Pieces(((Atom("r", 0, slots),), *rows.axes[1:]), order, parts)


__all__ = ["fill", "is_sorted", "joined", "of_bounds", "of_sizes", "piece", "segment_of"]
