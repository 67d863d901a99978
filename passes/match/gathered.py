"""Weights that a program takes out of packed stacks for the slots that chose them, and unpacks then: ``(Q[ids].float() * S[ids])``.

What is unpacked belongs to tokens, and no rule knows it for weights. So while a graph is read, a product of it reads ``W[ids]`` of the
stack W that Q and S stand for: that is the same, element by element, where the reader says so. W is made by ``moefuse::unpacked``, which is
never run but for a proof. Whatever is not replaced reads what it read before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from moefuse.passes.encodings.part import Coded, emit
from moefuse.passes.encodings.read import read
from moefuse.passes.encodings.weight import Weight
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.op_classes import COPIES, RESHAPES
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.infer.state import Context, Given
from moefuse.passes.infer.unpacking import unpacking
from moefuse.passes.ir.facts import Rows
from moefuse.passes.match.coded_weights import suppose

_PACKED = frozenset((torch.int8, torch.uint8, torch.int16, torch.int32))
_WIDE = (torch.int32, torch.int64)
_INDEXES = {"getitem": 1, "index_select": 2}
_ORDERS = {"bmm": ((-2, -1), (-1, -2)), "matmul": ((-2, -1), (-1, -2)), "baddbmm": (None, (-2, -1), (-1, -2))}
"""Which dimensions of the operands of a product are features and inputs, where one is a weight."""
_FAR = 96


@dataclass(frozen=True)
class Found:
    """A product that reads ``taken`` out of the stack ``whole`` in place of ``unpacked``; ``nodes``: all that was written for it."""

    product: Node
    unpacked: Node
    taken: Node
    whole: Node
    weight: Weight
    coded: Coded
    nodes: tuple[Node, ...]


class Standing:
    """The products of a graph that read out of stacks which are not there."""

    def __init__(self, found: list[Found]) -> None:
        self.found = found

    def undo(self, those: Callable[[Found], bool] = lambda _: True) -> bool:
        """Let products that are left read what they read before; whether any was."""
        gone = [f for f in self.found if those(f)]
        for f in gone:
            if f.product in f.taken.users:
                f.product.replace_input_with(f.taken, f.unpacked)
        for node in reversed([n for f in gone for n in f.nodes]):
            if not node.users and node in node.graph.nodes:
                node.graph.erase_node(node)
        self.found = [f for f in self.found if f not in gone]
        return bool(gone)


def standing(graph: Graph, given: Given, interpreted: Callable[[Graph, Given], Context]) -> tuple[Context, Standing]:
    """The graph as it is interpreted with such products, and these."""
    found = Standing(_found(graph, given) if given.packed and _may_have(graph) else [])
    ctx = interpreted(graph, given)
    if found.undo(lambda f: not isinstance(ctx.facts.get(f.product), Rows)):
        ctx = interpreted(graph, given)
    for f in found.found:
        suppose(ctx, f.whole, f.weight, f.coded)
    return ctx, found


def _may_have(graph: Graph) -> bool:
    """Whether anything in few bits is indexed by a tensor."""
    for node in graph.nodes:
        if node.target is not operator.getitem and "index_select" not in str(node.target):
            continue
        first, *others = node.all_input_nodes or (None,)
        value = tensor(first)
        if others and value is not None and value.dim() >= 2 and (value.dtype in _PACKED or value.dtype.itemsize == 1):
            return True
    return False


def _found(graph: Graph, given: Given) -> list[Found]:
    ctx, found = Context(graph, given), list[tuple[Node, Weight, Coded, list[Node]]]()
    for use in unpacking(ctx).uses:
        for value in use.node.all_input_nodes if not use.foreign else ():
            order, shown = _order(ctx.calls[use.node], value), tensor(value)
            made = unpacking(ctx).of(ctx, value)
            if order is None or made is None or made.packed is None or shown is None or shown.requires_grad:
                continue
            rows = _rows(ctx, value)
            coded = None if rows is None else read(ctx, value, order, rows=rows)
            if rows is not None and isinstance(coded, Coded):
                found.append((use.node, Weight(value, order, rows=frozenset(rows)), coded, rows))
    return [_put(ctx, *one) for one in found]


def _order(call: Call | None, value: Node) -> tuple[int, int] | None:
    """Features and inputs, the last two dimensions of an operand of a product, in this order; None if they are not."""
    shown, rank = tensor(value), 0 if (shown := tensor(value)) is None else shown.dim()
    if call is None or shown is None or rank < 3 or value not in call.args + tuple(call.kwargs.values()):
        return None
    if call.name == "einsum":
        return _of_einsum(call, value, rank)
    at = [i for i, arg in enumerate(call.args) if arg is value]
    orders = _ORDERS.get(call.name, ())
    order = orders[at[0]] if len(at) == 1 and at[0] < len(orders) else None
    return None if order is None else (order[0] % rank, order[1] % rank)


def _of_einsum(call: Call, value: Node, rank: int) -> tuple[int, int] | None:
    equation, *given = call.args
    given = list(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    if not isinstance(equation, str) or "." in equation or "->" not in equation or given.count(value) != 1:
        return None
    inputs, _, out = equation.replace(" ", "").partition("->")
    labels = inputs.split(",")
    if len(labels) != len(given) or len(labels[given.index(value)]) != rank:
        return None
    last = labels[given.index(value)][-2:]
    if (last[0] in out) == (last[1] in out):
        return None
    return (rank - 2, rank - 1) if last[0] in out else (rank - 1, rank - 2)


def _rows(ctx: Context, value: Node) -> list[Node] | None:
    """The tensors by which a weight takes experts out of stacks, one and the same but for its shape; None where there is none."""
    found: dict[Node, None] = {}
    seen, open_ = {value}, [value]
    while open_:
        here = open_.pop()
        index = _index(ctx, here)
        if index is not None:
            found[index] = None
        before = [here.args[0]] if index is not None else here.all_input_nodes
        new = [n for n in (*before, *ctx.writes.get(ctx.storage[here], ())) if n not in seen]
        seen.update(new)
        open_ += new
        if len(seen) > _FAR:
            return None
    return [*found] if len({_flat(ctx, index) for index in found}) == 1 else None


def _index(ctx: Context, node: Node) -> Node | None:
    """What a node is indexed by along its first dimension, where that is no constant of the program."""
    call = ctx.calls.get(node)
    at = None if call is None else _INDEXES.get(call.name)
    if call is None or at is None or len(call.args) <= at or (call.name == "index_select" and call.args[1] != 0):
        return None
    index = call.args[at]
    index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    value = tensor(index)
    if not isinstance(index, Node) or value is None or not value.dim() or value.dtype not in _WIDE:
        return None
    return None if unpacking(ctx).of(ctx, index) is not None else index


def _flat(ctx: Context, index: Node) -> Node:
    """What has the numbers of an index in their order, perhaps in another shape."""
    call, value = ctx.calls.get(index), tensor(index)
    while call is not None and value is not None and not call.inplace and isinstance(call.args[0] if call.args else None, Node):
        before = tensor(call.args[0])
        wide = call.name == "to" and before is not None and before.dtype in _WIDE and value.dtype in _WIDE
        if not (wide or call.name in RESHAPES or call.name in COPIES):
            break
        index = call.args[0]
        call, value = ctx.calls.get(index), before
    return index


def _put(ctx: Context, product: Node, weight: Weight, coded: Coded, rows: list[Node]) -> Found:
    """Let a product read ``W[ids]``."""
    put = Emitter(ctx.graph, product, weight.node, {})
    storage, *codes = (emit(put, part) for part in coded.parts)
    whole = put(torch.ops.moefuse.unpacked.default, storage, codes, str(coded.encoding), coded.dtype)
    sizes = shape_of(tensor(weight.node))  # type: ignore[arg-type]
    lead = sizes[: len(sizes) - 2]
    checked = any(call is not None and call.name == "index_select" for call in _takers(ctx, weight.node, rows))
    index = next((row for row in rows if same_shape(shape_of(tensor(row)), lead) and not checked), None)  # type: ignore[arg-type]
    if index is not None:
        taken = put(operator.getitem, whole, index)
    else:
        by = put(torch.reshape, rows[0], (-1,))
        taken = put(torch.index_select, whole, 0, by) if checked else put(operator.getitem, whole, by)
        known = [s if isinstance(s, int) else -1 for s in lead]
        taken = taken if len(lead) == 1 else put(torch.reshape, taken, (*known, *shape_of(tensor(whole))[1:]))  # type: ignore[arg-type]
    if weight.order[0] > weight.order[1]:
        taken = put(torch.transpose, taken, -1, -2)
    product.replace_input_with(weight.node, taken)
    return Found(product, weight.node, taken, whole, weight, coded, tuple(put.nodes))


def _takers(ctx: Context, value: Node, rows: list[Node]) -> Iterable[Call | None]:
    return (ctx.calls.get(user) for row in rows for user in row.users if _index(ctx, user) is row)


__all__ = ["Standing", "standing"]
