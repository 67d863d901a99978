"""Slots without expert: the mask of the chosen experts times a condition (capacity, padding) is a mask with fewer slots.

What is left is a routing of its own, read from the mask: a slot whose expert was taken away has none, which is not the same as a routing
weight of zero (zero times an expert's infinity is no number, and the expert's share of the work would be done).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes, extent
from moefuse.passes.ir.facts import Mask, Routing, Table, View


def dropped(ctx: Context, node: Node, fact: Mask | Table, other: Any) -> Mask | Table | None:
    """A whole mask of the chosen experts times a plain boolean tensor; None where it is anything else."""
    call, kept = ctx.calls[node], tensor(other.root) if isinstance(other, View) else None
    if call is None or call.inplace or kept is None or kept.dtype != torch.bool or fact.negated or fact.expert is not None:
        return None
    if fact.weight is not None if isinstance(fact, Mask) else not fact.ones or fact.slot is not None or fact.routing.top_k != 1:
        return None
    axes = _axes(fact, out_shape(node))
    if axes is None:
        return None
    old = fact.routing
    tokens = tuple(a.size for axis in axes for a in axis if a.kind == "t")
    columns = axes[-1][0].size
    new = Routing(node, tokens, old.top_k, isinstance(fact, Mask), old.distinct, columns=int(columns))
    if isinstance(fact, Mask):
        return replace(fact, axes=axes, routing=new)
    return replace(fact, axes=axes, routing=new, root=node, root_axes=axes, slots=None)


def _axes(fact: Mask | Table, shape: tuple[Any, ...]) -> Axes | None:
    """[tokens..., (K,) E] in that order, one atom for each dimension; None for any other order."""
    if len(fact.axes) != len(shape) or not all(axis and same(extent(axis), size) for axis, size in zip(fact.axes, shape, strict=True)):
        return None
    kinds = [{a.kind for a in axis} for axis in fact.axes]
    last = [{"k"}, {"e"}] if isinstance(fact, Mask) else [{"e"}]
    lead = len(kinds) - len(last)
    tokens = [a.index for axis in fact.axes[:lead] for a in axis]
    every = same(_product(shape[:lead]), fact.routing.num_tokens)
    if lead < 1 or kinds[lead:] != last or any(kind != {"t"} for kind in kinds[:lead]) or tokens != sorted(tokens) or not every:
        return None
    if any(not isinstance(size, int) for size in shape[lead:]):
        return None
    roles = [*(("t", i) for i in range(lead)), *((kind, 0) for kinds in last for kind in kinds)]
    return tuple((Atom(kind, index, size),) for (kind, index), size in zip(roles, shape, strict=True))


def _product(sizes: tuple[Any, ...]) -> Any:
    whole: Any = 1
    for size in sizes:
        whole = whole * size
    return whole
