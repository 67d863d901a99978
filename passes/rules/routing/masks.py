"""Who was chosen: comparisons of expert ids become masks, masks become row numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.ranges import counts
from moefuse.passes.infer.state import Context, as_size, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, align, extent, fresh
from moefuse.passes.ir.facts import (
    Absent,
    Column,
    Counts,
    Fill,
    Hit,
    Index,
    IndexMatrix,
    Many,
    Mask,
    Range,
    Routing,
    Rows,
    Selection,
    Span,
    Table,
    View,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import sparse_entries


def is_integer(node: object) -> bool:
    """Whether a node is an integer tensor."""
    value = tensor(node)
    return value is not None and value.dtype in (torch.int64, torch.int32)


def role_axes(view: View, routing: Routing) -> Axes | None:
    """The axes of a view of the ids, as tokens and slots."""
    last = len(routing.tokens)
    out: list[Axis] = []
    for axis in view.axes:
        new: list[Atom] = []
        for a in axis:
            if a.kind == "b" and not same(a.size, 1):
                return None
            if a.kind == "d":
                new.append(Atom("k", 0, a.size) if routing.has_slots and a.index == last else Atom("t", a.index, a.size))
        out.append(tuple(new))
    return tuple(out)


@rule("one_hot")
def on_one_hot(ctx: Context, node: Node, ids: Node, num_classes: int = -1) -> Any:
    # A mask that is read as ids (all of them 0 or 1) says nothing about whom it is the mask of.
    view = View(fresh(out_shape(ids)), ids) if isinstance(ctx.fact(ids), Mask | Table) else ctx.view(ids)
    routing = ctx.routing(view) if view is not None and is_integer(ids) else None
    axes = role_axes(view, routing) if view is not None and routing is not None else None
    if axes is None or routing is None or num_classes < 1:
        return None
    return settled(ctx, node, Mask((*axes, (Atom("e", 0, num_classes),)), routing, None))


def settled(ctx: Context, node: Node, mask: Mask) -> Mask | Table:
    """With one slot per token, a mask over tokens is a table already."""
    if mask.routing.top_k != 1 or any(a.kind == "k" for axis in mask.axes for a in axis):
        return mask
    return replace(mask_table(ctx, node, mask, mask.axes), negated=mask.negated)


@rule("eq", "ne")
def on_compare(ctx: Context, node: Node, a: Any, other: Any) -> Any:
    b = other
    negated = ctx.calls[node].name == "ne"  # type: ignore[union-attr]
    number = ctx.number(b)
    b = b if number is None else number
    fact = ctx.fact(a) if isinstance(a, Node) else None
    if isinstance(fact, Span) and isinstance(b, Node):
        from moefuse.passes.rules.routing.offsets import compared as compared_spans

        return compared_spans(ctx, ctx.calls[node].name, a, b)  # type: ignore[union-attr]
    if isinstance(fact, Counts | Hit | Span):
        from moefuse.passes.rules.routing.nonempty import compared

        return compared(fact, ctx.calls[node].name, b)  # type: ignore[union-attr]
    if isinstance(fact, Table) and not fact.ones:
        return sparse_entries.compared(ctx, node, fact, above=False) if negated and b == 0 else None
    if isinstance(fact, Mask | Table) and b in (0, 1, False, True):
        return on_not(ctx, node, a) if (b in (0, False)) != negated else ctx.fact(a)
    if isinstance(fact, Range) and isinstance(b, Node):
        a, b = b, a
    view = ctx.view(a) if is_integer(a) else None
    if isinstance(view, Column):
        return _slot_table(ctx, view, b, negated)
    routing = ctx.routing(view) if view is not None else None
    axes = role_axes(view, routing) if view is not None and routing is not None else None
    if axes is None or routing is None:
        return None
    if isinstance(b, int) and not isinstance(b, bool):
        return settled(ctx, node, Mask(axes, routing, b, negated=negated))
    numbers = ctx.fact(b)
    if not isinstance(numbers, Range):
        return None
    rank = max(len(axes), len(numbers.axes))
    left: Axes = (*((),) * (rank - len(axes)), *axes)
    right: Axes = (*((),) * (rank - len(numbers.axes)), *numbers.axes)
    if any(x and y and not same(x[0].size, 1) for x, y in zip(left, right, strict=True)):
        return None
    merged = tuple((Atom("e", 0, y[0].size),) if y else x for x, y in zip(left, right, strict=True))
    return settled(ctx, node, Mask(merged, routing, None, negated=negated))


def _slot_table(ctx: Context, column: Column, expert: Any, negated: bool) -> Table | None:
    """``ids[:, slot] == expert``."""
    routing = ctx.routing(column.base)
    roles = role_axes(column.base, routing) if routing is not None else None
    if routing is None or roles is None or not isinstance(expert, int) or isinstance(expert, bool) or [a.kind for a in roles[-1]] != ["k"]:
        return None
    axes = tuple(tuple(a._replace(kind="t") for a in axis) for axis in column.axes)
    return Table(axes, routing, 0.0, expert, None, ones=True, negated=negated, slot=column.slot)


@rule("bitwise_not", "logical_not")
def on_not(ctx: Context, node: Node, x: Node) -> Any:
    fact = ctx.fact(x)
    if isinstance(fact, Hit):
        return replace(fact, negated=not fact.negated) if _boolean(x) else None
    if isinstance(fact, Mask) and fact.weight is None:
        return replace(fact, negated=not fact.negated)
    return replace(fact, negated=not fact.negated) if isinstance(fact, Table) and fact.ones else None


def _boolean(x: Node) -> bool:
    value = tensor(x)
    return value is not None and value.dtype == torch.bool


@rule("arange")
def on_arange(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1 and args[0] != 0:
        return None
    if kwargs.get("start", 0) != 0 or kwargs.get("step", 1) != 1 or len(args) > 2:
        return None
    size = as_size(args[-1] if args else kwargs.get("end"))
    return None if size is None else Range(((Atom("d", 0, size),),), size)


def mask_table(ctx: Context, node: Node, mask: Mask, axes: Axes) -> Table:
    """A mask (or masked weight) after its slot axis was summed away: a table over tokens and experts."""
    root = node if mask.expert is None else None
    return Table(axes, mask.routing, 0.0, mask.expert, root, axes if root else (), slots=mask.weight, ones=mask.weight is None)


def over_slots(ctx: Context, node: Node, x: Node, dim: Any, keepdim: bool) -> Any:
    """Sum (or any, or max) of a mask over the slots of a token; over everything but the expert it counts tokens."""
    mask = ctx.fact(x)
    if isinstance(mask, Mask | Table) and dim is None and mask.expert is not None:
        from moefuse.passes.rules.routing.nonempty import all_dims, any_of

        return any_of(mask, all_dims(mask, None))
    if isinstance(mask, Table) and dim is not None:
        return _chosen_by(ctx, node, mask, dim, keepdim)
    if not isinstance(mask, Mask) or mask.negated or dim is None:
        return None
    rank = len(mask.axes)
    dims = {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    gone = [a.kind for d in dims for a in mask.axes[d]]
    axes = tuple((() if i in dims else a) for i, a in enumerate(mask.axes) if keepdim or i not in dims)
    if "e" in gone:
        return None
    if gone == ["k"] or (not gone and not mask.routing.has_slots):
        return mask_table(ctx, node, mask, axes)
    left = [a.kind for axis in axes for a in axis]
    return counted(node, axes, mask.routing) if left == ["e"] and mask.weight is None and not keepdim else None


def counted(node: Node, axes: Axes, routing: Routing) -> Counts | Hit | None:
    """Ones added up: numbers of slots, or, in a dtype that rounds those, at least whether there are any."""
    value = tensor(node)
    if value is None or counts(value.dtype, routing.num_tokens * routing.top_k):
        return Counts(axes, routing, ends=False)
    return Hit(axes, routing, None) if value.dtype.is_floating_point or value.dtype == torch.bool else None


def _chosen_by(ctx: Context, node: Node, table: Table, dim: Any, keepdim: bool) -> Counts | Hit | None:
    """A 0/1 table [tokens, E] summed over the tokens: how many chose each expert, once each."""
    if not table.ones or table.negated or table.expert is not None or table.slot is not None or keepdim:
        return None
    rank = len(table.axes)
    dims = {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    left = tuple(axis for i, axis in enumerate(table.axes) if i not in dims)
    routing = sparse_entries.counted(ctx, table.routing)
    return counted(node, left, routing) if table.routing.distinct and [a.kind for axis in left for a in axis] == ["e"] else None


@rule("any")
def on_any(ctx: Context, node: Node, x: Node, dim: Any = None, keepdim: bool = False) -> Any:
    fact = over_slots(ctx, node, x, dim, keepdim)
    if isinstance(fact, Counts):
        return Hit(fact.axes, fact.routing, None)
    return fact if not isinstance(fact, Table) or fact.ones else None


def selection(fact: Any, axes: Axes) -> tuple[Selection, tuple[str, ...]] | None:
    """The selection of a 0/1 mask with a fixed expert, and what each of its dimensions counts."""
    columns = []
    for axis in axes:
        kinds = {a.kind for a in axis}
        only = not kinds and isinstance(fact, Table) and fact.routing.top_k == 1  # of [tokens, 1]: the one slot there is
        flat = kinds == {"t", "k"} and every_slot(axis, fact.routing)
        if (len(kinds) > 1 and not flat) or kinds & {"e", "b"} or not (kinds or only):
            return None
        columns.append("flat" if flat else "token" if kinds == {"t"} else "slot")
    if fact.expert is None or fact.negated or (columns.count("token") != 1 and columns != ["flat"]):
        return None
    if isinstance(fact, Mask):
        if fact.weight is not None or (fact.routing.has_slots and not {"slot", "flat"} & set(columns)):
            return None
        return Selection(fact.routing, fact.expert, by_token=not fact.routing.has_slots), tuple(columns)
    if isinstance(fact, Table) and fact.ones:
        return Selection(fact.routing, fact.expert, by_token=True, slot=fact.slot), tuple(columns)
    return None


def every_slot(axis: Axis, routing: Routing) -> bool:
    """Whether an axis counts through all slots, token by token."""
    names = [(a.kind, a.index) for a in axis if not same(a.size, 1)]
    return names == sorted(names, key=lambda a: ("tk".index(a[0]), a[1])) and same(extent(axis), routing.num_tokens * routing.top_k)


def row_axis(node: Node) -> Axis:
    """The rows of a selection, with the length Dynamo gave the node."""
    shape = out_shape(node)
    return (Atom("r", 0, shape[0] if shape else 0),)


@rule("nonzero")
def on_nonzero(ctx: Context, node: Node, x: Node, as_tuple: bool = False) -> Any:
    fact = ctx.fact(x)
    if isinstance(fact, Table) and fact.expert is None:
        return None if as_tuple else sparse_entries.listed(ctx, node, fact)
    found = selection(fact, fact.axes) if isinstance(fact, Mask | Table) else None
    if found is None:
        return None
    chosen, columns = found
    if as_tuple:
        rows: Axis = (Atom("r", 0, out_length(node)),)
        return Many(tuple(Index((rows,), chosen, c) for c in columns))
    return IndexMatrix((row_axis(node), (Atom("d", 1, len(columns)),)), chosen, columns)


def out_length(node: Node) -> Any:
    """The length of the first tensor a node returns."""
    value = fake(node)
    first = value[0] if isinstance(value, tuple | list) and value else value
    return shape_of(first)[0] if isinstance(first, torch.Tensor) and first.dim() else 0


@rule("nonzero_numpy")
def on_nonzero_tuple(ctx: Context, node: Node, x: Node) -> Any:
    return on_nonzero(ctx, node, x, as_tuple=True)


@rule("where")
def on_where(ctx: Context, node: Node, condition: Node, a: Any = None, b: Any = None) -> Any:
    if a is None and b is None:
        return on_nonzero(ctx, node, condition, as_tuple=True)
    fact = ctx.fact(condition)
    if not isinstance(fact, Mask | Table):
        return None
    keep, other = (b, a) if fact.negated else (a, b)
    return masked(ctx, node, fact, keep, other)


@rule("masked_fill")
def on_masked_fill(ctx: Context, node: Node, x: Node, mask: Node, value: Any) -> Any:
    fact, rows = ctx.fact(mask), ctx.fact(x)
    if isinstance(fact, Absent) and isinstance(rows, Rows) and rows.domain.routing is fact.routing and value == 0:
        # The fused op gives such slots nothing at all; lift checks that the bound is the number of experts.
        ctx.sentinels.setdefault(fact.routing, set()).add(fact.count)
        return rows if rows.domain.name == "sorted" else None
    if not isinstance(fact, Mask | Table) or not fact.negated:
        return None
    return masked(ctx, node, fact, x, value)


def masked(ctx: Context, node: Node, fact: Mask | Table, keep: Any, other: Any) -> Any:
    """``keep`` where the expert was chosen, the constant ``other`` elsewhere."""
    fill = constant(ctx, other)
    if fill is None:
        return None
    if isinstance(fact, Mask):
        weight = ctx.view(keep)
        return masked_weight(ctx, node, fact, weight) if fill == 0.0 and fact.weight is None and weight is not None else None
    if not fact.ones or not isinstance(keep, Node):
        return None
    axes = replace(fact, negated=False).axes
    return Table(axes, fact.routing, fill, fact.expert, node if fact.expert is None else None, axes)


def masked_weight(ctx: Context, node: Node, mask: Mask, weight: View) -> Mask | None:
    """A mask times the routing weights [tokens, K] it lines up with."""
    rank = len(out_shape(node))
    axes: Axes = (*((),) * (rank - len(mask.axes)), *mask.axes)
    other: Axes = (*((),) * (rank - len(weight.axes)), *weight.axes)
    seen: dict[str, list[int]] = {"t": [], "k": []}
    for axis, o in zip(axes, other, strict=True):
        runs = align(axis, o) if o else []
        for run, cut in runs or ():
            dims = [a.index for a in cut if a.kind == "d"]
            kinds = {a.kind for a in run if not same(a.size, 1)} or {a.kind for a in run}
            if dims and (len(kinds) > 1 or "e" in kinds):
                return None
            for kind in kinds & {"t", "k"}:
                seen[kind] += dims
        if runs is None:
            return None
    dims = seen["t"] + seen["k"]
    if dims != sorted(dims) or not (seen["t"] or same(mask.routing.num_tokens, 1)):
        return None
    if mask.routing.has_slots and not seen["k"] and mask.routing.top_k > 1:
        return None
    return replace(mask, axes=axes, weight=weight, negated=False)


def constant(ctx: Context, value: Any) -> float | None:
    """The value of a constant: a Python number, or a filled tensor."""
    if isinstance(value, bool | int | float):
        return float(value)
    fact = ctx.facts.get(value) if isinstance(value, Node) else None
    return fact.value if isinstance(fact, Fill) else None
