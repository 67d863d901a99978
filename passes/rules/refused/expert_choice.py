"""Experts that choose tokens (expert choice, Zhou et al., arXiv:2202.09368): each column of the router's scores takes its best rows.

Every expert then has the same number of rows, so that its work is a batched product already. It stays as it is; what is here only
recognises it, so that the report can say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.op_classes import PLAIN_PRODUCTS, PRODUCTS, SAME_PLACES, SIZE_QUERIES
from moefuse.passes.graph.sharded import is_parameter
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.choices import dim_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost


@dataclass
class Notes:
    """``chosen``: what is computed from tokens that experts chose, and the choice. ``reported``: what any refused family has reported."""

    chosen: dict[Node, Node] = field(default_factory=dict)
    reported: set[Node] = field(default_factory=set)


def follow(ctx: Context, node: Node, call: Call, fact: Any) -> Lost | None:
    """Notes what is computed from the tokens that experts chose; a refusal where an expert's weight meets them."""
    if call.name in SIZE_QUERIES:
        return None
    notes = ctx.scratch(Notes)
    if _chooses(ctx, call):
        notes.chosen[node] = node
        return None
    source = next((notes.chosen[n] for n in node.all_input_nodes if n in notes.chosen), None)
    if source is None:
        return None
    notes.chosen[node] = source
    if source in notes.reported or fact is not None or not applies_weights(ctx, node, call):
        return None
    notes.reported.add(source)  # one refusal for all experts, at the choice
    return ctx.lost("expert-choice", source)


def _chooses(ctx: Context, call: Call) -> bool:
    """``scores.t().topk(c)[1]``: the indices of a top-k that goes along the rows of a projection, for each of its columns."""
    source = ctx.calls.get(call.args[0]) if call.name == "getitem" and call.args[1] == 1 and isinstance(call.args[0], Node) else None
    if source is None or source.name not in ("topk", "sort") or not isinstance(source.args[0], Node):
        return False
    value, dim = tensor(source.args[0]), dim_of(source)
    column = _columns(ctx, source.args[0])
    return value is not None and isinstance(dim, int) and column is not None and dim % value.dim() != column


def _columns(ctx: Context, node: Node) -> int | None:
    """Which dimension counts the features of the projection that a value is computed from, place by place; None if there is no such."""
    view, call, value = ctx.view(node), ctx.calls.get(node), tensor(node)
    if value is None or call is None:
        return None
    if view is not None and view.root is not node:
        inner = _columns(ctx, view.root)
        return next((i for i, axis in enumerate(view.axes) if [a.index for a in axis if a.kind == "d"] == [inner]), None)
    if call.name in PLAIN_PRODUCTS:
        return None if same(shape_of(value)[-1], 1) else value.dim() - 1
    first = call.args[0] if call.args else None
    before = tensor(first)
    kept = call.name in SAME_PLACES and isinstance(first, Node) and before is not None and before.dim() == value.dim()
    return _columns(ctx, first) if kept else None  # type: ignore[arg-type]


def applies_weights(ctx: Context, node: Node, call: Call) -> bool:
    """Whether an operation is a product with a matrix of weights."""
    return call.name in PRODUCTS and any(_parameter(ctx, n) for n in node.all_input_nodes)


def _parameter(ctx: Context, node: Node) -> bool:
    """Whether a tensor is a matrix of weights, or matrices."""
    value = tensor(node)
    return value is not None and value.dim() >= 2 and is_parameter(ctx.storage[node])


__all__ = ["Notes", "applies_weights", "follow"]
