"""Slots one after another: ``e = ids[:, k]; out = out + w[:, k:k + 1] * (W[e] @ x)``. Each adds rows of its own to an accumulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same, same_shape, shape_of
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import atoms
from moefuse.passes.ir.expr import Leaf, weight_leaves
from moefuse.passes.ir.facts import Column, Domain, Fill, Part, Routing, Rows, Sum
from moefuse.passes.rules.sums.accumulate import plain_axes


def added(ctx: Context, node: Node, a: Any, b: Any, x: Any, y: Any) -> Sum | None:
    """The rows of a slot, and those of others, or nothing else yet (``0 + rows``); None where a side is anything else."""
    mine, theirs = _parts(ctx, node, x), _parts(ctx, node, y)
    parts = (*(mine or ()), *(theirs or ()))
    if not parts or len({p.rows.domain.routing for p in parts}) != 1:
        return None
    if (mine is None and not _nothing(ctx, node, a, b)) or (theirs is None and not _nothing(ctx, node, b, a)):
        return None
    return Sum(plain_axes(node), None, parts)


def _nothing(ctx: Context, node: Node, zero: Any, rows: Any) -> bool:
    """Whether the sum with a value is the other one as it is."""
    before, after, filled = tensor(rows), tensor(node), ctx.fact(zero)
    nothing = zero == 0 if isinstance(zero, int | float) else isinstance(filled, Fill) and filled.value == 0.0
    alike = before is not None and after is not None and before.dtype == after.dtype
    return nothing and alike and same_shape(shape_of(before), shape_of(after))  # type: ignore[arg-type]


def _parts(ctx: Context, node: Node, fact: Any) -> tuple[Part, ...] | None:
    if isinstance(fact, Sum):
        return fact.parts if fact.base is None and all(p.rows.domain.name == "slots" for p in fact.parts) else None
    found = _column(ctx, fact.domain) if isinstance(fact, Rows) else None
    if found is None:
        return None
    whole, slot = found
    # An id of no expert is the ops' to leave out; ``W[ids]`` raises, or counts from the end.
    sizes = [_rows_of(leaf) for leaf in weight_leaves(fact.expr) if tensor(leaf.source) is not None]
    if not sizes or not all(isinstance(size, int) and whole.within(size) for size in sizes):
        return None
    return (Part(replace(fact, domain=Domain("slots", whole, slot=slot)), node),)


def _rows_of(leaf: Leaf) -> Any:
    """Of how many experts a weight is; None for one that is no stack, and no list either."""
    value = tensor(leaf.source)
    return len(leaf.parts) or None if not leaf.stacked or value is None else shape_of(value)[leaf.along]


def _column(ctx: Context, domain: Domain) -> tuple[Routing, int] | None:
    """The ids of all slots, and which slot of them the rows of a domain chose their experts by."""
    column = ctx.facts.get(domain.routing.node) if domain.routing is not None and domain.name == "slots" else None
    whole = routing_of(ctx, column.base) if isinstance(column, Column) else None
    if whole is None or not isinstance(column, Column) or domain.routing is None or not whole.has_slots or whole.top_k < 2:
        return None
    dims = [a.index for a in atoms(column.base.axes)]
    return (whole, column.slot) if dims == sorted(dims) and same(whole.num_tokens, domain.routing.num_tokens) else None


__all__ = ["added"]
