"""Conditions: a boolean for each number of an expert's rows (``h > 0``). Of anything else, they are about who chose which expert."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.infer.operands import is_condition
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Finding, Mask, Rows, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.comparisons import on_bound, on_compare
from moefuse.passes.rules.routing.ids import is_integer
from moefuse.passes.rules.routing.masks import on_not
from moefuse.passes.rules.routing.valid_slots import on_and
from moefuse.passes.rules.rows.pointwise import row_local


@rule("eq", "ne")
def on_equal(ctx: Context, node: Node, x: Any, other: Any) -> Finding:
    return on_compare(ctx, node, x, other) or on_rows(ctx, node, x, other)


@rule("gt", "ge", "lt", "le")
def on_order(ctx: Context, node: Node, x: Any, other: Any) -> Finding:
    return on_bound(ctx, node, x, other) or on_rows(ctx, node, x, other)


@rule("bitwise_not", "logical_not")
def on_negation(ctx: Context, node: Node, x: Node) -> Finding:
    return on_not(ctx, node, x) or on_rows(ctx, node, x)


@rule("bitwise_and")
def on_both(ctx: Context, node: Node, x: Any, other: Any) -> Finding:
    return on_and(ctx, node, x, other) or on_rows(ctx, node, x, other)


@rule("bitwise_or", "isnan", "isinf", "isfinite")
def on_rows(ctx: Context, node: Node, *values: Any) -> Finding:
    """A condition of rows alone. Rows in integers are those of ids, and with a mask it says who chose the expert."""
    facts, call = {v: fact for v in values if (fact := ctx.fact(v)) is not None}, ctx.calls[node]
    rows = [v for v, fact in facts.items() if isinstance(fact, Rows)]
    if call is None or not rows or any(map(is_integer, rows)) or any(isinstance(fact, Mask | Table) for fact in facts.values()):
        return None
    return row_local(ctx, node, values, {}) if is_condition(node, call) else None
