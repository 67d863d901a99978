"""All slots of all tokens, out of one expert's rows of one slot after another: ``torch.stack(tables, 1)`` of a table for each slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import FILLS
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.anti_unify import generalise
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.expr import Expr, Gate, SlotWeight, rebuilt, walk, weight_leaves
from moefuse.passes.ir.expr_algebra import same_expr
from moefuse.passes.ir.facts import Domain, Lost, Part, Routing, RowNumber, Rows, Sum


def stacked_slots(ctx: Context, node: Node, tables: Sequence[Any], dim: Any) -> Rows | Lost | None:
    """A table for each slot, in which a token has the row of the one expert that it chose there, beside the others'."""
    if not all(isinstance(t, Sum) and nothing_else(ctx, t) for t in tables):
        return None
    if any(
        p.rows.domain.slot != at or p.rows.domain.name != "selected" or p.of is not None for at, t in enumerate(tables) for p in t.parts
    ):
        return None
    at, shape = normalize(dim, len(out_shape(node))), list(out_shape(node))
    del shape[at]
    parts = [p for t in tables for p in t.parts]
    routing = parts[0].rows.domain.routing
    lead = None if routing is None else _token_axes(routing, tuple(shape[:-1]))
    if routing is None or lead is None or not same(routing.top_k, len(tables)):
        return None
    axes = [*lead, (Atom("f", 0, shape[-1]),)]
    axes.insert(at, (Atom("k", 0, routing.top_k),))
    return whole(ctx, node, parts, tuple(axes))


def whole(ctx: Context, node: Node, parts: Sequence[Part], axes: Axes) -> Rows | Lost | None:
    """Rows of all slots, once each expert has written its own in each slot; None before that."""
    routing = parts[0].rows.domain.routing
    if routing is None or any(p.rows.domain.routing is not routing or isinstance(p.rows.domain.expert, RowNumber) for p in parts):
        return None
    by = {(p.rows.domain.slot, p.rows.domain.expert): p.rows.expr for p in parts}
    slots, experts = {slot for slot, _ in by}, {expert for _, expert in by}
    count, choices = len(experts), routing.choices
    stacks = {shape_of(tensor(leaf.source))[leaf.along] for p in parts for leaf in weight_leaves(p.rows.expr) if leaf.stacked}  # type: ignore[arg-type]
    if len(by) != len(parts) or len(by) != count * len(slots) or slots != set(range(routing.top_k)) or experts != set(range(count)):
        return None
    if (choices is not None and count < choices) or stacks - {count}:
        return None
    found: list[Expr] = []
    for slot in range(routing.top_k):
        expr = generalise([by[slot, e] for e in range(count)], list(range(count)), node)
        if isinstance(expr, Lost):
            return expr
        if any(isinstance(e, SlotWeight) and e.slot not in (None, slot) for e in walk(expr)):
            detail = "the rows of a slot are weighted by the routing weight of another slot"
            return ctx.lost("experts-differ", node, expert="0", detail=detail)
        found.append(rebuilt(expr, _weight))
    if not all(same_expr(found[0], other) for other in found[1:]):
        return ctx.lost("experts-differ", node, expert="0", detail="for another slot of a token they compute something else")
    ctx.segments.update({p.node: (p,) for p in parts})
    return Rows(axes, Domain("slots", routing), found[0])


def _weight(old: Expr, run: Any) -> Expr | None:
    """The routing weight of a row's slot, whichever that is."""
    if isinstance(old, Gate) and old.slots:
        return SlotWeight(old.node, old.source)
    return replace(old, slot=None) if isinstance(old, SlotWeight) and old.slot is not None else None


def nothing_else(ctx: Context, found: Sum) -> bool:
    """Whether a tensor has an expert's row or zeros for each token: nothing is left of what stood there before."""
    if found.base is None:
        return True
    made, domains = ctx.calls[ctx.storage[found.base]], [p.rows.domain for p in found.parts]
    routing, experts = domains[0].routing, {d.expert for d in domains}
    if not found.replaced or made is None or made.name not in FILLS or routing is None or not routing.whole:
        return False
    own = all(d.routing is routing and d.slot == domains[0].slot and not isinstance(d.expert, RowNumber) for d in domains)
    one = domains[0].slot is not None or routing.top_k == 1
    return own and one and routing.choices is not None and experts >= set(range(routing.choices))


def _token_axes(routing: Routing, shape: tuple[Any, ...]) -> list[Any] | None:
    """The axes of dimensions that count the tokens of a routing as its ids do, or all at once."""
    tokens = [Atom("t", i, s) for i, s in enumerate(routing.tokens)]
    if len(shape) == len(tokens) and all(same(a.size, s) for a, s in zip(tokens, shape, strict=True)):
        return [(a,) for a in tokens]
    return [tuple(tokens)] if len(shape) == 1 and same(routing.num_tokens, shape[0]) else None


__all__ = ["nothing_else", "stacked_slots", "whole"]
