"""Putting the replacement in: readers of the result read the new node, and what only the old region needed goes away."""

from __future__ import annotations

from torch.fx import Node

from moefuse.passes.infer.state import Context, Standin
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.dce import sweep


def replace(ctx: Context, region: Region, result: Node) -> None:
    """Let every reader behind the region read ``result``; then erase what is dead.

    The graph keeps values of the region that others use (sorted ids, counts): they do not depend on the experts.
    """
    last = ctx.position[region.anchor]
    for holder in region.holders:
        for user in list(holder.users):
            if user not in region.nodes and ctx.position.get(user, -1) > last:
                user.replace_input_with(holder, result)
        # A later region may read this result directly: it is emitted with, and verified as, the new node.
        ctx.replaced[holder] = result
    adds = (region.anchor, *(p.node for p in region.parts))
    ctx.results[result] = Standin(region.holders, region.nodes, region.base, adds)
    if result not in ctx.position:
        ctx.memory.introduce(result, region.value)
    sweep(ctx, region)
