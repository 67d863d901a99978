"""An expert applied to every token, before anything says which expert it is: read backwards from its output.

The cone of an output is everything that only this output uses. Where another expert (or the router) also uses a value, that value is the
experts' input.
"""

from __future__ import annotations

import heapq
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.matmuls import READ, operands
from moefuse.passes.graph.op_classes import BINARY, CASTS, CONDITIONS, PICKS, RESHAPES, TERNARY, TURNS, UNARY, drop_probability
from moefuse.passes.graph.sharded import is_root
from moefuse.passes.graph.sizes import same, same_shape, shape_of
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.feature_slices import piece
from moefuse.passes.infer.joined_features import joined
from moefuse.passes.infer.operands import is_condition, padded, real, scalar
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.unpacking import is_unpacked
from moefuse.passes.ir.axes import Atom, Axes, align, fresh
from moefuse.passes.ir.expr import Cast, Expr, Leaf, Linear, Op, SharedVector, SlotWeight, Token, has_linear, weight_leaves
from moefuse.passes.ir.facts import Column, Domain, Fill, RowNumber, Rows, Table, View, Weight

_POINTWISE = CONDITIONS | PICKS | frozenset((*UNARY, *BINARY, *TERNARY))


def cone(ctx: Context, output: Node, reader: Node) -> set[Node]:
    """Nodes whose every use leads only to ``output`` (which ``reader`` reads)."""
    inside: set[Node] = {reader}
    heap = [(-ctx.position[output], output)]
    queued = {output}
    while heap:
        _, node = heapq.heappop(heap)
        if node.op not in ("call_function", "call_method") or any(u not in inside for u in node.users):
            continue
        inside.add(node)
        for source in node.all_input_nodes:
            if source not in queued:
                queued.add(source)
                heapq.heappush(heap, (-ctx.position[source], source))
    inside.discard(reader)
    return inside


def cone_rows(ctx: Context, node: Node, value: Node, table: Table | None) -> Rows | None:
    """The rows of a plain value that a routing table (or a stack) is about to select from; None if no projection is in it."""
    known = tensor(value)
    if known is None or known.dim() < 2:
        return None
    shape, expr = shape_of(known), read_back(ctx, node, value)
    axes: Axes = (*((Atom("t", i, s),) for i, s in enumerate(shape[:-1])), (Atom("f", 0, shape[-1]),))
    if table is None:
        return Rows(axes, Domain("masked"), expr) if has_linear(expr) else None
    if table.expert is None:
        return None if has_linear(expr) else _every_expert(ctx, node, value, table)
    return Rows(axes, Domain("masked", table.routing, expert=table.expert, slot=table.slot), expr)


def read_back(ctx: Context, node: Node, value: Node) -> Expr:
    """What a plain value that ``node`` reads computes, as far as it is for this value alone; what no rule knows is a token."""
    known = tensor(value)
    # What is written to before it is read is more than its operation says.
    inside = {n for n in cone(ctx, value, node) if ctx.written_between(n, n, node) is None}
    return _expr(ctx, value, value, inside, {}, 0 if known is None else known.dim())


def behind_expert(ctx: Context, node: Node, row: Token, expert: int) -> Expr:
    """What a row of a plain tensor is, where an expert ran on all of them for ``node`` alone, which takes some; else the row as it is."""
    value = next((n for n in node.all_input_nodes if (view := ctx.view(n)) is not None and view.root is row.source), None)
    known = tensor(row.source)
    inside = set() if value is None else {n for n in cone(ctx, value, node) if ctx.written_between(n, n, node) is None}
    if row.source not in inside or known is None:
        return row
    expr = _expr(ctx, row.source, row.source, inside, {}, known.dim())
    return expr if has_linear(expr) and _are_of(ctx, expert, weight_leaves(expr)) else row


def _are_of(ctx: Context, expert: int, weights: list[Leaf]) -> bool:
    """Whether weights may be of one expert. What one that stands for others reads beside its own is their input (a projection of it)."""
    if not isinstance(expert, RowNumber):
        return True
    lists = [known for known in ctx.given.siblings.values() if expert.row in (known.row_node, known.witness_node)]
    own = {n for known in lists for one, others in known.siblings.items() for n in (one, *others.values())}
    return all(leaf.source in own for leaf in weights)


def _every_expert(ctx: Context, node: Node, value: Node, table: Table) -> Rows | None:
    """A plain tensor with an expert dimension (x repeated for every expert) times the whole table."""
    view = ctx.view(value)
    if view is None or len(table.axes) > len(view.axes):
        return None
    axes: list[Any] = []
    tokens = same(table.routing.num_tokens, 1)  # one token lines up with anything
    for mine, other in zip(view.axes, padded(table.axes, len(view.axes)), strict=True):
        if not real(other):
            axes.append(tuple(Atom("f", 0, a.size) for a in mine if not same(a.size, 1)))
            continue
        for run, cut in align(other, mine) or [((), mine)]:
            kinds, plain = {a.kind for a in run if not same(a.size, 1)}, {a.kind for a in cut if not same(a.size, 1)}
            if (kinds, plain) not in (({"e"}, {"b"}), ({"t"}, {"d"}), (set(), set())):
                return None
            tokens = tokens or kinds == {"t"}
        axes.append(other)
    if not tokens or any(len(axis) > 1 for axis in axes if axis and axis[0].kind == "f"):
        return None
    width = axes[-1][0].size if axes[-1] else 1
    return Rows(tuple(axes), Domain("dense", table.routing), Token(node, view.root, width))


def _expr(ctx: Context, top: Node, node: Node, inside: set[Node], memo: dict[Node, Expr], rank: int) -> Expr:
    if node in memo:
        return memo[node]
    found = _inside(ctx, top, node, inside, memo, rank) if node in inside else None
    column = ctx.facts.get(node)
    if found is None and isinstance(column, Column):
        found = SlotWeight(node, column.base.root, column.slot)
    if found is None:
        value = tensor(node)
        width = shape_of(value)[-1] if value is not None and value.dim() else 1
        narrow = value is not None and value.dim() < 2
        source = ctx.first[node]  # a view that every expert takes anew is one input
        found = SharedVector(node, source) if narrow else Token(node, source, width if isinstance(width, int) else 1, unread=node in inside)
    memo[node] = found
    return found


def _inside(ctx: Context, top: Node, node: Node, inside: set[Node], memo: dict[Node, Expr], rank: int) -> Expr | None:
    call, value = ctx.calls[node], tensor(node)
    if call is None or value is None or call.inplace:
        return None

    def go(source: Node) -> Expr:
        return _expr(ctx, top, source, inside, memo, rank)

    first = call.args[0] if call.args else None
    if call.name in READ:
        return _projection(ctx, node, go, call)
    unchanged = _unchanged(ctx, node, inside)
    if unchanged is not None:
        return go(unchanged)
    if call.name in ("mean", "var", "amax", "softmax", "log_softmax", "layer_norm", "rms_norm") and isinstance(first, Node):
        return _over_features(node, go, first, call)
    if call.name in CASTS and isinstance(first, Node):
        before = tensor(first)
        same_dtype = before is not None and before.dtype == value.dtype
        return go(first) if same_dtype else Cast(node, go(first), value.dtype)
    if (probability := drop_probability(call)) is not None and isinstance(first, Node):
        return _dropped(top, node, go(first), probability)
    if call.name in _POINTWISE:
        return _pointwise(node, go, call)
    if call.name in ("zeros_like", "ones_like", "full_like"):
        fill = ctx.facts.get(node)
        return Op(node, "full_like", (go(call.args[0]), fill.value), (("dtype", value.dtype),)) if isinstance(fill, Fill) else None
    if call.name == "cat" and isinstance(first, tuple | list) and _last(call, value.dim()):
        return joined(ctx, node, [go(part) for part in first])
    if call.name in ("getitem", "select"):
        return piece(ctx, node, go, inside)
    return None


def _dropped(top: Node, node: Node, child: Expr, probability: float) -> Expr | None:
    """A dropout of rows. One of a vector is drawn for all rows of an expert together: who reads it reads it as it is drawn."""
    value, rows = tensor(node), tensor(top)
    if not probability:
        return child
    if value is None or rows is None or not same_shape(shape_of(value)[:-1], shape_of(rows)[:-1]):
        return None
    return Op(node, "dropout", (child, probability, True))


def _last(call: Call, rank: int) -> bool:
    """Whether an operation is along the last dimension."""
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else 0)
    return dim in (-1, rank - 1)


def _pointwise(node: Node, go: Any, call: Call) -> Expr | None:
    items = []
    if (call.name in CONDITIONS and not is_condition(node, call)) or (call.name == "where" and not is_boolean(call.args[0])):
        return None
    if call.kwargs.keys() == {"other"}:  # ``torch.mul(x, other=w)``
        call = Call(call.name, (*call.args, *call.kwargs.values()), {})
    for a in (*call.args, *call.kwargs.values()):
        if isinstance(a, Node) and tensor(a) is not None:
            items.append(go(a))
        elif scalar(a):
            items.append(a)
        else:
            return None
    count = len(call.args)
    return Op(node, call.name, tuple(items[:count]), tuple(zip(call.kwargs, items[count:], strict=True)))


_VIEWS = RESHAPES | TURNS | {"expand_as"}


def _unchanged(ctx: Context, node: Node, inside: set[Node]) -> Node | None:
    """What a chain of views that ends in the shape it started with is a view of."""
    value, current = tensor(node), node
    transposed = False
    while current in inside and (call := ctx.calls[current]) is not None and call.name in _VIEWS and isinstance(call.args[0], Node):
        transposed = transposed or call.name in TURNS
        current = call.args[0]
        before = tensor(current)
        if before is not None and value is not None and same_shape(shape_of(before), shape_of(value)):
            return None if transposed else current
    return None


def _projection(ctx: Context, node: Node, go: Any, call: Call) -> Expr | None:
    """``linear(x, W, b)``, ``x @ W``, ``addmm(b, x, W)`` or an einsum with a Parameter W, or one that is unpacked from few bits."""
    found = operands(call)
    if found is None or not isinstance(found.x, Node):
        return None
    view = ctx.view(found.weight)
    if is_unpacked(ctx, found.weight) and not isinstance(ctx.facts.get(found.weight), Weight):
        view = View(fresh(shape_of(tensor(found.weight))), found.weight)  # type: ignore[arg-type]
    elif view is None or not is_root(ctx.storage[view.root]):
        return None
    dims = tuple(a[0].index if len(a) == 1 and a[0].kind == "d" else -1 for a in view.axes)
    if sorted(dims) != [0, 1]:
        return None
    order = dims if found.out_first else dims[::-1]
    expr: Expr = Linear(node, go(found.x), Leaf(view.root, False, None, order))
    return expr if found.bias is None else Op(node, "add", (expr, SharedVector(node, found.bias)))


def _over_features(node: Node, go: Any, x: Node, call: Call) -> Expr | None:
    """A mean, a norm: over the last dimension, which is kept."""
    before, value = tensor(x), tensor(node)
    if before is None or value is None or value.dim() != before.dim():
        return None
    if call.name.endswith("norm"):
        names = ("shape", "weight", "bias", "eps") if call.name == "layer_norm" else ("shape", "weight", "eps")
        given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
        shape = given.pop("shape", given.pop("normalized_shape", None))
        if not isinstance(shape, tuple | list) or len(shape) != 1:
            return None
        options = tuple((k, SharedVector(node, v) if isinstance(v, Node) else v) for k, v in given.items())
        return Op(node, call.name, (go(x), tuple(shape)), options)
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None)
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    other = {key for key, v in call.kwargs.items() if key not in ("dim", "keepdim") and not (key == "dtype" and v is None)}
    if dim not in (-1, before.dim() - 1) or other or before.dim() < 2:
        return None
    if call.name in ("softmax", "log_softmax"):
        return Op(node, call.name, (go(x),), (("dim", -1),))
    return Op(node, call.name, (go(x),), (("dim", -1), ("keepdim", True)))


__all__ = ["View", "cone", "cone_rows"]
