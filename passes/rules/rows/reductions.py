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
from moefuse.passes.ir.facts import Lost, Rows, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.tables import derived
from moefuse.passes.rules.rows.pointwise import operand


def over_features(ctx: Context, node: Node, x: Node, dim: Any, *args: Any, keepdim: bool = True, **kwargs: Any) -> Any:
    """A function over the features of each row: softmax, mean, norm."""
    fact, call = ctx.fact(x), ctx.calls[node]
    if not isinstance(fact, Rows) or call is None:
        return None
    rank = len(fact.axes)
    dims = {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim if dim is not None else 0,))}
    over = [a for d in dims for a in fact.axes[d]]
    if dim is None or not over or any(a.kind != "f" for a in over):
        return ctx.lost("not-row-local", node, op=call.name)
    shape, value = out_shape(node), tensor(node)
    if value is None:
        return None
    axes = tuple((() if i in dims and len(shape) == rank and same(shape[i], 1) else a) for i, a in enumerate(fact.axes))
    if len(shape) < rank:
        axes = tuple(a for i, a in enumerate(fact.axes) if i not in dims)
    options = tuple((k, v) for k, v in kwargs.items() if scalar(v) or isinstance(v, torch.dtype))
    return Rows(axes, fact.domain, Op(node, call.name, (fact.expr, *args), (("dim", -1), *options)))


_REDUCTIONS = ("mean", "amax", "amin", "var", "std", "logsumexp", "norm", "prod")


@rule(*_REDUCTIONS, "vector_norm", "linalg_vector_norm")
def on_reduction(ctx: Context, node: Node, x: Node, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    name = ctx.calls[node].name  # type: ignore[union-attr]
    if name not in ("mean", "amax", "amin", "var", "std", "logsumexp"):
        return None
    found = over_features(ctx, node, x, dim, **kwargs)
    if isinstance(found, Rows) and isinstance(found.expr, Op):
        return replace(found, expr=replace(found.expr, kwargs=(*found.expr.kwargs, ("keepdim", True))))
    return found


@rule("max", "min")
def on_extreme(ctx: Context, node: Node, x: Node, *others: Any, **kwargs: Any) -> Any:
    """The largest value of all rows. (Of two tensors it is an operation on each element; along a dimension it has two results.)"""
    return over_features(ctx, node, x, None) if not others and not kwargs else None


@rule("log_softmax")
def on_log_softmax(ctx: Context, node: Node, x: Node, dim: Any = None, *_: Any, **kwargs: Any) -> Any:
    return over_features(ctx, node, x, dim, **kwargs)


@rule("layer_norm", "rms_norm")
def on_norm(ctx: Context, node: Node, x: Node, shape: Any, *args: Any, **kwargs: Any) -> Any:
    fact, call = ctx.fact(x), ctx.calls[node]
    if not isinstance(fact, Rows) or call is None or not isinstance(shape, tuple | list) or len(shape) != 1:
        return None
    if [a.kind for a in fact.axes[-1]] != ["f"]:
        return ctx.lost("not-row-local", node, op=call.name)
    names = ("weight", "bias", "eps") if call.name == "layer_norm" else ("weight", "eps")
    options = dict(zip(names, args, strict=False)) | kwargs
    items = []
    for key, value in options.items():
        item = operand(ctx, node, fact.axes, fact.domain, value)
        if isinstance(item, Lost):
            return item
        if isinstance(item, Expr) and call.name in ("layer_norm", "rms_norm") and not isinstance(item, SharedVector | ExpertVector):
            return None
        items.append((key, item))
    return Rows(fact.axes, fact.domain, Op(node, call.name, (fact.expr, tuple(shape)), tuple(items)))


@rule("softmax", "_softmax")
def on_softmax(ctx: Context, node: Node, x: Node, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    fact = ctx.fact(x)
    if isinstance(fact, Table):
        over = {a.kind for a in fact.axes[normalize(dim if dim is not None else -1, len(fact.axes))]}
        return derived(node, fact, 0.0) if over == {"e"} and fact.fill == -math.inf else None

    return over_features(ctx, node, x, dim)
