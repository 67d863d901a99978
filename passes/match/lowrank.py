"""Weights that a program adds low-rank terms to, ``W + s * B @ A``, taken apart: the terms go beside the projection, the sum is never made.

As PEFT writes it for stacked experts (``baddbmm``), and as sums with ``bmm``, ``matmul`` or ``einsum``; casts, and views that turn the last
two dimensions, may stand in between. Factors keep their own dtype: what a cast rounded them to is not what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from moefuse._dynamo.values import hint
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.op_classes import CASTS
from moefuse.passes.graph.sharded import is_gathered
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Expr, Leaf, Linear, Op, rebuilt, walk
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.templates import one_op

Order = tuple[int, ...]


MOST_ROWS = {"cpu": 32}
"""For each expert, by device. With more, the C++ kernels on the sum of weights are faster: beside the products terms have none."""


@dataclass(frozen=True, eq=False)
class _Sum:
    """``base + sum of scale * left @ right``; every stack is [E, rows, columns] by its dims in order."""

    base: Leaf
    products: tuple[tuple[Leaf, Leaf, float], ...]


def taken_apart(ctx: Context, region: Region) -> Region | None:
    """The region with its weights' low-rank terms beside the projections, if one op takes them there; None where it has none."""
    device = fake(region.value).device
    if device.type in MOST_ROWS and _rows(region) > MOST_ROWS[device.type] * region.num_experts:
        return None
    linears = [e for e in walk(region.expr) if isinstance(e, Linear) and e.weight.stacked and not e.weight.parts]
    found = {id(e): s for e in linears if (s := _sum(ctx, e.weight)) is not None and s.products}
    if not found:
        return None

    def beside(old: Expr, run: Callable[[Any], Any]) -> Expr | None:
        return _beside(old, run(old.child), found[id(old)]) if isinstance(old, Linear) and id(old) in found else None

    expr = rebuilt(region.expr, beside)
    return replace(region, expr=expr, whole=region) if one_op(expr, device) else None


def _rows(region: Region) -> int:
    """S, as the program is traced; 0 where that depends on data."""
    sizes = [size if isinstance(size, int) else hint(size) for size in fake(region.value).shape[:-1]]
    return math.prod(size or 0 for size in sizes) * region.routing.top_k


def _beside(old: Linear, child: Expr, total: _Sum) -> Expr:
    """``linear(x, W) + s * linear(linear(x, A), B)``. The weight's order is (out, in), so its products are B @ A."""
    out: Expr = Linear(old.node, child, total.base)
    for b, a, scale in total.products:
        term = Linear(old.node, Linear(old.node, child, a), b)
        out = Op(old.node, "add", (out, Op(old.node, "mul", (term, scale))))
    return out


def _sum(ctx: Context, weight: Leaf) -> _Sum | None:
    """A computed weight as a sum; None if it is anything else."""
    made = _stack(ctx, weight.source)
    if made is None:
        return None
    node, turned = made
    # The dims of the last two, as this weight sees them: (out, in) of the source are these of ``node``.
    order = tuple(3 - d for d in weight.order) if turned else weight.order
    return _addends(ctx, node, order)


def _addends(ctx: Context, node: Node, order: Order) -> _Sum | None:
    call = ctx.calls.get(node)
    if call is None or call.inplace:
        return None
    if call.name == "baddbmm":
        given = dict(call.kwargs)
        base, left, right = call.args[:3]
        if given.pop("beta", 1) != 1 or not isinstance(scale := given.pop("alpha", 1), int | float) or given:
            return None
        product = _product(ctx, left, right, "bij,bjk->bik", order)
        found = _plain(ctx, base, order)
        return None if product is None or found is None else _Sum(found, ((*product, float(scale)),))
    if call.name != "add" or len(call.args) != 2 or call.kwargs:
        return None
    for base, delta in (call.args, call.args[::-1]):
        inner, term = _base(ctx, base, order), _delta(ctx, delta, order)
        if inner is not None and term is not None:
            return _Sum(inner.base, (*inner.products, term))
    return None


def _base(ctx: Context, value: Any, order: Order) -> _Sum | None:
    """A stack that the graph is given, or a sum of one."""
    made = _stack(ctx, value)
    if made is None:
        return None
    node, turned = made
    order = tuple(3 - d for d in order) if turned else order
    found = _addends(ctx, node, order)
    if found is not None:
        return found
    plain = _plain(ctx, node, order)
    return None if plain is None else _Sum(plain, ())


def _plain(ctx: Context, value: Any, order: Order) -> Leaf | None:
    made = _stack(ctx, value)
    if made is None or made[0].op not in ("placeholder", "get_attr"):
        return None
    return Leaf(made[0], True, None, tuple(3 - d for d in order) if made[1] else order)


def _delta(ctx: Context, value: Any, order: Order, scale: float = 1.0) -> tuple[Leaf, Leaf, float] | None:
    """``s * (P @ Q)`` in any of its spellings."""
    made = _stack(ctx, value)
    if made is None:
        return None
    node, turned = made
    order = tuple(3 - d for d in order) if turned else order
    call = ctx.calls.get(node)
    if call is None or call.inplace or call.kwargs:
        return None
    if call.name == "mul" and len(call.args) == 2:
        for number, other in (call.args, call.args[::-1]):
            if isinstance(number, int | float):
                return _delta(ctx, other, order, scale * number)
        return None
    args = call.args[1:] if call.name == "einsum" else call.args
    args = tuple(args[0]) if len(args) == 1 and isinstance(args[0], tuple | list) else args
    equation = {"bmm": "bij,bjk->bik", "matmul": "bij,bjk->bik", "einsum": call.args[0]}.get(call.name)
    if not isinstance(equation, str) or len(args) != 2:
        return None
    product = _product(ctx, *args, equation, order)
    return None if product is None else (*product, scale)


def _product(ctx: Context, left: Any, right: Any, equation: str, order: Order) -> tuple[Leaf, Leaf] | None:
    """(B (out, r), A (r, in)) of a batched product [E, ., .] whose dims ``order`` are (out, in). E is the first dim of each operand."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if len(labels) != 2 or len(out) != 3 or any(len(set(part)) != 3 or len(part) != 3 for part in (*labels, out)):
        return None
    expert, outer, inner = out[0], out[order[0]], out[order[1]]
    (rank, *more) = [c for c in labels[0] if c in labels[1] and c != expert] or [""]
    if more or not rank or rank in out or any(part[0] != expert for part in labels):
        return None
    leaves: dict[str, Leaf] = {}
    for value, part in ((left, labels[0]), (right, labels[1])):
        made = _stack(ctx, value)
        wanted = (outer, rank) if outer in part else (rank, inner)
        if made is None or not set(wanted) <= set(part):
            return None
        dims = tuple(part.index(c) for c in wanted)
        leaves[wanted[0] if wanted[0] != rank else rank] = Leaf(made[0], True, None, tuple(3 - d for d in dims) if made[1] else dims)
    if leaves.keys() != {outer, rank}:
        return None
    experts = {shape_of(fake(leaf.source))[0] for leaf in leaves.values()}
    return (leaves[outer], leaves[rank]) if len(experts) == 1 else None


def _stack(ctx: Context, value: Any) -> tuple[Node, bool] | None:
    """The three-dimensional tensor behind casts and turns of the last two dims, and whether these are turned. Nothing may write to it."""
    turned = False
    while isinstance(value, Node):
        call, known = ctx.calls.get(value), tensor(value)
        if known is None or known.dim() != 3 or not known.dtype.is_floating_point or known.dtype.itemsize < 2 or is_gathered(value):
            return None
        if any(name in ctx.writes for name in ctx.memory.storages(value)):
            return None
        if call is not None and call.name in CASTS and isinstance(call.args[0], Node):
            value = call.args[0]
        elif call is not None and _turns(call):
            value, turned = call.args[0], not turned
        else:
            return value, turned
    return None


def _turns(call: Any) -> bool:
    if call.name == "transpose" and len(call.args) == 3:
        return {d % 3 for d in call.args[1:]} == {1, 2}
    if call.name == "permute":
        dims = call.args[1] if isinstance(call.args[1], tuple | list) else call.args[1:]
        return [d % 3 for d in dims] == [0, 2, 1]
    return call.name in ("mT",)
