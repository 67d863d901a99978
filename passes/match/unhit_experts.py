"""What autograd sees of experts that no token chose, where the program's loop skips them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import location, tensor
from moefuse.passes.graph.sharded import gather_of
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import weight_leaves
from moefuse.passes.ir.regions import Region


def notes(ctx: Context, fused: Sequence[Region], assumptions: Sequence[Assumption]) -> list[str]:
    """A note for each fused loop that skips experts without tokens, where every expert has Parameters of its own and is trained.

    One expert's slice of a stacked Parameter has zeros for its gradient in the loop too.
    """
    return [
        f"experts that no token chose get gradients of zeros at {location(region.anchor)}, where the loop leaves None: "
        "weight decay and momentum go on moving their weights in such a step"
        for region in fused
        if any(not a.dummy and not a.nodes.isdisjoint(region.nodes) for a in assumptions) and _trained_apart(ctx, region)
    ]


def without_tokens(region: Region, assumptions: Sequence[Assumption], emit: Emitter, result: Node) -> Node:
    """The result as the loop leaves it that ran for nobody, as there are no tokens: nothing of the experts is in it, no gradient either.

    Not where experts are on several ranks: those here compute tokens of others, which wait for this rank in backward.
    """
    skipped = bool(region.parts) and all(any(part.node in a.nodes and not a.dummy for a in assumptions) for part in region.parts)
    if not skipped or region.base is not None or not any(same(size, 0) for size in region.routing.tokens):
        return result
    if gather_of(p for leaf in weight_leaves(region.expr) for p in (leaf.parts or (leaf.source,))) is not None:
        return result
    return emit(torch.detach, result)


def _trained_apart(ctx: Context, region: Region) -> bool:
    parts = [p for leaf in weight_leaves(region.expr) for p in leaf.parts]
    return ctx.mode[region.anchor].grad and any((value := tensor(p)) is not None and value.requires_grad for p in parts)
