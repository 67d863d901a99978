"""Indexing: by constants (an expert, a half of the features) and by index tensors (the rows of an expert, the weights of a slot)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import Size, same
from moefuse.passes.infer.state import Context, normalize
from moefuse.passes.ir.axes import Atom, Axes, atoms, extent, fresh
from moefuse.passes.ir.expr import Gate, Slice, Token
from moefuse.passes.ir.facts import (
    Column,
    Counts,
    Entries,
    Fact,
    Finding,
    Hit,
    Index,
    IndexMatrix,
    Listed,
    Many,
    Mask,
    Occurring,
    Range,
    RowNumber,
    Rows,
    Sum,
    Table,
    View,
    Weight,
)  # fmt: skip
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import slot_masks, sparse_entries
from moefuse.passes.rules.routing.masks import of_only_slot, of_slot
from moefuse.passes.rules.routing.offsets import picked, total
from moefuse.passes.rules.rows import listed
from moefuse.passes.rules.sums import segments

_ALL = slice(None, None, None)


def basic(ctx: Context, node: Node, x: Node, fact: Fact, items: list[Any]) -> Finding:
    """Indexing by integers, slices, None and an ellipsis, one dimension after another."""
    items = every_dim(items, len(fact.axes))
    dim = 0
    for item in items:
        found: Finding
        if item is None:
            found = fact.with_axes((*fact.axes[:dim], (), *fact.axes[dim:]))
        else:
            found = pick(ctx, node, x, fact, dim, item) if isinstance(item, int) else cut(ctx, node, fact, dim, item)
        if not isinstance(found, Fact):
            return found
        fact, dim = found, dim + (not isinstance(item, int))
    return fact


def every_dim(items: Sequence[Any], rank: int) -> list[Any]:
    """An index with full slices for an ellipsis, and for the dimensions behind those that it names."""
    items = list(items)
    rest = [_ALL] * (rank - sum(map(_dims_of, items)))
    at = next((n for n, i in enumerate(items) if i is Ellipsis), len(items))
    return [*items[:at], *rest, *items[at + 1 :]]


def up_to_last(items: Sequence[Any], rank: int) -> list[Any]:
    """An index without an ellipsis, and without the full slices behind."""
    items = every_dim(items, rank)
    while len(items) > 1 and items[-1] == _ALL:
        items.pop()
    return items


def without_features(ctx: Context, items: Sequence[Any], shape: tuple[Any, ...]) -> list[Any]:
    """``[tokens[:, None], arange(H)]`` takes every feature of the rows, as ``[tokens]`` does."""
    *rows, last = items
    facts, columns = [ctx.fact(i) if isinstance(i, Node) else None for i in rows], ctx.fact(last) if isinstance(last, Node) else None
    if not rows or len(items) != len(shape) or not isinstance(columns, Range) or not same(columns.size, shape[-1]):
        return list(items)
    lead, own = columns.axes[:-1], columns.axes[-1:]
    whole = not any(lead) and len(lead) < 2 and bool(own) and [a.kind for a in own[0]] == ["d"]
    listed = all(isinstance(f, Index) and len(f.axes) == 2 and bool(f.axes[0]) and not f.axes[1] for f in facts)
    return rows if whole and listed else list(items)


def _dims_of(item: Any) -> int:
    """How many dimensions one part of an index is of."""
    value = tensor(item)
    return 0 if item is None or item is Ellipsis else value.dim() if value is not None and value.dtype == torch.bool else 1


def pick(ctx: Context, node: Node, x: Node, fact: Any, dim: int, at: int) -> Finding:
    """One index of a dimension: an expert, a feature half, or a dimension of size one."""
    axis = fact.axes[dim]
    axes: Axes = (*fact.axes[:dim], *fact.axes[dim + 1 :])
    only = axis[0] if len(axis) == 1 else None
    if isinstance(at, RowNumber) and not _has_number(fact, dim, only):
        return None
    if isinstance(fact, IndexMatrix) and only is not None and only.kind == "d":
        return Index(axes, fact.selection, fact.columns[at])
    if isinstance(fact, Entries):
        return sparse_entries.column(fact, axes, at) if dim == 1 else None
    if same(extent(axis), 1) or (only is not None and only.kind == "b"):
        found = fact.with_axes(axes)
        return of_only_slot(found) if isinstance(fact, Mask) else found
    if isinstance(fact, Mask | Table | Hit) and only is not None and only.kind in ("e", "k"):
        return _of_one(fact, axes, at, only)
    if isinstance(fact, Counts) and only is not None and only.kind == "e":
        return picked(fact, at, only.size)
    if isinstance(fact, Occurring) and len(fact.axes) == 1 and 0 <= at < fact.count:
        return picked(Counts(fact.axes, fact.routing, fact.ends), at, fact.count)  # where there is such an element
    if isinstance(fact, Rows) and only is not None and only.kind == "f":
        own = slot_masks.column(node, fact, axes, at)
        return own if own is not None else feature_pick(node, fact, dim, at)
    if isinstance(fact, Rows) and only is not None and only.kind == "e" and fact.domain.name == "dense":
        return None
    if isinstance(fact, View) and only is not None and only.kind == "d" and only.index == 0:
        return stacked(fact, axes, expert=at + only.size if at < 0 else at)
    last = only is not None and all(a.index < only.index for a in atoms(axes) if a.kind == "d")  # ``ids.t()[k]``
    if type(fact) is View and only is not None and only.kind == "d" and (dim == len(fact.axes) - 1 or last) and isinstance(only.size, int):
        base = fact.with_axes((*axes, axis))
        return Column(fresh([extent(a) for a in axes]), ctx.first[node], base, at + only.size if at < 0 else at)
    return None


def _of_one(fact: Mask | Table | Hit, axes: Axes, at: int, only: Atom) -> Mask | Table | Hit | None:
    """What speaks of the choices of one expert, or of one slot."""
    if only.kind == "e":
        return replace(fact, axes=axes, expert=at + only.size if at < 0 else at)
    return of_slot(fact, axes, at, only.size) if isinstance(fact, Mask) else None


def _has_number(fact: Any, dim: int, only: Atom | None) -> bool:
    """Whether a dimension has an entry for each expert, or may have one."""
    if only is None or only.kind == "e":
        return only is not None
    if isinstance(fact, Rows):
        return only.kind == "f" and not same(only.size, 1)
    return isinstance(fact, View) and only.kind == "d" and only.index == 0 and dim == 0


def _is_sorted(ctx: Context, root: Node) -> bool:
    """Whether a tensor is all scores in their order, or where they stood: ``[:, :1]`` of it is the choice, and no slot of one."""
    call = ctx.calls.get(root)
    if call is not None and call.name == "getitem" and isinstance(call.args[0], Node):
        call = ctx.calls.get(call.args[0])
    return call is not None and call.name in ("sort", "argsort")


def stacked(fact: View, axes: Axes, **index: Any) -> Weight | None:
    """A stacked weight with its expert dimension taken away."""
    value = tensor(fact.root)
    if value is None or not value.dtype.is_floating_point or value.dim() < 2:
        return None
    left = [() if a and a[0].index == 0 and extent(a) == 1 else a for a in axes]  # ``W[e:e + 1]``
    if any(a and (len(a) != 1 or a[0].kind != "d") for a in left):
        return None
    return Weight(
        tuple((Atom("w", a[0].index, a[0].size),) if a else () for a in left),
        fact.root, index.get("expert"), index.get("routing"), index.get("order"),
    )  # fmt: skip


def entry(node: Node, fact: Rows, axes: Axes, size: Size, at: int) -> Rows | None:
    """One number of a row's token, by its place; that of the row's expert is a weight, where one expert's number stands for others'."""
    token = fact.expr
    if not isinstance(token, Token) or token.by_slot or token.width != size:
        return None
    if isinstance(at, RowNumber):
        own = fact.domain.expert is not None and at == fact.domain.expert
        return replace(fact, axes=axes, expr=Gate(node, token.source, False, False, at)) if own else None
    return replace(fact, axes=axes, expr=Slice(node, token, at + size if at < 0 else at, 1, 1, size))


def feature_pick(node: Node, fact: Rows, dim: int, at: int) -> Rows | None:
    """One half of features that were viewed as [2, I] or [I, 2]."""
    features = [i for i, a in enumerate(fact.axes) if any(b.kind == "f" for b in a)]
    if len(features) == 1 and len(fact.axes[dim]) == 1:
        return entry(node, fact, (*fact.axes[:dim], *fact.axes[dim + 1 :]), fact.axes[dim][0].size, at)
    if len(features) != 2 or isinstance(at, RowNumber):
        return None
    sizes = [extent(fact.axes[i]) for i in features]
    outer = dim == features[0]
    start, step, length = (at * sizes[1], 1, sizes[1]) if outer else (at, sizes[1], sizes[0])
    expr = Slice(node, fact.expr, start, step, length, sizes[0] * sizes[1])
    axes = [a for i, a in enumerate(fact.axes) if i != dim]
    place = features[0] if not outer else features[1] - 1
    axes[place] = (Atom("f", 0, length),)
    return replace(fact, axes=tuple(axes), expr=expr)


def _features(fact: Rows, axes: Axes, part: Slice) -> Rows | None:
    """Some of the features of rows, where these are one dimension."""
    return replace(fact, axes=axes, expr=part) if sum(a.kind == "f" for a in atoms(fact.axes)) == 1 else None


def _experts(fact: Mask | Table | Counts, axes: Axes, dim: int, start: int, step: int) -> Mask | Table | Counts | None:
    """Who chose one expert, or the first ones: ``one_hot(ids, E + 1)[..., :E]``, where slots of padding have a number of their own."""
    if isinstance(fact, Counts) and fact.ends:
        return None  # ``[:E]`` of the ends of E experts and a zero in front
    if not isinstance(fact, Counts) and same(extent(axes[dim]), 1):
        return replace(fact, axes=tuple(() if i == dim else a for i, a in enumerate(axes)), expert=start)
    return fact.with_axes(axes) if (start, step) == (0, 1) and not isinstance(start, RowNumber) else None


def cut(ctx: Context, node: Node, fact: Fact, dim: int, item: slice) -> Finding:
    """A slice of a dimension: nothing, one expert's column, or some features."""
    axis = fact.axes[dim]
    if dim == 0 and item.step is None and any(isinstance(v, Node) for v in (item.start, item.stop)):
        return _between(ctx, node, fact, item)
    if item == _ALL or (
        same(extent(axis), 1) and not isinstance(item.start, RowNumber) and item.start in (None, 0) and item.step in (None, 1)
    ):
        return fact
    only = axis[0] if len(axis) == 1 else None
    if only is None or not isinstance(only.size, int) or any(not isinstance(v, int | None) for v in (item.start, item.stop, item.step)):
        return None
    start, stop, step = item.indices(only.size)
    length = max(0, -(-(stop - start) // step))
    if length == only.size and not isinstance(item.start, RowNumber):
        return fact
    axes = tuple(((Atom(only.kind, only.index, length),) if i == dim else a) for i, a in enumerate(fact.axes))
    if isinstance(fact, Entries):
        return sparse_entries.column(fact, (fact.axes[0], ()), start) if dim == 1 and length == 1 else None
    if isinstance(fact, IndexMatrix):
        return replace(fact, axes=axes, columns=(fact.columns[start],)) if not fact.transposed and dim == 1 and length == 1 else None
    if isinstance(fact, Rows) and only.kind == "f" and step > 0:
        if isinstance(item.start, RowNumber):
            own = entry(node, fact, (), only.size, item.start) if length == 1 else None
            return None if own is None else own.with_axes(tuple(() if i == dim else a for i, a in enumerate(fact.axes)))
        return _features(fact, axes, Slice(node, fact.expr, start, step, length, only.size))
    if isinstance(fact, Mask | Table | Counts) and only.kind == "e":
        return _experts(fact, axes, dim, item.start if isinstance(item.start, RowNumber) else start, step)
    if isinstance(fact, View) and not isinstance(fact, Column) and (only.kind, only.index, dim, length) == ("d", 0, 0, 1):
        return stacked(fact, axes, expert=item.start if isinstance(item.start, RowNumber) else start)
    one = (only.kind, dim, length) == ("d", len(fact.axes) - 1, 1) and not isinstance(item.start, RowNumber)
    if type(fact) is View and one and not _is_sorted(ctx, fact.root):
        return Column((*fresh([extent(a) for a in axes[:-1]]), ()), ctx.first[node], fact, start)
    return None


def _between(ctx: Context, node: Node, fact: Fact, item: slice) -> Finding:
    """The rows between two offsets that only the run knows."""
    if isinstance(fact, Listed):
        return listed.of_bounds(ctx, node, fact, item.start, item.stop)
    return segments.of_bounds(ctx, node, fact, item.start, item.stop) if segments.is_sorted(fact) else None


@rule("select")
def on_select(ctx: Context, node: Node, x: Node, dim: int, index: Any) -> Finding:
    fact = ctx.fact(x)
    number = ctx.number(index)
    index = index if number is None else number
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or not isinstance(index, int):
        return None
    return pick(ctx, node, x, fact, normalize(dim, len(fact.axes)), index)


@rule("narrow")
def on_narrow(ctx: Context, node: Node, x: Node, dim: int, start: Any, length: Any) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    if isinstance(length, Node) and normalize(dim, len(fact.axes)) == 0:
        stop = total(ctx, start, length)
        return None if stop is None else _between(ctx, node, fact, slice(start, stop))
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    return cut(ctx, node, fact, normalize(dim, len(fact.axes)), slice(start, start + length))


@rule("unbind")
def on_unbind(ctx: Context, node: Node, x: Node, dim: int = 0) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    at = normalize(dim, len(fact.axes))
    count = extent(fact.axes[at])
    if not isinstance(count, int):
        return None
    return many(pick(ctx, node, x, fact, at, i) for i in range(count))


@rule("chunk", "tensor_split")
def on_chunk(ctx: Context, node: Node, x: Node, chunks: Any, dim: int = 0) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or not isinstance(chunks, int):
        return None
    size = extent(fact.axes[normalize(dim, len(fact.axes))])
    if not isinstance(size, int) or size % chunks:
        return None
    return _pieces(ctx, node, fact, dim, [size // chunks] * chunks)


@rule("split", "split_with_sizes")
def on_split(ctx: Context, node: Node, x: Node, sizes: Any, dim: int = 0) -> Finding:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    if isinstance(sizes, tuple | list) and any(isinstance(s, Node) for s in sizes):
        if normalize(dim, len(fact.axes)) != 0:
            return None
        if isinstance(fact, Listed):
            return listed.of_sizes(ctx, node, fact, sizes)
        return segments.of_sizes(ctx, node, fact, sizes) if segments.is_sorted(fact) else None
    total = extent(fact.axes[normalize(dim, len(fact.axes))])
    if isinstance(sizes, int) and isinstance(total, int):
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)]
    if not isinstance(sizes, tuple | list) or not all(isinstance(s, int) for s in sizes):
        return None
    return _pieces(ctx, node, fact, dim, list(sizes))


def _pieces(ctx: Context, node: Node, fact: Fact, dim: int, sizes: list[int]) -> Many | None:
    at, start, out = normalize(dim, len(fact.axes)), 0, []
    for size in sizes:
        out.append(cut(ctx, node, fact, at, slice(start, start + size)))
        start += size
    return many(out)


def many(items: Any) -> Many | None:
    """Facts of a tuple, or None if no item has one."""
    found = tuple(items)
    return Many(found) if any(f is not None for f in found) else None
