"""Weights of a region that a program unpacks: how they are held, where that can be read (``passes/encodings``).

A weight is known by its node and the dimensions that it is read by: a matrix that is multiplied both ways round is two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.errors import first_line
from moefuse.passes.encodings.part import Coded
from moefuse.passes.encodings.prove import drawn, proved
from moefuse.passes.encodings.read import read
from moefuse.passes.encodings.weight import Weight
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Leaf, weight_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.held_weights import held, shows

_MATRIX = 2
_ENOUGH = 1 << 16
"""Weights of an expert that are compared with what was read."""


Key = tuple[Node, tuple[int, ...]]
"""A weight: its node, and which of its dimensions are features and inputs, that of the experts first where it has one."""


@dataclass
class _Read:
    """What the weights of a graph were read as."""

    coded: dict[Key, Coded] = field(default_factory=dict)
    supposed: dict[Node, Weight] = field(default_factory=dict)


def suppose(ctx: Context, stack: Node, weight: Weight, coded: Coded) -> None:
    """A stack [E, N, K] that stands for ``weight``, which the program unpacks for the slots that chose it: it was read so."""
    known = ctx.scratch(_Read)
    known.coded[stack, (0, 1, 2)], known.supposed[stack] = coded, weight


def is_supposed(ctx: Context, leaf: Leaf) -> bool:
    """Whether the weights of a projection are such a stack."""
    return leaf.source in ctx.scratch(_Read).supposed


def keys_of(leaf: Leaf) -> tuple[Key, ...]:
    """A projection's weights: the stack, or each expert's own."""
    if leaf.stacked:
        return ((leaf.source, (leaf.along, *leaf.order)),)
    return tuple((node, leaf.order) for node in leaf.parts or (leaf.source,))


def unread(ctx: Context, leaf: Leaf) -> Lost | None:
    """Read a projection's weights; why, if one of them is not read."""
    known = ctx.scratch(_Read).coded
    if len(leaf.order) != _MATRIX:
        return ctx.lost("encoding-unknown", (*leaf.parts, leaf.source)[0], dtype="few bits", detail="these are no matrices")
    for node, order in dict.fromkeys(keys_of(leaf)):
        if (node, order) in known:
            continue
        found = _trained(ctx, node) or read(ctx, node, order)
        if isinstance(found, Lost):
            return found
        known[node, order] = found
    return None


def unheld(ctx: Context, leaf: Leaf, count: int) -> Lost | None:
    """Read a projection's weights that are tensors of a class of their own; why, if one of them is not read. ``count``: E."""
    known = ctx.scratch(_Read).coded
    for node, order in dict.fromkeys(keys_of(leaf)):
        if any(other is node and turned != order for other, turned in known):
            return ctx.lost("quantised", node, detail="they are multiplied both ways round")
        found = known.get((node, order)) or held(ctx, leaf, node, order, count)
        if isinstance(found, Lost):
            return found
        known[node, order] = found
    return None


def _trained(ctx: Context, node: Node) -> Lost | None:
    """A refusal for weights whose scales, or anything else that they are made of, are trained: the op has no gradients of these."""
    value = tensor(node)
    if value is None or not value.requires_grad:
        return None
    dtype = str(value.dtype).removeprefix("torch.")
    return ctx.lost("encoding-unknown", node, dtype=dtype, detail="what they are made of is trained")


def coded_weights(ctx: Context, region: Region) -> dict[Key, Coded]:
    """The weights of a region that were read."""
    known = ctx.scratch(_Read).coded
    return {key: known[key] for leaf in weight_leaves(region.expr) for key in keys_of(leaf) if key in known}


def disproved(ctx: Context, coded: Mapping[Key, Coded], known: Mapping[Node, Any]) -> Lost | None:
    """A refusal if a weight is not, bit by bit, what it was read as: on the model's tensors, or on made-up ones where they are unknown."""
    for (node, order), as_read in coded.items():
        if as_read.is_inner:
            wrong = _not_shown(ctx, node, as_read, known)
            if wrong is not None:
                return wrong
            continue
        made_up = drawn(as_read)

        def value(of: Node, made_up: Any = made_up) -> Tensor:
            real = known.get(of)
            found: Tensor = real if isinstance(real, torch.Tensor) else made_up(of)
            return found

        try:
            weight = ctx.scratch(_Read).supposed.get(node, Weight(node, order))
            right = proved(ctx, weight, as_read, value, most=_ENOUGH)
        except Exception as error:  # whatever a program's operations raise on weights that it may never run with
            held = str(as_read.dtype).removeprefix("torch.")
            return ctx.lost("encoding-unknown", node, dtype=held, detail=f"they cannot be computed: {first_line(error)}")
        if not right:
            detail = f"they are not what they look like: {as_read.encoding.describe()}"
            return ctx.lost("encoding-unknown", node, dtype=str(as_read.dtype).removeprefix("torch."), detail=detail)
    return None


def _not_shown(ctx: Context, node: Node, as_read: Coded, known: Mapping[Node, Any]) -> Lost | None:
    """A refusal if the model's own tensor is not what others of its class were read as. Where it is unknown, these have to do."""
    if node not in known:
        return None
    try:
        right = shows(ctx, node, as_read, known[node])
    except Exception as error:
        return ctx.lost("quantised", node, detail=f"they cannot be multiplied here: {first_line(error)}")
    return None if right else ctx.lost("quantised", node, detail=f"they are not what they look like: {as_read.encoding.describe()}")


__all__ = ["Key", "coded_weights", "disproved", "is_supposed", "keys_of", "suppose", "unheld", "unread"]
