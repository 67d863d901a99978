"""A part of a projection's features, in the ways that people write it, as a :class:`~moefuse.passes.ir.expr.Slice`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.op_classes import SHAPED
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Expr, Slice

Go = Callable[[Node], Expr]


def piece(ctx: Context, node: Node, go: Go, inside: set[Node]) -> Expr | None:
    """``chunk(2, -1)[i]``, a slice of the last dimension, or one of the parts that the last dimension was viewed as.

    ``node`` is a ``getitem`` or a ``select``; ``inside`` are the nodes that only this expert uses.
    """
    call, value = ctx.calls[node], tensor(node)
    source = call.args[0] if call is not None and call.args else None
    if call is None or not isinstance(source, Node) or value is None:
        return None
    before = ctx.calls[source]
    if call.name == "getitem" and before is not None and before.name in ("chunk", "split"):
        return _part(node, go, source, before, call.args[1])
    found = _chosen(node, source, before, call)
    if found is not None:
        return _of_view(ctx, node, go, inside, *found)
    return _range(node, go, source, call.args[1]) if call.name == "getitem" else None


def _features(node: Node) -> int | None:
    value = tensor(node)
    return value.shape[-1] if value is not None and value.dim() and isinstance(value.shape[-1], int) else None


def _part(node: Node, go: Go, source: Node, cut: Any, index: Any) -> Expr | None:
    """Piece ``index`` of a chunk or split, whose pieces may differ in size."""
    whole, parts = cut.args[0], fake(source)
    if type(index) is not int or not isinstance(whole, Node) or not isinstance(parts, tuple | list):
        return None
    value, size = tensor(whole), _features(whole)
    dim = cut.kwargs.get("dim", cut.args[2] if len(cut.args) > 2 else 0)
    if value is None or size is None or dim not in (-1, value.dim() - 1) or not -len(parts) <= index < len(parts):
        return None
    widths = [part.shape[-1] for part in parts]
    index %= len(parts)
    if not all(isinstance(width, int) for width in widths):
        return None
    return Slice(node, go(whole), sum(widths[:index]), 1, widths[index], size)


def _range(node: Node, go: Go, source: Node, index: Any) -> Expr | None:
    value, size = tensor(source), _features(source)
    if value is None or size is None or not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return None
    if any(i is not Ellipsis and i != slice(None) for i in index[:-1]) or (Ellipsis not in index and len(index) != value.dim()):
        return None
    start, stop, step = index[-1].indices(size)
    return Slice(node, go(source), start, step, len(range(start, stop, step)), size)


def _chosen(node: Node, source: Node, before: Any, call: Any) -> tuple[Node, int, int] | None:
    """(view, dimension, index) where ``node`` is one entry along one of the last two dimensions of a view: unbind, select, index."""
    if call.name == "getitem" and before is not None and before.name == "unbind":
        view, index = before.args[0], call.args[1]
        dim = before.kwargs.get("dim", before.args[1] if len(before.args) > 1 else 0)
    elif call.name == "select":
        given = dict(zip(("input", "dim", "index"), call.args, strict=False)) | call.kwargs
        view, dim, index = source, given.get("dim"), given.get("index")
    else:
        view, (dim, index) = source, _single(source, call.args[1])
    value = tensor(view) if isinstance(view, Node) else None
    if value is None or type(dim) is not int or type(index) is not int:
        return None
    dim = dim % value.dim()
    size = value.shape[dim]
    return (view, dim, index % size) if dim >= value.dim() - 2 and isinstance(size, int) and -size <= index < size else None


def _single(source: Node, index: Any) -> tuple[int | None, int | None]:
    """(dimension, entry) of an index that takes one entry of one dimension and all of the others."""
    value = tensor(source)
    items = index if isinstance(index, tuple) else (index,)
    numbers = [i for i, item in enumerate(items) if type(item) is int]
    if value is None or len(numbers) != 1 or any(type(i) is not int and i is not Ellipsis and i != slice(None) for i in items):
        return None, None
    at = numbers[0]
    if Ellipsis in items and items.index(Ellipsis) < at:
        return value.dim() - len(items) + at, items[at]
    return at, items[at]


def _of_view(ctx: Context, node: Node, go: Go, inside: set[Node], view: Node, dim: int, index: int) -> Expr | None:
    """One entry of features [m * n] that were viewed as [m, n]: a block, or every n-th."""
    call = ctx.calls[view]
    if view not in inside or call is None or call.name not in SHAPED or not isinstance(call.args[0], Node):
        return None
    whole, parts = tensor(call.args[0]), tensor(view)
    if whole is None or parts is None or parts.dim() != whole.dim() + 1 or not same_shape(shape_of(whole)[:-1], shape_of(parts)[:-2]):
        return None
    size, (m, n) = whole.shape[-1], parts.shape[-2:]
    if not all(isinstance(i, int) for i in (size, m, n)) or size != m * n:
        return None
    block = dim == parts.dim() - 2
    start, step, width = (index * n, 1, n) if block else (index, n, m)
    return Slice(node, go(call.args[0]), start, step, width, size)
