"""Shared experts: what every token takes beside the routed experts, and is added to them, starts before the router and is met at the sum.

A shared expert is found from the sum: the other addend, read backwards (``cone.py``), is one expert's expression. It is described by a
region of one expert that every token chooses, so the checks, the templates and the verification are those of routed experts. Its weight
per token (a sigmoid of a projection, say) stays the user's own arithmetic.

    s = shared_start(x, ...); ...router...; result = shared_join(experts(x, ids, weights), s, gate, [x])    (``overlap_placement.py``)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.block.overlap_placement import Weight, start_and_join
from moefuse.passes.graph.builder import LAYERS, Emitter
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.op_classes import RESHAPES, SIZE_QUERIES
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.infer.cone import cone_rows
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import ExpertVector, Expr, Leaf, Linear, Op, SharedVector, SlotWeight, Token, has_linear
from moefuse.passes.ir.expr_algebra import bare, factors
from moefuse.passes.ir.facts import Lost, Routing
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.layout import in_layout
from moefuse.passes.lower.lower import Lowering
from moefuse.passes.lower.specs import compute_of
from moefuse.passes.match.interpret import interpret
from moefuse.passes.match.safety import checked
from moefuse.passes.match.templates import match
from moefuse.passes.prove.synthetic_inputs import hint
from moefuse.passes.prove.verify import verify

DEVICES = {"cuda"}
"""Where a shared expert gains from a stream of its own. Elsewhere it is left to Inductor."""

STEPS = 16
"""So many operations behind the experts a sum with a shared one is looked for: views, casts, an output projection, residuals."""


@dataclass(frozen=True, eq=False)
class Joined:
    """A shared expert that runs beside routed ones.

    Attributes:
        experts: the op of the routed experts.
        error: of the verification, as in ``moefuse.report.report.Fused``; None if switched off.
        add, result: the sum, and what stands in its place.
    """

    experts: Node
    error: float | None
    add: Node
    result: Node


def join_shared(graph: Graph, known: dict[Node, Any], tokens: int, check: bool) -> list[Joined]:
    """Join shared experts with the fused regions of a graph that all passes have left.

    Args:
        known: real values of the graph's inputs where they are known.
        tokens: up to so many tokens the two run at the same time; a call that is known to have more stays as it is.
        check: whether to verify on the model's own weights.
    """
    sums = [each for node in graph.nodes if _worth(node, tokens) for each in _sums(node)]
    if not sums:
        return []
    for each in sums:
        _read_behind(graph, each)
    ctx, joined, gone = interpret(graph), [], set[Node]()
    for each in sums:
        done = None if gone & {each.add, each.at} else _join(ctx, known, tokens, check, each)
        if done is not None:
            gone.add(each.add)
            joined.append(done)
    return joined


def _worth(node: Node, tokens: int) -> bool:
    if node.target not in LAYERS:
        return False
    value = fake(node)
    count = hint(value.shape[0])
    return value.device.type in DEVICES and isinstance(count, int) and 0 < count <= tokens


@dataclass(frozen=True, eq=False)
class _Sum:
    """A sum whose one term may be a shared expert.

    Attributes:
        experts: the routed experts.
        add: the sum.
        other: the term.
        at: where the sum is needed: ``add`` itself, or a later sum of it and the experts that is all that reads it.
    """

    experts: Node
    add: Node
    other: Node
    at: Node


def _sums(experts: Node) -> list[_Sum]:
    """The sums on the way of the experts' result, as long as it has one reader."""
    found: list[_Sum] = []
    node = experts
    for _ in range(STEPS):
        users = _readers(node)
        if len(users) != 1:
            break
        other = _other(users[0], node)
        if other is not None:
            found.append(_Sum(experts, users[0], other, users[0]))
            found += [_Sum(experts, other, term, users[0]) for term in _terms(other)]
        node = users[0]
    return found


def _readers(node: Node) -> list[Node]:
    return [u for u in node.users if (call := call_of(u)) is None or call.name not in SIZE_QUERIES]


def _other(add: Node, term: Node) -> Node | None:
    """What ``add`` adds to ``term``, of its shape and dtype; None if it is no such sum."""
    call = call_of(add)
    terms = [a for a in call.args if a is not term] if call is not None else []
    if call is None or call.name != "add" or len(call.args) != 2 or call.kwargs or len(terms) != 1 or not isinstance(terms[0], Node):
        return None
    mine, other = tensor(term), tensor(terms[0])
    if mine is None or other is None or mine.dtype != other.dtype or not same_shape(shape_of(mine), shape_of(other)):
        return None
    return terms[0]


def _terms(node: Node) -> list[Node]:
    """Both terms of a sum that one node reads and nothing else, its size neither: it is computed later then."""
    call = call_of(node)
    if call is None or call.name != "add" or call.inplace or len(node.users) != 1:
        return []
    return [a for a in call.args if isinstance(a, Node) and _other(node, a) is not None]


def _read_behind(graph: Graph, found: _Sum) -> None:
    """``shared.add_(routed)`` and then a reader of ``shared``: the same value under the name of the sum, which is what is replaced."""
    add, other = found.add, found.other
    call = call_of(add)
    if call is None or not call.inplace or call.args[0] is not other:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    later = [user for user in other.users if user is not add]
    if all(order[user] > order[add] for user in later):
        for user in later:
            user.replace_input_with(other, add)


def _bare_view(node: Node) -> Node:
    """What a view with as many features is a view of, where nothing else reads the view."""
    while (call := call_of(node)) is not None and call.name in RESHAPES and isinstance(call.args[0], Node) and len(node.users) == 1:
        before, value = tensor(call.args[0]), tensor(node)
        if before is None or value is None or not same_shape(shape_of(before)[-1:], shape_of(value)[-1:]):
            return node
        node = call.args[0]
    return node


def _join(ctx: Context, known: dict[Node, Any], tokens: int, check: bool, found: _Sum) -> Joined | None:
    value = _bare_view(found.other)
    unread = ctx.calls.get(value) is not None and len(value.users) == 1
    rows = cone_rows(ctx, next(iter(value.users)), value, None) if unread else None
    expr, scale = (None, 1.0) if rows is None else _weight_apart(rows.expr)
    if expr is None or not _same_place(ctx, found, value):
        return None
    body = match(expr, trained=False)  # nothing is differentiated there
    if body is None or body.weight_on_input:
        return None
    emit = Emitter(ctx.graph, found.at, found.experts, {})
    try:
        meaning = expr if scale == 1.0 else Op(expr.node, "mul", (expr, scale))
        region = _region(ctx, emit, value, body.token.source, meaning)
        if isinstance(region, Lost):
            emit.undo()
            return None
        lowering = Lowering(region, emit)
        alone = lowering.fused(body).result
        whole = lowering.reshaped(alone if scale == 1.0 else emit(torch.mul, alone, scale), value)
        verdict = verify(ctx, region, emit.nodes, whole, known) if check else None
        if verdict is not None and verdict.problem:
            emit.undo()
            return None
        weight = Weight(alone.args[2] if body.weight is not None else None, scale)
        result = start_and_join(ctx, emit, found.add, found.other, alone, tokens, weight)
        if result is None:
            emit.undo()
            return None
        result = in_layout(emit, result, found.add)
    except Exception:  # a replacement that cannot be built is no reason to stop the user's program
        emit.undo()
        return None
    found.add.replace_all_uses_with(result, propagate_meta=False)
    _introduce(ctx, emit)
    _erase(ctx.graph, found.add, emit.nodes)
    return Joined(found.experts, None if verdict is None else verdict.error, found.add, result)


def _weight_apart(expr: Expr) -> tuple[Expr | None, float]:
    """(the expert times at most one weight per token, whose own arithmetic is left alone; a constant factor); None for anything else."""
    every = factors(expr)
    numbers = [f for f in every if isinstance(f, int | float)]
    found = [f for f in every if not isinstance(f, int | float)]
    core = [f for f in found if isinstance(f, Expr) and has_linear(f) and _features(f) != 1]
    weights = [f for f in found if f not in core]
    if len(core) != 1 or len(weights) > 1 or any(not isinstance(w, Expr) or _features(w) != 1 for w in weights):
        return None, 1.0
    expert: Expr = _own(core[0], {})
    scale = math.prod(map(float, numbers))
    if not weights:
        return expert, scale
    source = _tensor_of(bare(weights[0]))
    return Op(expr.node, "mul", (expert, SlotWeight(source, source))), scale


def _tensor_of(expr: Expr) -> Node:
    """The tensor that an expression reads or, where it computes one, gives."""
    return getattr(expr, "source", expr.node)


def _features(expr: Any) -> int | None:
    value = tensor(expr.node) if isinstance(expr, Expr) else None
    return value.shape[-1] if value is not None and value.dim() > 1 and isinstance(value.shape[-1], int) else None


def _own(expr: Any, memo: dict[Node, Token]) -> Any:
    """The expression with what comes before its first projections as a tensor, and with its biases as vectors of the one expert."""
    if not isinstance(expr, Expr) or isinstance(expr, SharedVector):
        return expr
    if not has_linear(expr) and (width := _features(expr)) is not None:
        source = _tensor_of(expr)
        return memo.setdefault(source, Token(expr.node, source, width))
    match expr:
        case Op():
            args = tuple(_own(a, memo) for a in expr.args)
            if expr.name == "add" and any(isinstance(bare(a), Linear) for a in args):
                args = tuple(ExpertVector(a.node, Leaf(a.source, False, None, (0,))) if isinstance(a, SharedVector) else a for a in args)
            return Op(expr.node, expr.name, args, expr.kwargs)
        case Linear():
            return Linear(expr.node, _own(expr.child, memo), expr.weight)
    return replace(expr, child=_own(expr.child, memo)) if expr.children else expr  # type: ignore[call-arg, attr-defined]


def _same_place(ctx: Context, found: _Sum, value: Node) -> bool:
    """Whether the sum may be computed where it is needed, and nothing is differentiated there."""
    places = (found.experts, found.add, found.at, value)
    if any(ctx.mode[node] != ctx.mode[found.at] for node in places):
        return False
    if ctx.mode[found.at].grad and any(v is not None and v.requires_grad for v in (tensor(found.experts), tensor(value))):
        return False
    return all(ctx.written_between(term, found.add, found.at) is None for term in found.add.all_input_nodes)


def _region(ctx: Context, emit: Emitter, value: Node, token: Node, expr: Expr) -> Region | Lost:
    """The shared expert as a region of one expert that every token chooses."""
    ids = emit(torch.zeros_like, emit(torch.Tensor.narrow, token, -1, 0, 1), dtype=torch.int64)
    _introduce(ctx, emit)
    routing = Routing(ids, shape_of(fake(value))[:-1], 1, has_slots=True, distinct=True)
    region = checked(ctx, Region(value, (value,), "masked", routing, expr, 1, None))
    if isinstance(region, Region) and compute_of(region):
        return ctx.lost("dtype-unsupported", value, dtype=compute_of(region), detail="a shared expert with weights in float32")
    return region


def _introduce(ctx: Context, emit: Emitter) -> None:
    """New nodes as tensors of their own, about which nothing is known: what comes later may read them."""
    for node in emit.nodes:
        ctx.first[node] = node
        ctx.memory.introduce(node)
        ctx.calls[node] = None
        ctx.position[node], ctx.mode[node] = ctx.position[emit.before], ctx.mode[emit.before]


def _erase(graph: Graph, add: Node, new: list[Node]) -> None:
    """Erase the sum and what only it read, and new nodes that were for the verification."""
    stack: list[Node] = [add, *new]
    erased: set[Node] = set()
    while stack:
        node = stack.pop()
        call = call_of(node)
        if node in erased or call is None or node.users or (call.inplace and node is not add):
            continue
        stack += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)
