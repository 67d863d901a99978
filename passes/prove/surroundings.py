"""What the program around a region sees of it, besides the sum: compared on one replay of the region and one of what stands in its place.

Behind the replacement, readers of every holder of the sum read the fused result; values that do not depend on the experts (sorted ids,
counts) and that others read stay, with the writes that make them; and nothing that is older than the region may have changed but the
accumulator that it started from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import SIZE_QUERIES
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Cast, computed_in, held_leaves, walk, weight_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.replay import Run
from moefuse.runtime.rounding import eps_of

_COARSE = 1e-5
"""Larger roundings than those of float32."""
CODE = 0.125
"""So far two results may be apart, of their size, whose projections round activations: less than if every one had the next code."""


class Around:
    """A region as the program around it sees it. ``before``: its nodes in order; ``after``: those that stay, and the replacement's."""

    def __init__(self, ctx: Context, region: Region, new_nodes: Sequence[Node]) -> None:
        self.ctx, self.region = ctx, region
        self.before = sorted(region.nodes, key=ctx.position.__getitem__)
        new = set(new_nodes)
        self._last = ctx.position[region.anchor]
        self._accumulators = {self._storage(h) for h in region.holders}
        self.holders = [h for h in region.holders if any(self._behind(u) and u not in new for u in h.users)]
        # Other names of the sum behind it: views that show all of it, casts that do nothing.
        self._later = sorted((h for h in self.holders if ctx.position[h] > self._last), key=ctx.position.__getitem__)
        holders = set(region.holders)
        self.kept = [n for n in self.before if n not in holders and any(self._outside(u) for u in n.users)]
        stay = self._with_writes(self.kept)
        self.after = [*(n for n in self.before if n in stay), *new_nodes]

    def seen(self, original: Run, fused: Run, result: Node) -> str:
        """The first difference that the program around the region would see, or an empty text."""
        for node in original.changed():
            if not self._accumulated(node):
                return f"{named(node)}, which is older than the layer, is changed in it"
        for node in fused.changed():
            return f"{named(node)}, which is older than the layer, is changed by what stands in its place"
        for node in self.kept:
            if original.guards.jumped(node) and fused.guards.jumped(node):
                continue  # nobody reads it in a pass without rows
            if not equal(original.value(node), fused.value(node)):
                return f"{named(node)} is also read behind the layer, and would have another value there"
        new = fused.value(result)
        for node in self._later:
            original.run(node)
        for node in self.holders:
            problem = self._like(original, node, new)
            if problem:
                return f"{named(node)} is read behind the layer as its result, {problem}"
        return ""

    def _like(self, original: Run, holder: Node, new: torch.Tensor) -> str:
        old = original.value(holder)
        if not isinstance(old, torch.Tensor):
            return ""
        if old.shape != new.shape or old.dtype != new.dtype:
            return f"and is {list(old.shape)} {old.dtype}, not {list(new.shape)} {new.dtype}"
        distance, size = rms(old.double() - new.double()), rms(old.double()) + 1e-30
        allowed = 2 * far(rounding(self.region, old)) + codes(self.region)
        return "" if distance <= allowed * size else f"and differs from it by {distance / size:.2e} of its size"

    def _accumulated(self, node: Node) -> bool:
        """Whether a leaf is the accumulator: whoever reads it behind the region reads the result, or nobody does."""
        if self._storage(node) not in self._accumulators:
            return False
        return node in map(self.ctx.now, self.region.holders) or node in self.region.holders or not any(self._behind(u) for u in node.users)

    def _storage(self, node: Node) -> Node:
        return self.ctx.storage.get(node, node)

    def _outside(self, user: Node) -> bool:
        call = self.ctx.calls.get(user)
        return user not in self.region.nodes and not (call is not None and call.name in SIZE_QUERIES)

    def _behind(self, user: Node) -> bool:
        return self._outside(user) and self.ctx.position.get(user, -1) > self._last

    def _with_writes(self, nodes: Sequence[Node]) -> set[Node]:
        """Nodes of the region with all in it that makes their values. Writes to the accumulator go: they are the replacement."""
        found: set[Node] = set()
        stack = list(nodes)
        while stack:
            node = stack.pop()
            if node in found or node not in self.region.nodes:
                continue
            found.add(node)
            stack += node.all_input_nodes
            if self._storage(node) not in self._accumulators:
                stack += self.ctx.writes.get(self._storage(node), ())
        return found


def codes(region: Region) -> float:
    """How far two results of a region may be apart because activations have other codes; 0.0 where none are rounded to codes."""
    return CODE if any(leaf.held is not None and leaf.held.encoding.activation is not None for leaf in held_leaves(region.expr)) else 0.0


def equal(a: Any, b: Any) -> bool:
    """Whether two values are the same; on a device that sums in any order, floats that are nearly so."""
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(equal, a, b))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return bool(a == b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.device.type != "cpu" and a.dtype.is_floating_point:
        return torch.allclose(a, b, rtol=16 * torch.finfo(a.dtype).eps, atol=16 * torch.finfo(a.dtype).eps, equal_nan=True)
    return same_bits(a, b)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have equal elements, NaN where the other has NaN."""
    if torch.equal(a, b):
        return True
    return a.dtype.is_floating_point and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def rms(x: torch.Tensor) -> float:
    """The size of a tensor's elements."""
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def rounded(region: Region) -> Lost | None:
    """The refusal of experts that round to fewer bits in between; so far off, nothing tells an op that rounds elsewhere from a fault."""
    value = tensor(region.value)
    if value is None or not value.dtype.is_floating_point:
        return None
    eps = torch.finfo(lowest(region, value.dtype)).eps
    for e in walk(region.expr):
        made = e.dtype if isinstance(e, Cast) else dict(getattr(e, "kwargs", ())).get("dtype")
        if isinstance(made, torch.dtype) and made.is_floating_point and torch.finfo(made).eps > eps:
            narrow, wide = (str(d).removeprefix("torch.") for d in (made, value.dtype))
            detail = f"the program rounds to it inside experts that compute in {wide}"
            return Lost("dtype-unsupported", e.node, {"dtype": narrow, "detail": detail})
    return None


def far(eps: float) -> float:
    """How far a result may be from its value in float64, of its size, that is rounded by ``eps``.

    Long sums are made in float32, and have the roundings of each step; those of 16 bits and of tf32 have the ones of what is summed.
    (512 of them in 16 bits would be any result at all.)
    """
    return 512 * eps if eps < _COARSE else 4 * eps


def rounding(region: Region, out: torch.Tensor) -> float:
    """The coarsest rounding of what a region computes, with the leave that products of float32 have on its device."""
    return eps_of(lowest(region, out.dtype), out.device.type)


def lowest(region: Region, out: torch.dtype) -> torch.dtype:
    """The coarsest dtype that a region computes in."""
    weights = (tensor(leaf.source) for leaf in weight_leaves(region.expr) if leaf.held is None)
    found: list[torch.dtype] = [*(w.dtype for w in weights if w is not None), computed_in(region.expr) or out, out]
    return max(found, key=lambda d: torch.finfo(d).eps)
