"""View operations: they rearrange axes and change no value. One rule set serves every kind of fact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import SHAPED
from moefuse.passes.graph.sharded import is_parameter
from moefuse.passes.graph.sizes import Size, product, same, same_shape, shape_of
from moefuse.passes.infer.held import rounds
from moefuse.passes.infer.ranges import counts, holds, interval, tells_none
from moefuse.passes.infer.routings import split_routing
from moefuse.passes.infer.state import Context, as_size, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, atoms, extent, fresh, in_order, reshape
from moefuse.passes.ir.expr import Cast
from moefuse.passes.ir.facts import (
    Buffer,
    Counts,
    Fact,
    Fill,
    Finding,
    Hit,
    Index,
    IndexMatrix,
    Listed,
    Mask,
    Occurring,
    Range,
    Rows,
    SlotMask,
    Sorted,
    Span,
    Sum,
    Table,
    View,
    Weight,
)
from moefuse.passes.rules import EVERYTHING, rule
from moefuse.passes.rules.routing.nonempty import hit_of
from moefuse.passes.rules.routing.slot_masks import cast

_uid = iter(range(1, 1 << 62))


def broadcast(size: Size) -> Atom:
    """A new index variable that nothing depends on."""
    return Atom("b", next(_uid), size)


def reshaped(fact: Any, sizes: tuple[Size, ...]) -> Finding:
    """The fact after a row-major reshape, or None. Rows of an expert have a length that only the run knows: its dimension stays put."""
    if isinstance(fact, IndexMatrix) and len(sizes) == 1 and len(fact.columns) == 1:
        return Index(fact.axes[:1], fact.selection, fact.columns[0])
    axes = reshape(fact.axes, sizes) or _rows_again(fact, sizes)
    shown = tuple(a for a in fact.axes if a)
    if axes is None and shown and shown[0][0].kind == "r" and sizes and not isinstance(sizes[0], int):
        rest = reshape(shown[1:], sizes[1:])
        axes = None if rest is None else (shown[0], *rest)
    if axes is None and isinstance(fact, Rows):
        axes = split_features(fact.axes, sizes)
    return None if axes is None else fact.with_axes(axes)


def _rows_again(fact: Any, sizes: tuple[Size, ...]) -> Axes | None:
    """Elements of rows, one row behind the other, as rows again: how many there are is what is left for the first dimension."""
    flat: Axis = fact.axes[0] if len(fact.axes) == 1 else ()
    if not isinstance(fact, Rows | Buffer) or len(flat) < 2 or flat[0].kind != "r" or len(sizes) < 2:
        return None
    rest = reshape((flat[1:],), sizes[1:])
    return None if rest is None else ((flat[0]._replace(size=sizes[0]),), *rest)


def split_features(axes: Axes, sizes: tuple[Size, ...]) -> Axes | None:
    """Features taken apart into [2, I] or [I, 2]."""
    if not axes or len(axes[-1]) != 1 or axes[-1][0].kind != "f" or len(sizes) < 2 or not same(product(sizes[-2:]), axes[-1][0].size):
        return None
    rest = (axes[0],) if axes[0] and axes[0][0].kind == "r" and len(sizes) == 3 and len(axes) == 2 else reshape(axes[:-1], sizes[:-2])
    return None if rest is None else (*rest, (Atom("f", 0, sizes[-2]),), (Atom("f", 1, sizes[-1]),))


@rule(*SHAPED, shown=(EVERYTHING,))
def on_reshape(ctx: Context, node: Node, x: Node) -> Finding:
    fact, before, after = ctx.fact(x), tensor(x), tensor(node)
    if before is not None and after is not None and before.dtype != after.dtype:
        return None  # ``x.view(torch.int32)``: the same bits, other numbers
    if isinstance(fact, Sum):
        return _again(ctx, node, x, fact)
    if isinstance(fact, Fill):
        return fact.with_axes(reshape(fact.axes, out_shape(node)) or fresh(out_shape(node)))
    found = reshaped(fact, out_shape(node)) if isinstance(fact, Fact) else None
    if type(found) is View and _moved(found):
        return inherited(found, ctx.first[node])
    return split_tokens(ctx, fact, out_shape(node)) if found is None and isinstance(fact, Rows | Table) else found


def _moved(view: View) -> bool:
    """Whether a reshape had to copy rows: [B, C, H, W] with its channels behind, as [B * H * W, C]. What it gives is a tensor of its own.

    Numbers without features beside them are slots in some order, which their root says; what is repeated says so by its atoms; and a
    Parameter in another order is still the weight that the user trains.
    """
    if is_parameter(view.root):
        return False
    broadcast_over = any(a.kind != "d" and not same(a.size, 1) for a in atoms(view.axes))
    return len(view.axes) > 1 and not same(extent(view.axes[-1]), 1) and not broadcast_over and not in_order(view.axes)


def split_tokens(ctx: Context, fact: Rows | Table, sizes: tuple[Size, ...]) -> Finding:
    """Tokens that were one dimension taken apart into batch and sequence, or None: ``table.t().view(E, B, -1)``."""
    flat = atoms(fact.axes)
    places = [i for i, a in enumerate(flat) if a.kind == "t"]
    if len(places) != 1 or (isinstance(fact, Rows) and fact.domain.name != "dense"):
        return None
    at, whole = places[0], flat[places[0]].size
    for first in range(len(sizes)):
        for last in range(first + 2, len(sizes) + 1):
            parts = sizes[first:last]
            if any(same(s, 1) for s in parts) or not same(product(parts), whole):
                continue
            before, after = reshape((flat[:at],), sizes[:first]), reshape((flat[at + 1 :],), sizes[last:])
            if before is not None and after is not None:
                tokens = tuple((Atom("t", i, s),) for i, s in enumerate(parts))
                return _with_tokens(ctx, fact.with_axes((*before, *tokens, *after)), parts)
    return None


def _with_tokens(ctx: Context, fact: Rows | Table, tokens: tuple[Size, ...]) -> Finding:
    if isinstance(fact, Table):
        return replace(fact, routing=split_routing(ctx, fact.routing, tokens))
    routing = fact.domain.routing
    return fact if routing is None else replace(fact, domain=replace(fact.domain, routing=split_routing(ctx, routing, tokens)))


@rule("squeeze")
def on_squeeze(ctx: Context, node: Node, x: Node, dim: Any = None) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    rank = len(fact.axes)
    dims = range(rank) if dim is None else [normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,))]
    drop = {d for d in dims if same(extent(fact.axes[d]), 1)}
    if isinstance(fact, IndexMatrix) and len(fact.columns) == 1 and 1 in drop:
        return Index(fact.axes[:1], fact.selection, fact.columns[0])
    return fact.with_axes(tuple(a for i, a in enumerate(fact.axes) if i not in drop))


@rule("unsqueeze")
def on_unsqueeze(ctx: Context, node: Node, x: Node, dim: int) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    at = normalize(dim, len(fact.axes) + 1)
    return fact.with_axes((*fact.axes[:at], (), *fact.axes[at:]))


@rule("transpose")
def on_transpose(ctx: Context, node: Node, x: Node, dim0: int, dim1: int) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    axes, rank = list(fact.axes), len(fact.axes)
    i, j = normalize(dim0, rank), normalize(dim1, rank)
    axes[i], axes[j] = axes[j], axes[i]
    if isinstance(fact, IndexMatrix):
        return replace(fact, axes=tuple(axes), transposed=fact.transposed != (i != j))
    return fact.with_axes(tuple(axes))


@rule("t")
def on_t(ctx: Context, node: Node, x: Node) -> Finding:
    return on_transpose(ctx, node, x, 0, 1) if len(out_shape(node)) == 2 else ctx.fact(x)


@rule("getattr")
def on_getattr(ctx: Context, node: Node, x: Any, name: str) -> Finding:
    if name == "T":
        return on_t(ctx, node, x) if len(out_shape(node)) <= 2 else None
    if name == "mT":
        return on_transpose(ctx, node, x, -2, -1)
    return on_same(ctx, node, x) if name == "data" else None


@rule("permute")
def on_permute(ctx: Context, node: Node, x: Node, *given: Any, dims: Any = None) -> Finding:
    fact = ctx.fact(x)
    order = dims if dims is not None else given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or len(order) != len(fact.axes):
        return None
    return fact.with_axes(tuple(fact.axes[normalize(d, len(order))] for d in order))


@rule("movedim")
def on_movedim(ctx: Context, node: Node, x: Node, source: Any, destination: Any) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or not isinstance(source, int) or not isinstance(destination, int):
        return None
    axes = list(fact.axes)
    axes.insert(normalize(destination, len(axes)), axes.pop(normalize(source, len(axes))))
    return fact.with_axes(tuple(axes))


def expanded(axes: Axes, sizes: tuple[Size, ...]) -> Axes | None:
    """Axes after broadcasting to ``sizes``: new and size-one dimensions become broadcast atoms."""
    missing = len(sizes) - len(axes)
    if missing < 0:
        return None
    out: list[Axis] = []
    for axis, size in zip((*((),) * missing, *axes), sizes, strict=True):
        keep = same(extent(axis), size) or any(a.kind == "r" for a in axis)
        out.append(axis if keep else (broadcast(size),))
    return tuple(out)


@rule("expand", "expand_as", "broadcast_to", shown=(EVERYTHING,))
def on_expand(ctx: Context, node: Node, x: Node) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    axes = expanded(fact.axes, out_shape(node))
    return None if axes is None else fact.with_axes(axes)


@rule("repeat", "tile")
def on_repeat(ctx: Context, node: Node, x: Node, *given: Any, repeats: Any = None, dims: Any = None) -> Finding:
    fact = ctx.fact(x)
    named = dims if repeats is None else repeats
    counts = named if named is not None else given[0] if len(given) == 1 and isinstance(given[0], tuple | list) else given
    numbers = isinstance(fact, Index | Sorted)
    if not isinstance(fact, View | Range | Rows | Index | Sorted) or len(counts) < len(fact.axes):
        return None
    padded = (*((),) * (len(counts) - len(fact.axes)), *fact.axes)
    axes = []
    for axis, count in zip(padded, counts, strict=True):
        times = as_size(count)
        if times is None or (numbers and axis and not same(times, 1)):
            return None
        axes.append(axis if same(times, 1) else (broadcast(times), *axis))
    return fact.with_axes(tuple(axes))


@rule("repeat_interleave", shown=("output_size",))
def on_repeat_interleave(ctx: Context, node: Node, x: Node, repeats: Any, dim: int | None = None) -> Finding:
    fact = ctx.fact(x)
    times = as_size(repeats)
    if not isinstance(fact, View | Range | Rows) or times is None:
        return None
    axes = fact.axes if dim is not None else (atoms(fact.axes),)
    at = normalize(dim or 0, len(axes))
    axis = axes[at] if same(times, 1) else (*axes[at], broadcast(times))
    return fact.with_axes((*axes[:at], axis, *axes[at + 1 :]))


@rule("contiguous", "clone", "detach", "alias", "positive", "cpu", "cuda", "resolve_conj", "view_of", shown=(EVERYTHING,))
def on_same(ctx: Context, node: Node, x: Node) -> Finding:
    fact = ctx.fact(x)
    cuts = ctx.calls[node].name in ("detach", "getattr")  # type: ignore[union-attr]
    if cuts and isinstance(fact, Rows | View | Table | Sum | Mask | Listed):
        return ctx.lost("no-rule", node, op="detach") if isinstance(fact, Rows) and fact.domain.routing is not None else None
    if cuts and isinstance(fact, Weight) and ctx.mode[node].grad and (value := tensor(x)) is not None and value.requires_grad:
        return None  # another tensor than the parameter: it has no gradient
    if isinstance(fact, Sum):
        return _again(ctx, node, x, fact)
    return fact if isinstance(fact, Fact) else None


def _again(ctx: Context, node: Node, x: Node, fact: Sum) -> Sum | None:
    """A sum that is bound again by an operation that changes nothing: the same tensor, or a copy that others may be added to."""
    before, after = tensor(x), tensor(node)
    if ctx.same_tensor(node, x):
        return fact
    if before is None or after is None or before.dtype != after.dtype or before.device != after.device:
        return None
    if ctx.storage[node] is not node or not same_shape(shape_of(before), shape_of(after)):
        return None
    readers = (reader for alias in ctx.aliases.get(ctx.storage[x], ()) for reader in alias.users)
    return fact if all(ctx.position[reader] <= ctx.position[node] for reader in readers) else replace(fact)


@rule("to", "type_as", "_to_copy", "convert_element_type", shown=(EVERYTHING,))
def on_cast(ctx: Context, node: Node, x: Node) -> Finding:
    fact, before, after = ctx.fact(x), tensor(x), tensor(node)
    if not isinstance(fact, Fact) or before is None or after is None or before.device != after.device:
        return None
    if before.dtype == after.dtype:
        return _again(ctx, node, x, fact) if isinstance(fact, Sum) else fact
    if isinstance(fact, Rows):
        return replace(fact, expr=Cast(node, fact.expr, after.dtype))
    if isinstance(fact, Weight) and rounds(node, x):
        return fact
    if isinstance(fact, SlotMask):
        return cast(fact, node, after.dtype)
    if isinstance(fact, Mask | Hit):
        weighted = isinstance(fact, Mask) and fact.weight is not None
        some = isinstance(fact, Mask) or before.dtype == torch.bool or tells_none(after.dtype)
        return fact if some and not weighted else None
    if isinstance(fact, Counts | Occurring | Span) and after.dtype == torch.bool:
        return _any_slots(fact)
    if isinstance(fact, Index | IndexMatrix | Sorted | Counts | Occurring | Range | Span):
        return fact if _keeps_numbers(ctx, x, fact, after.dtype) else None
    if isinstance(fact, Table):
        if not after.dtype.is_floating_point and fact.fill not in (0.0, 1.0):
            return None
        return replace(fact, root=node if fact.root is not None else None, root_axes=fact.axes, slots=None if not fact.ones else fact.slots)
    if isinstance(fact, View) and not before.dtype.is_floating_point and not after.dtype.is_floating_point:
        numbers = interval(ctx, x)
        return fact if numbers is not None and holds(after.dtype, numbers) else inherited(fact, node)
    return inherited(fact, node)


def _any_slots(fact: Counts | Occurring | Span) -> Hit | None:
    """Numbers of slots as booleans: whether there are any."""
    if isinstance(fact, Counts):
        return None if fact.ends else Hit(fact.axes, fact.routing, None)
    found = hit_of(fact)
    return found if isinstance(found, Hit) else None


def _keeps_numbers(ctx: Context, x: Node, fact: Fact, dtype: torch.dtype) -> bool:
    """Whether numbers of rows, slots or experts are the same in another dtype."""
    if isinstance(fact, Sorted) and fact.of == "ids":
        numbers = interval(ctx, x)
        return numbers is not None and holds(dtype, numbers)
    if isinstance(fact, Index | IndexMatrix | Sorted) and dtype not in (torch.int64, torch.int32):
        return False  # a byte is a mask where it is an index
    return counts(dtype, fact.size if isinstance(fact, Range) else _slots(fact))


def _slots(fact: Any) -> Size:
    """How many slots there are, of the routing that a fact is about."""
    about = fact.selection if isinstance(fact, Index | IndexMatrix) else fact.order if isinstance(fact, Sorted) else fact
    return about.routing.num_tokens * about.routing.top_k


def inherited(fact: Fact, node: Node) -> View | None:
    """A new plain tensor that keeps how the dimensions of an input factor (flattened tokens and slots stay tokens and slots)."""
    if not isinstance(fact, View) or all(len(axis) == 1 and axis[0].kind == "d" for axis in fact.axes):
        return None
    count = iter(range(1 << 30))
    axes = tuple(tuple(Atom("d", next(count), a.size) for a in axis) for axis in fact.axes)
    return View(axes, node)
