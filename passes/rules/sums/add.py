"""Sums of two tensors: one more expert, one more token's row, or offsets into the sorted slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same_shape
from moefuse.passes.infer.operands import fits
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.expr import Op
from moefuse.passes.ir.facts import Buffer, Combined, Fill, Finding, Part, Rows, Span, Sum, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.offsets import total
from moefuse.passes.rules.rows.pointwise import multiplied, on_pointwise, plain, row_local
from moefuse.passes.rules.sums import slot_by_slot
from moefuse.passes.rules.sums.accumulate import plain_axes, selects


@rule("add")
def on_add(ctx: Context, node: Node, a: Any, other: Any, *, alpha: Any = 1) -> Finding:
    b = other
    x, y = ctx.fact(a), ctx.fact(b)
    if isinstance(x, Span) or isinstance(y, Span):
        return total(ctx, a, b) if alpha == 1 else None
    if alpha != 1:
        if isinstance(x, Rows) or isinstance(y, Rows):
            return _less_or_more(ctx, node, a, x, y, alpha) or row_local(ctx, node, (a, b), {"alpha": alpha})
        return None if isinstance(x, Sum) or isinstance(y, Sum) else plain(ctx, node, [x, y])
    if isinstance(x, Buffer) and isinstance(y, Rows):
        return _in_buffer(node, x, y)
    if isinstance(y, Buffer) and isinstance(x, Rows):
        return _in_buffer(node, y, x)
    summed = slot_by_slot.added(ctx, node, a, b, x, y) or add_to_sum(ctx, node, a, b, x, y)
    if summed is not None:
        return summed
    if isinstance(x, Rows) or isinstance(y, Rows):
        return row_local(ctx, node, (a, b), {})
    if isinstance(x, Sum | Combined | Buffer) or isinstance(y, Sum | Combined | Buffer):
        return None
    return plain(ctx, node, [x, y])


@rule("sub")
def on_sub(ctx: Context, node: Node, a: Any, other: Any, *, alpha: Any = 1) -> Finding:
    """``acc - rows`` adds them with the other sign."""
    x, y = ctx.fact(a), ctx.fact(other)
    if not isinstance(y, Rows):
        return on_pointwise(ctx, node, a, other) if alpha == 1 else on_pointwise(ctx, node, a, other, alpha=alpha)
    negative = -alpha if isinstance(alpha, int | float) else None
    summed = None if negative is None else _less_or_more(ctx, node, a, x, y, negative)
    return summed or row_local(ctx, node, (a, other), {} if alpha == 1 else {"alpha": alpha})


def _less_or_more(ctx: Context, node: Node, a: Any, x: Any, rows: Any, alpha: Any) -> Finding:
    """``acc + alpha * rows``; None where no accumulator is in front."""
    if not isinstance(rows, Rows) or not isinstance(alpha, int | float):
        return None
    share = times(node, rows, alpha)
    if isinstance(x, Buffer):
        return _in_buffer(node, x, share)
    return add_to_sum(ctx, node, a, None, x, share) if isinstance(x, Sum | Fill | View) else None


def times(node: Node, rows: Rows, number: float) -> Rows:
    """Rows times a number, by which an operation adds them to others."""
    return rows if number == 1 else replace(rows, expr=Op(node, "mul", (rows.expr, number)))


def _in_buffer(node: Node, buffer: Buffer, rows: Rows) -> Buffer | None:
    """``out[idx] + rows``, of an expert's own rows; and more of them."""
    chosen, before = rows.domain.selection, buffer.rows
    if chosen is None or not chosen.same(buffer.selection):
        return None
    if before is None:
        return replace(buffer, rows=rows)
    return replace(buffer, rows=replace(before, expr=Op(node, "add", (before.expr, rows.expr)))) if fits(before.axes, rows.axes) else None


@rule("addcmul")
def on_addcmul(ctx: Context, node: Node, a: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Finding:
    """``a + tensor1 * tensor2``."""
    into, product = ctx.fact(a), multiplied(ctx, node, "mul", tensor1, tensor2) if value == 1 else None
    if isinstance(product, Rows):
        summed = _in_buffer(node, into, product) if isinstance(into, Buffer) else add_to_sum(ctx, node, a, None, into, product)
        if summed is not None:
            return summed
    return on_pointwise(ctx, node, a, tensor1, tensor2, value=value)


def add_to_sum(ctx: Context, node: Node, a: Any, b: Any, x: Any, y: Any) -> Finding:
    """``acc + rows`` of one expert, in any order; None if neither side is an accumulation. ``x``, ``y``: the facts of ``a``, ``b``."""
    if isinstance(x, Sum) and isinstance(y, Sum):
        return merged(x, y)
    for first, summed in ((a, y), (b, x)):
        if isinstance(first, int | float) and first == 0 and isinstance(summed, Sum):
            return replace(summed, axes=plain_axes(node))  # ``sum(outs)`` begins with 0
    for first, second, summed in ((x, y, b), (y, x, a)):
        if isinstance(first, Fill) and first.value == 0.0 and isinstance(second, Sum) and _same_tensor(node, summed):
            return replace(second, axes=plain_axes(node))
    for first, second, source in ((x, y, a), (y, x, b)):
        if not isinstance(second, Rows) or not selects(second):
            continue
        if isinstance(first, Sum) or (isinstance(first, Fill) and first.value == 0.0):
            return _grown(ctx, node, first, second)
        if isinstance(first, Rows) and selects(first) and first.domain.name == "masked" and not first.domain.same(second.domain):
            return Sum(plain_axes(node), None, (Part(first, node), Part(second, node)))
        if source == 0:
            return second
        own = isinstance(first, Fill) or (isinstance(first, View) and first.root is source)
        if own and second.domain.name == "masked" and isinstance(source, Node):
            return Sum(plain_axes(node), source, (Part(second, node),))
    return None


def _grown(ctx: Context, node: Node, first: Any, rows: Rows) -> Sum | None:
    if rows.domain.name != "masked":
        return None
    part = Part(rows, node)
    if isinstance(first, Sum):
        return replace(first, axes=plain_axes(node), parts=(*first.parts, part))
    return Sum(plain_axes(node), None, (part,))


def _same_tensor(node: Node, other: Node) -> bool:
    """Whether a sum has the shape and dtype of one of its terms."""
    mine, theirs = tensor(node), tensor(other)
    return mine is not None and theirs is not None and mine.dtype == theirs.dtype and same_shape(out_shape(node), out_shape(other))


def merged(x: Sum, y: Sum) -> Sum | None:
    """Two halves of one layer; two whole layers, or sums over different routings, stay two."""
    routings = {p.rows.domain.routing for p in (*x.parts, *y.parts)} - {None}
    if (x.base is not None and y.base is not None) or x.replaced or y.replaced or len(routings) > 1 or _experts(x) & _experts(y):
        return None
    return Sum(x.axes, x.base or y.base, (*x.parts, *y.parts), x.once or y.once)


def _experts(found: Sum) -> set[tuple[Any, int | None]]:
    return {(p.rows.domain.expert, p.rows.domain.slot) for p in found.parts}
