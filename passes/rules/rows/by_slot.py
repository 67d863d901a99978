"""A table for each slot, in which a token has the row of the one expert that it chose there, times the routing weights of that slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.operands import padded
from moefuse.passes.infer.state import out_shape
from moefuse.passes.ir.axes import extent, fresh
from moefuse.passes.ir.expr import Expr, Gate, Op, SlotWeight
from moefuse.passes.ir.facts import Column, Part, Rows, Sum
from moefuse.passes.rules.routing.ids import is_slot_weight


def by_slot(node: Node, summed: Any, weights: Any) -> Sum | None:
    """``table * w[:, k, None]``: each expert's rows times their weight, where the table has no others."""
    if not isinstance(summed, Sum) or summed.base is not None or not isinstance(weights, Column):
        return None
    axes, shape = padded(weights.axes, len(out_shape(node))), out_shape(node)
    lined_up = all(same(extent(axis), size) for axis, size in zip(axes[:-1], shape[:-1], strict=True)) and same(extent(axes[-1]), 1)
    if not lined_up or len(summed.axes) != len(shape) or not all(_of_slot(p.rows, weights) for p in summed.parts):
        return None
    return Sum(fresh(shape), None, tuple(Part(_times(node, p.rows, weights), p.node, p) for p in summed.parts), summed.once)


def _of_slot(rows: Rows, weights: Column) -> bool:
    """Whether rows are of tokens that chose their expert in this very slot."""
    routing, domain = rows.domain.routing, rows.domain
    known = routing is not None and domain.expert is not None and domain.slot == weights.slot
    return known and routing is not None and is_slot_weight(weights.base, routing) and domain.name in ("selected", "masked")


def _times(node: Node, rows: Rows, weights: Column) -> Rows:
    source, selected = weights.base.root, rows.domain.name == "selected"
    weight: Expr = Gate(node, source, True, False, rows.domain.expert) if selected else SlotWeight(node, source, weights.slot)
    return replace(rows, expr=Op(node, "mul", (rows.expr, weight)))


__all__ = ["by_slot"]
