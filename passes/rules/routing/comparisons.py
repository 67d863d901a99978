"""Comparisons: of ids, which become expert-id masks, and of numbers of slots, which say whether an expert has any.

``rows/conditions.py`` registers them, and what follows from masks: an expert's rows are compared by the same operations.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.facts import Column, Counts, Finding, Hit, Mask, Range, Rows, Sorted, Span, Table
from moefuse.passes.rules.routing import slot_masks, sparse_entries
from moefuse.passes.rules.routing.ids import as_ids, role_axes
from moefuse.passes.rules.routing.masks import on_not, settled, slot_table
from moefuse.passes.rules.routing.nonempty import compared
from moefuse.passes.rules.routing.offsets import compared_spans
from moefuse.passes.rules.routing.sort import beyond


def on_compare(ctx: Context, node: Node, a: Any, other: Any) -> Finding:
    b = other
    negated = ctx.calls[node].name == "ne"  # type: ignore[union-attr]
    number = ctx.number(b)
    b = b if number is None else number
    fact = ctx.fact(a) if isinstance(a, Node) else None
    if isinstance(fact, Rows):
        return slot_masks.compared(ctx, node, fact, b, negated)
    if isinstance(fact, Span) and isinstance(b, Node):
        return compared_spans(ctx, ctx.calls[node].name, a, b)  # type: ignore[union-attr]
    if isinstance(fact, Counts | Hit | Span):
        return compared(fact, ctx.calls[node].name, b)  # type: ignore[union-attr]
    if isinstance(fact, Mask | Table) and _weighted(fact):
        return sparse_entries.compared(ctx, node, fact, above=None) if negated and b == 0 else None
    if isinstance(fact, Mask | Table) and b in (0, 1, False, True):
        return on_not(ctx, node, a) if (b in (0, False)) != negated else ctx.fact(a)
    if isinstance(fact, Range) and isinstance(b, Node):
        a, b = b, a
    b = int(b) if isinstance(b, float) and b.is_integer() and 0 <= b < 1 << 11 else b  # ``ids.float() == 1.0``, exact in any float
    view = as_ids(ctx, a, _highest(ctx, b)) if isinstance(a, Node) else None
    if isinstance(view, Column):
        return _of_slot(ctx, node, view, b, negated)
    routing = routing_of(ctx, view) if view is not None else None
    axes = role_axes(view, routing) if view is not None and routing is not None else None
    if axes is None or routing is None:
        return None
    if isinstance(b, int) and not isinstance(b, bool):
        return settled(ctx, node, Mask(axes, routing, b, negated=negated))
    merged = _beside_numbers(axes, ctx.fact(b))
    return None if merged is None else settled(ctx, node, Mask(merged, routing, None, negated=negated))


def _highest(ctx: Context, other: Any) -> int:
    """One more than the highest number that ids are compared with; none of a dtype where nobody knows it."""
    if isinstance(other, int):
        return max(ctx.members(other)) + 1
    fact = ctx.fact(other)
    return fact.size if isinstance(fact, Range) and isinstance(fact.size, int) else 1 << 62


def _beside_numbers(axes: Axes, numbers: Any) -> Axes | None:
    """The axes of ids that are compared with ``arange(E)``, along a dimension of its own."""
    if not isinstance(numbers, Range):
        return None
    rank = max(len(axes), len(numbers.axes))
    left: Axes = (*((),) * (rank - len(axes)), *axes)
    right: Axes = (*((),) * (rank - len(numbers.axes)), *numbers.axes)
    if any(x and y and not same(x[0].size, 1) for x, y in zip(left, right, strict=True)):
        return None
    return tuple((Atom("e", 0, y[0].size),) if y else x for x, y in zip(left, right, strict=True))


def _of_slot(ctx: Context, node: Node, column: Column, other: Any, negated: bool) -> Table | None:
    """``ids[:, slot] == expert``, ``ids[:, slot, None] == arange(E)``."""
    if isinstance(other, int) and not isinstance(other, bool):
        return slot_table(ctx, node, column, column.axes, other, negated)
    axes = _beside_numbers(column.axes, ctx.fact(other))
    return None if axes is None else slot_table(ctx, node, column, axes, None, negated)


def on_bound(ctx: Context, node: Node, x: Any, bound: Any) -> Finding:
    fact, name = ctx.fact(x), ctx.calls[node].name  # type: ignore[union-attr]
    if isinstance(fact, Sorted):
        return beyond(fact, name, bound)
    if isinstance(fact, Mask | Table) and not _weighted(fact):
        tells = isinstance(bound, int | float) and {"gt": 0 <= bound < 1, "ge": 0 < bound <= 1}.get(name, False)
        return fact if tells and not fact.negated else None  # ``one_hot(ids, E) > 0``
    if isinstance(fact, Mask | Table):
        above = sparse_entries.above(x, name, bound)
        return None if above is None else sparse_entries.compared(ctx, node, fact, above=above)
    if isinstance(fact, Span) and isinstance(bound, Node):
        return compared_spans(ctx, name, x, bound)
    return compared(fact, name, bound)


def _weighted(fact: Mask | Table) -> bool:
    """Whether routing weights stand where others have ones."""
    return fact.weight is not None if isinstance(fact, Mask) else not fact.ones
