"""Features that a body computes in parts and puts beside each other: ``cat([linear(x, w) for w in W.split(n)], -1)``.

Where every part is the same computation, with the next rows of one weight, the next features of one value or the same row's numbers, the
parts beside each other are that computation with all of the weight. What parts of one tensor are is read from memory: the next begins where
the last one ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import BINARY, UNARY
from moefuse.passes.graph.sizes import size_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Leaf, Linear, Op, SharedVector, Slice
from moefuse.passes.ir.expr_algebra import same_expr

_CUTS = frozenset(("getitem", "split", "chunk", "narrow", "tensor_split", "unbind", "split_with_sizes"))


def joined(ctx: Context, node: Node, parts: Sequence[Any]) -> Expr | None:
    """One expression for parts beside each other, computed at ``node``; None if they are not the parts of one."""
    first = parts[0]
    if len(parts) < 2 or not isinstance(first, Expr) or any(type(p) is not type(first) for p in parts):
        return None
    if isinstance(first, Linear):
        whole = _whole(ctx, [p.weight for p in parts])
        return None if whole is None or not _alike([p.child for p in parts]) else Linear(node, first.child, whole)
    if isinstance(first, Slice):
        return _slices(node, parts) if _alike([p.child for p in parts]) else None
    if isinstance(first, SharedVector | ExpertVector):
        return _vectors(ctx, node, parts)
    if isinstance(first, Cast):
        child = joined(ctx, node, [p.child for p in parts])
        return None if child is None or any(p.dtype != first.dtype for p in parts) else Cast(node, child, first.dtype)
    return _pointwise(ctx, node, parts) if isinstance(first, Op) else None


def _pointwise(ctx: Context, node: Node, parts: Sequence[Op]) -> Op | None:
    first = parts[0]
    if first.name not in UNARY and first.name not in BINARY:
        return None
    if any((p.name, len(p.args), p.kwargs) != (first.name, len(first.args), first.kwargs) for p in parts):
        return None
    if any(isinstance(value, Expr) for _, value in first.kwargs):
        return None
    args = [_argument(ctx, node, of) for of in zip(*(p.args for p in parts), strict=True)]
    return None if None in args else Op(node, first.name, tuple(args), first.kwargs)


def _argument(ctx: Context, node: Node, values: Sequence[Any]) -> Any:
    """One argument of all parts: a number, a number for each row, or features beside each other."""
    first = values[0]
    if not isinstance(first, Expr):
        return first if all(type(v) is type(first) and v == first for v in values) else None
    if _alike(values) and _width(first) == 1:
        return first
    return joined(ctx, node, values)


def _width(expr: Expr) -> Any:
    value = tensor(expr.node)
    return None if value is None or not value.dim() else value.shape[-1]


def _alike(exprs: Sequence[Any]) -> bool:
    return all(same_expr(e, exprs[0]) for e in exprs[1:])


def _slices(node: Node, parts: Sequence[Slice]) -> Expr | None:
    end = parts[0].start
    for part in parts:
        if part.step != 1 or part.start != end:
            return None
        end += part.length
    first = parts[0]
    return first.child if (first.start, end) == (0, first.of) else replace(first, node=node, length=end - first.start)


def _vectors(ctx: Context, node: Node, parts: Sequence[Any]) -> Expr | None:
    if isinstance(parts[0], ExpertVector):
        whole = _whole(ctx, [p.vector for p in parts])
        return None if whole is None else ExpertVector(node, whole)
    source = _source(ctx, [p.source for p in parts])
    return None if source is None else SharedVector(node, source)


def _whole(ctx: Context, leaves: Sequence[Leaf]) -> Leaf | None:
    """The weight whose rows, in the order of the expression, are those of some weights one behind the other."""
    first = leaves[0]
    plain = all(not leaf.stacked and not leaf.parts and leaf.held is None and not leaf.zeros for leaf in leaves)
    alike = all((leaf.order, leaf.detached) == (first.order, first.detached) for leaf in leaves)
    source = _source(ctx, [leaf.source for leaf in leaves], first.order[0]) if plain and alike else None
    return None if source is None else replace(first, source=source)


def _source(ctx: Context, sources: Sequence[Node], dim: int = 0) -> Node | None:
    """The tensor that was cut along ``dim`` into some parts, if these are all of it, in order."""
    whole = sources[0]
    while (call := ctx.calls.get(whole)) is not None and call.name in _CUTS and isinstance(call.args[0], Node):
        whole = call.args[0]
    found, values = tensor(whole), [tensor(source) for source in sources]
    if found is None or whole is sources[0] or found.dim() <= dim:
        return None
    at = size_of(found.storage_offset())
    for source, value in zip(sources, values, strict=True):
        if value is None or ctx.storage[source] is not ctx.storage[whole] or value.stride() != found.stride() or value.dtype != found.dtype:
            return None
        if any(n != m for d, (n, m) in enumerate(zip(value.shape, found.shape, strict=True)) if d != dim) or value.storage_offset() != at:
            return None
        at += value.shape[dim] * value.stride(dim)
    return whole if at == found.storage_offset() + found.shape[dim] * found.stride(dim) else None


__all__ = ["joined"]
