"""Shared experts: what every token takes beside the routed experts, and is added to them, starts before the router and is met at the sum.

A shared expert is found from the sum: the other addend, read backwards (``cone.py``), is one expert's expression. It is described by a
region of one expert that every token chooses, so the checks, the templates and the verification are those of routed experts. Its weight
per token (a sigmoid of a projection, say) stays the user's own arithmetic.

    s = shared_start(x, ...); ...router...; result = shared_join(experts(x, ids, weights), s, gate, [x])    (``beside.py``)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.beside import start_and_join
from moefuse.passes.cone import cone_rows
from moefuse.passes.context import Context
from moefuse.passes.emit import Emitter
from moefuse.passes.expr import ExpertVector, Expr, Leaf, Linear, Op, SharedVector, SlotWeight, Token, has_linear
from moefuse.passes.facts import Lost, Routing
from moefuse.passes.interpret import interpret
from moefuse.passes.lower import Lowering
from moefuse.passes.ops import SIZE_QUERIES, Call, call_of, fake, tensor
from moefuse.passes.regions import Region
from moefuse.passes.safety import checked
from moefuse.passes.sizes import same_shape, shape_of
from moefuse.passes.templates import bare, factors, match
from moefuse.passes.verify import hint, verify

DEVICES = {"cuda"}
"""Where a shared expert gains from a stream of its own. Elsewhere it is left to Inductor."""

_VIEWS = frozenset(("view", "reshape", "view_as", "reshape_as", "flatten", "unflatten", "squeeze", "unsqueeze"))


@dataclass(frozen=True, eq=False)
class Joined:
    """A shared expert that runs beside routed ones.

    Attributes:
        experts: the op of the routed experts.
        error: of the verification, as in ``moefuse.report.Fused``; None if switched off.
    """

    experts: Node
    error: float | None


def join_shared(graph: Graph, known: dict[Node, Any], tokens: int, check: bool) -> list[Joined]:
    """Join shared experts with the fused regions of a graph that all passes have left.

    Args:
        known: real values of the graph's inputs where they are known.
        tokens: up to so many tokens the two run at the same time; a call that is known to have more stays as it is.
        check: whether to verify on the model's own weights.
    """
    sums = [(node, *found) for node in graph.nodes if _worth(node, tokens) and (found := _addend(node)) is not None]
    if not sums:
        return []
    for _, add, other in sums:
        _read_behind(graph, add, other)
    ctx, joined = interpret(graph), []
    for experts, add, other in sums:
        done = _join(ctx, known, tokens, check, experts, add, other)
        if done is not None:
            joined.append(done)
    return joined


def _worth(node: Node, tokens: int) -> bool:
    if node.target is not torch.ops.moefuse.experts.default:
        return False
    value = fake(node)
    count = hint(value.shape[0])
    return value.device.type in DEVICES and isinstance(count, int) and 0 < count <= tokens


def _addend(node: Node) -> tuple[Node, Node] | None:
    """(the sum that is all that reads the experts' result, its other term)."""
    while True:
        users = [u for u in node.users if (call := call_of(u)) is None or call.name not in SIZE_QUERIES]
        call = call_of(users[0]) if len(users) == 1 else None
        if call is None:
            return None
        if call.args[:1] == (node,) and (call.name in _VIEWS or _rounds(node, users[0], call)):
            node = users[0]
            continue
        terms = [a for a in call.args if a is not node]
        if call.name != "add" or len(call.args) != 2 or call.kwargs or len(terms) != 1 or not isinstance(terms[0], Node):
            return None
        mine, other = tensor(node), tensor(terms[0])
        if mine is None or other is None or mine.dtype != other.dtype or not same_shape(shape_of(mine), shape_of(other)):
            return None
        return users[0], terms[0]


def _read_behind(graph: Graph, add: Node, other: Node) -> None:
    """``shared.add_(routed)`` and then a reader of ``shared``: the same value under the name of the sum, which is what is replaced."""
    call = call_of(add)
    if call is None or not call.inplace or call.args[0] is not other:
        return
    order = {node: i for i, node in enumerate(graph.nodes)}
    later = [user for user in other.users if user is not add]
    if all(order[user] > order[add] for user in later):
        for user in later:
            user.replace_input_with(other, add)


def _rounds(node: Node, cast: Node, call: Call) -> bool:
    """A cast to the same or a narrower dtype: the op can round its sum to that at once."""
    before, after = tensor(node), tensor(cast)
    if call.name not in ("to", "type_as") or before is None or after is None or before.device != after.device:
        return False
    return before.dtype == after.dtype or before.dtype.itemsize > after.dtype.itemsize


def _bare_view(node: Node) -> Node:
    """What a view with as many features is a view of, where nothing else reads the view."""
    while (call := call_of(node)) is not None and call.name in _VIEWS and isinstance(call.args[0], Node) and len(node.users) == 1:
        before, value = tensor(call.args[0]), tensor(node)
        if before is None or value is None or not same_shape(shape_of(before)[-1:], shape_of(value)[-1:]):
            return node
        node = call.args[0]
    return node


def _join(ctx: Context, known: dict[Node, Any], tokens: int, check: bool, experts: Node, add: Node, other: Node) -> Joined | None:
    value = _bare_view(other)
    unread = ctx.calls.get(value) is not None and len(value.users) == 1
    rows = cone_rows(ctx, next(iter(value.users)), value, None) if unread else None
    expr = None if rows is None else _weight_apart(rows.expr)
    if expr is None or not _same_place(ctx, experts, add, value):
        return None
    body = match(expr)
    if body is None or body.weight_on_input:
        return None
    emit = Emitter(ctx.graph, add, experts, {})
    try:
        region = _region(ctx, emit, value, body.token.source, expr)
        if isinstance(region, Lost):
            emit.undo()
            return None
        lowering = Lowering(region, emit)
        alone = lowering.fused(body).result
        whole = lowering.reshaped(alone, value)
        verdict = verify(region, emit.nodes, whole, known, ctx.first) if check else None
        if verdict is not None and verdict.problem:
            emit.undo()
            return None
        result = start_and_join(ctx, emit, add, other, alone, tokens, gated=body.weight is not None)
        if result is None:
            emit.undo()
            return None
    except Exception:  # a replacement that cannot be built is no reason to stop the user's program
        emit.undo()
        return None
    add.replace_all_uses_with(result, propagate_meta=False)
    _introduce(ctx, emit)
    _erase(ctx.graph, add, emit.nodes)
    return Joined(experts, None if verdict is None else verdict.error)


def _weight_apart(expr: Expr) -> Expr | None:
    """The expert times at most one weight per token, whose own arithmetic is left alone; None if it is anything else."""
    found = factors(expr)
    core = [f for f in found if isinstance(f, Expr) and has_linear(f) and _features(f) != 1]
    weights = [f for f in found if f not in core]
    if len(core) != 1 or len(weights) > 1 or any(not isinstance(w, Expr) or _features(w) != 1 for w in weights):
        return None
    expert: Expr = _own(core[0], {})
    if not weights:
        return expert
    source = _tensor_of(bare(weights[0]))
    return Op(expr.node, "mul", (expert, SlotWeight(source, source)))


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


def _same_place(ctx: Context, experts: Node, add: Node, value: Node) -> bool:
    """Whether the routed experts may be computed where the sum is, and nothing is differentiated there."""
    if ctx.mode[experts] != ctx.mode[add] or ctx.mode[experts] != ctx.mode[value]:
        return False
    if ctx.mode[add][0] and any(v is not None and v.requires_grad for v in (tensor(experts), tensor(value))):
        return False
    return all(ctx.written_between(source, experts, add) is None for source in experts.all_input_nodes)


def _region(ctx: Context, emit: Emitter, value: Node, token: Node, expr: Expr) -> Region | Lost:
    """The shared expert as a region of one expert that every token chooses."""
    ids = emit(torch.zeros_like, emit(torch.Tensor.narrow, token, -1, 0, 1), dtype=torch.int64)
    _introduce(ctx, emit)
    routing = Routing(ids, shape_of(fake(value))[:-1], 1, has_slots=True, distinct=True)
    return checked(ctx, Region(value, [value], "masked", routing, expr, 1, None))


def _introduce(ctx: Context, emit: Emitter) -> None:
    """New nodes as tensors of their own, about which nothing is known: what comes later may read them."""
    for node in emit.nodes:
        ctx.storage[node] = ctx.first[node] = node
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
