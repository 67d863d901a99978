"""What training sees of experts that no token chose, where the program's loop skips them."""

from __future__ import annotations

from collections.abc import Sequence

from moefuse.capture.assumptions import Assumption
from moefuse.passes.context import Context
from moefuse.passes.expr import weight_leaves
from moefuse.passes.ops import location, tensor
from moefuse.passes.regions import Region

NOTE = (
    "experts that no token chose get gradients of zeros{where}, where the loop leaves None: "
    "weight decay and momentum go on moving their weights in such a step"
)


def notes(ctx: Context, fused: Sequence[Region], assumptions: Sequence[Assumption]) -> list[str]:
    """A note for each fused loop that skips experts without tokens, where every expert has Parameters of its own and is trained.

    One expert's slice of a stacked Parameter has zeros for its gradient in the loop too.
    """
    return [NOTE.format(where=f" at {location(r.anchor)}") for r in fused if _skips(r, assumptions) and _trained_apart(ctx, r)]


def _skips(region: Region, assumptions: Sequence[Assumption]) -> bool:
    return any(not a.nodes.isdisjoint(region.nodes) for a in assumptions)


def _trained_apart(ctx: Context, region: Region) -> bool:
    parts = [p for leaf in weight_leaves(region.expr) for p in leaf.parts]
    return ctx.mode[region.anchor][0] and any((value := tensor(p)) is not None and value.requires_grad for p in parts)
