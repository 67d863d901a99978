"""Expert-id masks: comparisons of ids become masks, masks become row numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import product, same
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.ranges import counts
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, as_size, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, align, atoms, extent, fresh
from moefuse.passes.ir.facts import (
    Column,
    Counts,
    Fill,
    Finding,
    Hit,
    Index,
    IndexMatrix,
    Many,
    Mask,
    Range,
    Routing,
    RowNumber,
    Selection,
    SlotMask,
    Span,
    Table,
    View,
)
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import by_expert, sparse_entries
from moefuse.passes.rules.routing.ids import every_slot, is_integer, out_length, role_axes, row_axis
from moefuse.passes.rules.routing.nonempty import all_dims, any_of, hit_of


@rule("count_nonzero")
def on_count_nonzero(ctx: Context, node: Node, x: Node, dim: Any = None, keepdim: bool = False) -> Hit | Span | Counts | None:
    fact = ctx.fact(x)
    if isinstance(fact, Table) and not fact.ones:
        fact = sparse_entries.compared(ctx, node, fact, above=None)  # ``count_nonzero(gates, dim=0)``
    if not isinstance(fact, Mask | Table) or keepdim or (isinstance(fact, Mask) and fact.weight is not None):
        return None
    found = summed(ctx, node, fact, dim, keepdim)
    return found if isinstance(found, Span | Counts) else any_of(fact, all_dims(fact, dim))


@rule("one_hot")
def on_one_hot(ctx: Context, node: Node, ids: Node, num_classes: int = -1) -> Finding:
    # A mask that is read as ids (all of them 0 or 1) says nothing about whom it is the mask of.
    view = View(fresh(out_shape(ids)), ids) if isinstance(ctx.fact(ids), Mask | Table) else ctx.view(ids)
    routing = routing_of(ctx, view) if view is not None and is_integer(ids) else None
    axes = role_axes(view, routing) if view is not None and routing is not None else None
    if isinstance(view, Column) and is_integer(ids):
        return slot_table(ctx, node, view, (*view.axes, (Atom("e", 0, num_classes),)), None) if num_classes > 0 else None
    if axes is None or routing is None or num_classes < 1:
        return None
    return settled(ctx, node, Mask((*axes, (Atom("e", 0, num_classes),)), routing, None))


def slot_table(ctx: Context, node: Node, column: Column, axes: Axes, expert: int | None, negated: bool = False) -> Table | None:
    """``ids[:, slot] == expert``, or of all experts: ``one_hot(ids[:, slot])``."""
    routing = routing_of(ctx, column.base)
    roles = role_axes(column.base, routing) if routing is not None else None
    if routing is None or roles is None or [a.kind for a in roles[-1]] != ["k"]:
        return None
    axes = tuple(tuple(a._replace(kind="t") if a.kind == "d" else a for a in axis) for axis in axes)
    return Table(axes, routing, 0.0, expert, None, ones=True, negated=negated, slot=column.slot)


def of_slot(mask: Mask, axes: Axes, slot: int, size: Any) -> Table | None:
    """``one_hot(ids, E)[:, slot]``, ``(ids == e)[:, slot]``, or such weights: who chose which expert in that slot."""
    if not mask.routing.whole or not isinstance(size, int) or not same(size, mask.routing.top_k):
        return None
    at, ones = slot + size if slot < 0 else slot, mask.weight is None
    return Table(axes, mask.routing, 0.0, mask.expert, None, (), mask.weight, ones, mask.negated, at)


def _of_one_slot(mask: Mask) -> bool:
    """Whether tokens have one slot, and a mask no dimension for it."""
    return bool(mask.routing.top_k == 1) and not any(a.kind == "k" for axis in mask.axes for a in axis)


def of_only_slot(mask: Mask) -> Mask | Table:
    """The same where tokens have one slot, and its dimension has gone; any other mask as it is."""
    if not _of_one_slot(mask):
        return mask
    return Table(mask.axes, mask.routing, 0.0, mask.expert, None, (), mask.weight, mask.weight is None, mask.negated)


def settled(ctx: Context, node: Node, mask: Mask) -> Mask | Table:
    """With one slot per token, a mask over tokens is a table already."""
    if not _of_one_slot(mask):
        return mask
    return replace(mask_table(ctx, node, mask, mask.axes), negated=mask.negated)


def on_not(ctx: Context, node: Node, x: Node) -> Finding:
    fact = ctx.fact(x)
    if isinstance(fact, Hit):
        return replace(fact, negated=not fact.negated) if is_boolean(x) else None
    if isinstance(fact, Mask | SlotMask) and fact.weight is None:
        return replace(fact, negated=not fact.negated)
    return replace(fact, negated=not fact.negated) if isinstance(fact, Table) and fact.ones else None


@rule("arange")
def on_arange(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Finding:
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


def over_slots(ctx: Context, node: Node, x: Node, dim: Any, keepdim: bool) -> Finding:
    """Sum (or any, or max) of a mask over the slots of a token; over everything but the expert it counts tokens."""
    return summed(ctx, node, ctx.fact(x), dim, keepdim)


def summed(ctx: Context, node: Node, mask: Any, dim: Any, keepdim: bool) -> Finding:
    if isinstance(mask, Mask | Table) and dim is None and mask.expert is not None:
        return number_of(node, mask)
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


def number_of(node: Node, fact: Mask | Table) -> Hit | Span | None:
    """All ones of an expert added up: how many slots it has, or at least whether there are any."""
    hit, routing = any_of(fact, all_dims(fact, None)), fact.routing
    whole = routing.num_tokens * (routing.top_k if isinstance(fact, Mask) else 1)
    exact = isinstance(fact, Mask) or (routing.distinct and fact.slot is None)
    if hit is None or not exact or isinstance(fact.expert, RowNumber) or not same(product(extent(a) for a in fact.axes), whole):
        return hit
    found = counted(node, hit.axes, routing)
    return Span((), routing, int(fact.expert or 0), int(fact.expert or 0) + 1) if isinstance(found, Counts) else hit


def counted(node: Node, axes: Axes, routing: Routing) -> Counts | Hit | None:
    """Ones added up: numbers of slots, or, in a dtype that rounds those, at least whether there are any."""
    value = tensor(node)
    if value is None or counts(value.dtype, routing.num_tokens * routing.top_k):
        return Counts(axes, routing, ends=False)
    return Hit(axes, routing, None) if value.dtype.is_floating_point or value.dtype == torch.bool else None


def _chosen_by(ctx: Context, node: Node, table: Table, dim: Any, keepdim: bool) -> Counts | Hit | None:
    """A 0/1 table [tokens, E] summed over the tokens: how many chose each expert, once each."""
    if not table.ones or table.negated or table.expert is not None or keepdim:
        return None
    rank = len(table.axes)
    dims = {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,))}
    if table.slot is not None:
        return any_of(table, dims)  # of one slot: whether there are any
    left = tuple(axis for i, axis in enumerate(table.axes) if i not in dims)
    routing = sparse_entries.counted(ctx, table.routing)
    return counted(node, left, routing) if table.routing.distinct and [a.kind for axis in left for a in axis] == ["e"] else None


@rule("any")
def on_any(ctx: Context, node: Node, x: Node, dim: Any = None, keepdim: bool = False) -> Finding:
    fact = ctx.fact(x)
    if fact.weight is not None if isinstance(fact, Mask) else isinstance(fact, Table) and not fact.ones:
        fact = sparse_entries.compared(ctx, node, fact, above=None)  # ``gates[..., e].any(1)``
    fact = hit_of(summed(ctx, node, fact, dim, keepdim))
    if isinstance(fact, Counts):
        return Hit(fact.axes, fact.routing, None)
    return fact if not isinstance(fact, Table) or fact.ones else None


def selection(fact: Any, axes: Axes) -> tuple[Selection, tuple[str, ...]] | None:
    """The selection of a 0/1 mask with a fixed expert, and what each of its dimensions counts."""
    return _selection(fact, axes) or _selection(fact, _without_ones(axes))


def _without_ones(axes: Axes) -> Axes:
    """Axes without the token dimensions of size one, of which nobody knows where a reshape has put them, unless there is no other."""
    tokens = sorted((a for a in atoms(axes) if a.kind == "t"), key=lambda a: (same(a.size, 1), a.index))
    ones = [a for a in tokens[1:] if same(a.size, 1)]
    return tuple(tuple(a for a in axis if a not in ones) for axis in axes)


def _selection(fact: Any, axes: Axes) -> tuple[Selection, tuple[str, ...]] | None:
    columns = []
    for axis in axes:
        kinds = {a.kind for a in axis}
        only = not kinds and isinstance(fact, Table) and fact.routing.top_k == 1  # of [tokens, 1]: the one slot there is
        flat = kinds == {"t", "k"} and every_slot(axis, fact.routing)
        if (len(kinds) > 1 and not flat) or kinds & {"e", "b"} or not (kinds or only):
            return None
        columns.append("flat" if flat else "token" if kinds == {"t"} else "slot")
    if columns.count("token") > 1 and _token_by_token(axes, columns):
        longer = [i for i, c in enumerate(columns) if c == "token" and not same(extent(axes[i]), 1)] or [0]
        columns = [f"token{i}" if c == "token" and [i] != longer else c for i, c in enumerate(columns)]
    elif columns.count("token") != 1 and columns != ["flat"]:
        return None
    if fact.expert is None or fact.negated:
        return None
    if isinstance(fact, Mask):
        if fact.weight is not None or (fact.routing.has_slots and not {"slot", "flat"} & set(columns)):
            return None
        first = columns[0] == "slot" and len(columns) > 1 and fact.routing.top_k > 1
        return Selection(fact.routing, fact.expert, by_token=not fact.routing.has_slots, slots_first=first), tuple(columns)
    if isinstance(fact, Table) and fact.ones:
        return Selection(fact.routing, fact.expert, by_token=True, slot=fact.slot), tuple(columns)
    return None


def _token_by_token(axes: Axes, columns: list[str]) -> bool:
    """Whether the first dimensions count through the tokens together, in order."""
    lead = columns.count("token")
    order = [a.index for axis in axes[:lead] for a in axis]
    return columns[:lead] == ["token"] * lead and order == sorted(order)


def one_index(facts: list[Any], shape: tuple[Any, ...]) -> tuple[int, Index] | None:
    """(how many there are, what they are as one) of the indices in front that count the tokens together: ``b, t`` of ``x[b, t]``."""
    lead = 0
    while lead < len(facts) and isinstance(facts[lead], Index) and facts[lead].of in (f"token{lead}", "token"):
        lead += 1
    if lead < 2 or not all(f.selection.same(facts[0].selection) for f in facts[:lead]):
        return None
    numbers = [i for i, f in enumerate(facts[:lead]) if f.of == "token"]  # they count all tokens, so what is beside them has size one
    if len(numbers) > 1 or (numbers and not all(same(size, 1) for i, size in enumerate(shape[:lead]) if i != numbers[0])):
        return None
    whole = len(shape) >= lead and same(product(shape[:lead]), facts[0].selection.routing.num_tokens)
    return (lead, replace(facts[0], of="token")) if whole else None


@rule("nonzero")
def on_nonzero(ctx: Context, node: Node, x: Node, as_tuple: bool = False) -> Finding:
    fact = ctx.fact(x)
    if by_expert.is_map(fact):
        return by_expert.listed(ctx, node, fact, as_tuple=as_tuple)
    if isinstance(fact, SlotMask):
        return _slots_of_rows(node, fact) if as_tuple else None
    if isinstance(fact, Table) and fact.expert is None:
        return None if as_tuple else sparse_entries.listed(ctx, node, fact)
    if fact.weight is not None if isinstance(fact, Mask) else isinstance(fact, Table) and not fact.ones:
        fact = sparse_entries.compared(ctx, node, fact, above=None)
    found = selection(fact, fact.axes) if isinstance(fact, Mask | Table) else None
    if found is None:
        return None
    chosen, columns = found
    if as_tuple:
        rows: Axis = (Atom("r", 0, out_length(node)),)
        return Many(tuple(Index((rows,), chosen, c) for c in columns))
    return IndexMatrix((row_axis(node), (Atom("d", 1, len(columns)),)), chosen, columns)


def _slots_of_rows(node: Node, mask: SlotMask) -> Many | None:
    """``torch.where(ids[tok] == e)``: behind the rows the slot of each, where each has one."""
    if mask.weight is not None or mask.negated or not mask.selection.routing.distinct:
        return None
    return Many((None, Index(((Atom("r", 0, out_length(node)),),), mask.selection, "slot")))


@rule("nonzero_numpy")
def on_nonzero_tuple(ctx: Context, node: Node, x: Node) -> Finding:
    return on_nonzero(ctx, node, x, as_tuple=True)


def masked(ctx: Context, node: Node, fact: Mask | Table, keep: Any, other: Any) -> Finding:
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


def tokens_together(axes: Axes) -> tuple[int, Axes]:
    """(how many dimensions in front count tokens, the axes of a mask with those as one): a boolean index goes through them in order."""
    lead = next((i for i, axis in enumerate(axes) if not axis or {a.kind for a in axis} != {"t"}), len(axes))
    order = [a.index for axis in axes[:lead] for a in axis]
    return (lead, (sum(axes[:lead], ()), *axes[lead:])) if lead > 1 and order == sorted(order) else (1, axes)


def token_selection(where: Any) -> Selection | None:
    if isinstance(where, Index) and where.of == "token":
        return where.selection
    if isinstance(where, Mask | Table):
        found = selection(where, tokens_together(where.axes)[1])
        return found[0] if found is not None and found[1] == ("token",) else None
    return None
