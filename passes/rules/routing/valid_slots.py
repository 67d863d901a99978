"""Padding: ``(ids == e) & valid[:, None]`` is the mask of a routing in which the slots of tokens that are not valid have no expert.

Unlike :mod:`masked_slots`, which reads the routing from a whole mask, this keeps the ids: what is left out is known from ``valid`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import product, same, shape_of
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.operands import padded
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Axes
from moefuse.passes.ir.facts import Column, Mask, Routing, Table, View
from moefuse.passes.rules.routing import sparse_entries
from moefuse.passes.rules.routing.ids import is_slot_weight
from moefuse.passes.rules.routing.masked_slots import dropped


@dataclass
class _Valid:
    """Routings with fewer slots, by the one they are of and the tensor that says which are left."""

    of: dict[tuple[Routing, Node], Routing] = field(default_factory=dict)


def on_and(ctx: Context, node: Node, a: Any, other: Any) -> Mask | Table | None:
    x, y = ctx.fact(a), ctx.fact(other)
    if isinstance(x, Mask | Table) and isinstance(y, Mask | Table):
        call = ctx.calls[node]
        return _both(x, y) if call is not None and not call.inplace and is_boolean(node) else None
    for mask, condition in ((x, y), (y, x)):
        if isinstance(mask, Mask | Table):
            return dropped(ctx, node, mask, condition) or restricted(ctx, node, mask, condition)
    return None


def restricted(ctx: Context, node: Node, fact: Mask | Table, other: Any) -> Mask | Table | None:
    """The mask of one expert where a plain boolean tensor, one value for a token or a slot, allows it; None for anything else."""
    call, known = ctx.calls[node], tensor(other.root) if isinstance(other, View) else None
    if call is None or call.inplace or known is None or known.dtype != torch.bool or not is_boolean(node):
        return None
    if fact.negated or fact.expert is None or not fact.routing.whole or not _ones(fact):
        return None
    if (found := _weighed(ctx, node, fact, other.root)) is not None:
        return found
    if getattr(fact, "slot", None) is not None:
        return None
    rank = len(out_shape(node))
    axes = padded(fact.axes, rank)
    if not _says_which(axes, padded(other.axes, rank), other.root, fact.routing):
        return None
    routings = ctx.scratch(_Valid).of
    routing = routings.setdefault((fact.routing, other.root), replace(fact.routing, valid=other.root))
    return _of(routing, replace(fact, axes=axes))


def _weighed(ctx: Context, node: Node, chosen: Mask | Table, condition: Node) -> Mask | Table | None:
    """The tokens of one expert whose weight in its slot (``w[:, k] > 0``), or whose score of it (``p[:, e] >= 0.2``), is above a number.

    They may be those that chose it in one slot.
    """
    call = ctx.calls.get(condition)
    values, bound = call.args if call is not None and len(call.args) == 2 and not call.kwargs and not call.inplace else (None, None)
    column = ctx.fact(values)
    if call is None or not isinstance(column, Column) or not tensor(values).dtype.is_floating_point:  # type: ignore[union-attr]
        return None
    above = sparse_entries.above(values, call.name, bound)
    tokens = tuple(() if [a.kind for a in axis] == ["k"] else axis for axis in chosen.axes)
    if above is None or ctx.storage[condition] in ctx.writes or tokens != _of_tokens(column):
        return None
    if isinstance(chosen, Table) and chosen.slot == column.slot and is_slot_weight(column.base, chosen.routing):
        return sparse_entries.compared(ctx, node, replace(chosen, slots=column.base, ones=False), above=above)
    routing = sparse_entries.of_table(ctx, chosen.routing, column.base, above=above) if chosen.expert == column.slot else None
    return None if routing is None else _of(routing, chosen)


def _of(routing: Routing, fact: Mask | Table) -> Mask | Table:
    """A mask of the same entries under a routing with fewer slots; no tensor holds what it would be a table of."""
    if isinstance(fact, Mask):
        return replace(fact, routing=routing)
    return replace(fact, routing=routing, root=None, root_axes=(), slots=None)


def _of_tokens(column: Column) -> Axes:
    """The axes of a column whose elements are tokens."""
    return tuple(tuple(a._replace(kind="t") if a.kind == "d" else a for a in axis) for axis in column.axes)


def _both(x: Mask | Table, y: Mask | Table) -> Mask | Table | None:
    """Of two masks of one expert, of the same ids and tokens, the one with fewer slots, where the other has all."""
    for less, more in ((x, y), (y, x)):
        plain = not less.negated and not more.negated and _ones(less) and _ones(more) and type(less) is type(more)
        alike = less.axes == more.axes and less.expert == more.expert and less.routing.node is more.routing.node
        if plain and alike and more.routing.whole and getattr(less, "slot", None) == getattr(more, "slot", None):
            return less
    return None


def _ones(fact: Mask | Table) -> bool:
    return fact.weight is None if isinstance(fact, Mask) else fact.ones


def _says_which(mask: Axes, other: Axes, root: Node, routing: Routing) -> bool:
    """Whether a tensor lines up with the tokens of a mask, or with all its slots, in their order and in whole."""
    tokens: list[int] = []
    slots: list[int] = []
    for mine, theirs in zip(mask, other, strict=True):
        dims = [a for a in theirs if a.kind == "d" and not same(a.size, 1)]
        if any(a.kind == "b" and not same(a.size, 1) for a in theirs) and not mine:
            return False
        kinds = {a.kind for a in mine if not same(a.size, 1)}
        if dims and (len(kinds) != 1 or not same(product(a.size for a in mine), product(a.size for a in theirs))):
            return False
        (slots if kinds == {"k"} else tokens).extend(a.index for a in dims)
    order = [a.index for axis in mask for a in axis if a.kind == "t" and not same(a.size, 1)]
    whole = shape_of(tensor(root))  # type: ignore[arg-type]
    count = routing.num_tokens * (routing.top_k if slots else 1)
    return order == sorted(order) and tokens + slots == sorted(tokens + slots) and same(product(whole), count)
