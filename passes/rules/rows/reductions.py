"""Functions over the features of each row: softmax, mean, norms. Over experts, a softmax makes a routing table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.operands import scalar
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.expr import ExpertVector, Expr, Op, SharedVector
from moefuse.passes.ir.facts import Finding, Lost, Rows, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.counts import running
from moefuse.passes.rules.routing.tables import derived
from moefuse.passes.rules.rows.pointwise import operand


def over_features(ctx: Context, node: Node, x: Node, dim: Any, **options: Any) -> Finding:
    """A function over the features of each row: softmax, mean, norm, running sum."""
    fact, call = ctx.fact(x), ctx.calls[node]
    if not isinstance(fact, Rows) or call is None:
        return None
    rank = len(fact.axes)
    dims = {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim if dim is not None else 0,))}
    over = [a for d in dims for a in fact.axes[d]]
    if dim is not None and not over:
        return None
    if any(a.kind == "e" for a in over):
        return ctx.lost("not-combined", node, by=call.name)
    if dim is None or any(a.kind != "f" for a in over):
        return ctx.lost("not-row-local", node, op=call.name)
    shape, value = out_shape(node), tensor(node)
    if value is None:
        return None
    axes = tuple((() if i in dims and len(shape) == rank and same(shape[i], 1) else a) for i, a in enumerate(fact.axes))
    if len(shape) < rank:
        axes = tuple(a for i, a in enumerate(fact.axes) if i not in dims)
    given = tuple((k, v) for k, v in options.items() if v is not None)
    if not all(scalar(v) or isinstance(v, torch.dtype) for _, v in given):
        return None
    return Rows(axes, fact.domain, Op(node, call.name.lstrip("_"), (fact.expr,), (("dim", -1), *given)))


@rule("cumsum", "cumprod", "logcumsumexp")
def on_running(ctx: Context, node: Node, x: Node, dim: Any = None, *, dtype: Any = None) -> Finding:
    """Over the features of each row; of counts, it says where experts' rows end."""
    if isinstance(ctx.fact(x), Rows):
        return over_features(ctx, node, x, dim, dtype=dtype)
    return running(ctx, node, x, dim) if ctx.calls[node].name == "cumsum" else None  # type: ignore[union-attr]


@rule("mean", "amax", "amin", "var", "std", "logsumexp", shown=("keepdim",))
def on_reduction(
    ctx: Context, node: Node, x: Node, dim: Any = None, *, dtype: Any = None, unbiased: Any = None, correction: Any = None
) -> Finding:
    found = over_features(ctx, node, x, dim, dtype=dtype, unbiased=unbiased, correction=correction)
    if isinstance(found, Rows) and isinstance(found.expr, Op):
        return replace(found, expr=replace(found.expr, kwargs=(*found.expr.kwargs, ("keepdim", True))))
    return found


@rule("max", "min")
def on_extreme(ctx: Context, node: Node, x: Node) -> Finding:
    """The largest value of all rows. (Of two tensors it is ``maximum``; along a dimension it has two results.)"""
    return over_features(ctx, node, x, None)


@rule("log_softmax", shown=("_stacklevel",))
def on_log_softmax(ctx: Context, node: Node, x: Node, dim: Any = None, *, dtype: Any = None) -> Finding:
    return over_features(ctx, node, x, dim, dtype=dtype)


@rule("layer_norm", "rms_norm", shown=("cudnn_enable",))
def on_norm(ctx: Context, node: Node, x: Node, shape: Any, *, weight: Any = None, bias: Any = None, eps: Any = None) -> Finding:
    fact, call = ctx.fact(x), ctx.calls[node]
    if not isinstance(fact, Rows) or call is None or not isinstance(shape, tuple | list) or len(shape) != 1:
        return None
    if [a.kind for a in fact.axes[-1]] != ["f"]:
        return ctx.lost("not-row-local", node, op=call.name)
    items: list[tuple[str, Any]] = []
    for key, value in (("weight", weight), ("bias", bias), ("eps", eps)):
        if value is None:
            continue
        item = operand(ctx, node, fact.axes, fact.domain, value)
        if isinstance(item, Lost):
            return item
        if isinstance(item, Expr) and call.name in ("layer_norm", "rms_norm") and not isinstance(item, SharedVector | ExpertVector):
            return None
        items.append((key, item))
    return Rows(fact.axes, fact.domain, Op(node, call.name, (fact.expr, tuple(shape)), tuple(items)))


@rule("softmax", "_softmax", shown=("_stacklevel",))
def on_softmax(ctx: Context, node: Node, x: Node, dim: int | None = None, *, dtype: Any = None, half_to_float: bool = False) -> Finding:
    fact = ctx.fact(x)
    if half_to_float:
        return None
    if isinstance(fact, Table):
        over = {a.kind for a in fact.axes[normalize(dim if dim is not None else -1, len(fact.axes))]}
        return derived(node, fact, 0.0) if over == {"e"} and fact.fill == -math.inf else None
    return over_features(ctx, node, x, dim, dtype=dtype)
