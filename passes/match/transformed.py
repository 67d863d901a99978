"""Regions that torch.func transforms are refused: the fused op has no rules for that."""

from __future__ import annotations

from moefuse import _torch_private
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region


def transformed(ctx: Context, region: Region) -> Lost | None:
    """No operation of the region is inside a level, nor in the body of an operator that is called inside one."""
    inside = min((n for n in region.nodes if n in ctx.levels), key=ctx.position.__getitem__, default=None)
    if inside is not None:
        return ctx.lost("transformed", region.anchor, name=ctx.levels[inside])
    values = map(tensor, (*region.nodes, *region.leaves))
    if any(v is not None and _torch_private.is_transformed(v) for v in values):
        return ctx.lost("transformed", region.anchor, name="outside this part of the program")
    return None
