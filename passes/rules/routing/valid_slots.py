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
from moefuse.passes.infer.operands import padded
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Axes
from moefuse.passes.ir.facts import Mask, Routing, Table, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.masked_slots import dropped


@dataclass
class _Valid:
    """Routings with fewer slots, by the one they are of and the tensor that says which are left."""

    of: dict[tuple[Routing, Node], Routing] = field(default_factory=dict)


@rule("bitwise_and")
def on_and(ctx: Context, node: Node, a: Any, other: Any) -> Mask | Table | None:
    x, y = ctx.fact(a), ctx.fact(other)
    if isinstance(x, Mask | Table) and isinstance(y, Mask | Table):
        call = ctx.calls[node]
        return _both(x, y) if call is not None and not call.inplace and _boolean(node) else None
    for mask, condition in ((x, y), (y, x)):
        if isinstance(mask, Mask | Table):
            return dropped(ctx, node, mask, condition) or restricted(ctx, node, mask, condition)
    return None


def restricted(ctx: Context, node: Node, fact: Mask | Table, other: Any) -> Mask | Table | None:
    """The mask of one expert where a plain boolean tensor, one value for a token or a slot, allows it; None for anything else."""
    call, known = ctx.calls[node], tensor(other.root) if isinstance(other, View) else None
    if call is None or call.inplace or known is None or known.dtype != torch.bool or not _boolean(node):
        return None
    if fact.negated or fact.expert is None or not fact.routing.whole:
        return None
    if not _ones(fact) or getattr(fact, "slot", None) is not None:
        return None
    rank = len(out_shape(node))
    axes = padded(fact.axes, rank)
    if not _says_which(axes, padded(other.axes, rank), other.root, fact.routing):
        return None
    routings = ctx.scratch(_Valid).of
    routing = routings.setdefault((fact.routing, other.root), replace(fact.routing, valid=other.root))
    if isinstance(fact, Mask):
        return replace(fact, axes=axes, routing=routing)
    return replace(fact, axes=axes, routing=routing, root=None, root_axes=(), slots=None)


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


def _boolean(node: Node) -> bool:
    """Whether the result is a mask, and not numbers."""
    value = tensor(node)
    return value is not None and value.dtype == torch.bool


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
