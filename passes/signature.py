"""When two regions are the same but for the values of their weights: then one verification speaks for both."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from moefuse.passes.expr import Cast, ExpertVector, Expr, Gate, Leaf, Linear, Op, SharedVector, Slice, SlotWeight, Token
from moefuse.passes.ops import tensor
from moefuse.passes.regions import Region
from moefuse.passes.sizes import shape_of


def signature(region: Region, tier: str) -> Hashable:
    """Equal for regions with equal structure, sizes, dtypes and spelling."""
    names = tuple(str(n.target) for n in region.anchor.graph.nodes if n in region.nodes)
    rest = None if region.rest is None else (region.rest.numbers, _of(region.rest.expr, {}))
    return (
        tier,
        region.domain,
        region.routing.top_k,
        region.routing.columns,
        None if region.routing.kept is None else (_tensor(region.routing.kept), region.routing.above),
        tuple(map(str, region.routing.shared)),
        region.apart,
        region.replaced,
        region.num_experts,
        region.base is None,
        _of(region.expr, {}),
        rest,
        names,
    )


def _leaf(leaf: Leaf) -> Hashable:
    value = tensor(leaf.source)
    strides = tuple(str(s) for s in value.stride()) if value is not None else ()
    return leaf.stacked, leaf.order, len(leaf.parts), _tensor(leaf.source), strides


def _tensor(node: Any) -> Hashable:
    value = tensor(node)
    return (tuple(str(s) for s in shape_of(value)), value.dtype, value.device) if value is not None else None


def _of(expr: Any, memo: dict[int, int]) -> Hashable:
    if not isinstance(expr, Expr):
        return type(expr).__name__, str(expr)
    if id(expr) in memo:
        return "again", memo[id(expr)]
    memo[id(expr)] = len(memo)
    children = tuple(_of(c, memo) for c in expr.children)
    match expr:
        case Token():
            return "token", expr.width, expr.by_slot, _tensor(expr.source)
        case SlotWeight():
            return "slot", _tensor(expr.source)
        case SharedVector():
            return "shared", _tensor(expr.source)
        case Gate():
            return "gate", expr.slots, expr.ones, _tensor(expr.source)
        case Linear():
            return "linear", _leaf(expr.weight), children
        case ExpertVector():
            return "vector", _leaf(expr.vector)
        case Slice():
            return "slice", expr.start, expr.step, expr.length, expr.of, children
        case Cast():
            return "cast", expr.dtype, children
        case Op():
            constants = tuple(str(a) for a in (*expr.args, *expr.kwargs) if not isinstance(a, Expr) and not isinstance(a, tuple))
            options = tuple((k, None if isinstance(v, Expr) else str(v)) for k, v in expr.kwargs)
            return "op", expr.name, constants, options, children
    return type(expr).__name__
