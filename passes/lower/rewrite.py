"""Putting the replacement in: readers of the result read the new node, and what only the old region needed goes away."""

from __future__ import annotations

from collections.abc import Set

import torch
from torch.fx import Node

from moefuse.passes.graph.op_classes import SIZE_QUERIES
from moefuse.passes.infer.state import Context, Standin
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.promises import promised


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
    ctx.first[result] = region.value
    adds = (region.anchor, *(p.node for p in region.parts))
    ctx.results[result] = Standin(region.holders, region.nodes, region.base, adds)
    if result not in ctx.position:
        ctx.memory.introduce(result, region.value)
    sweep(ctx, region)


def sweep(ctx: Context, region: Region) -> None:
    """Erase nodes of a region that nothing reads; assertions about sizes that only it had go with it."""
    doomed = dead(ctx, region)
    for node in reversed(ctx.graph.nodes):
        if node in doomed:
            ctx.graph.erase_node(node)


def dead(ctx: Context, region: Region) -> set[Node]:
    """The largest set of nodes whose every reader is in the set, size queries and assertions of these nodes included."""
    found = region.nodes | queries(region.nodes, ctx)
    while kept := {n for n in found if any(u not in found for u in n.users) or _writes_outside(ctx, n, found, region)}:
        found -= kept
    return set(found)


def _writes_outside(ctx: Context, node: Node, found: Set[Node], region: Region) -> bool:
    """Whether an in-place operation changes storage that stays, and is no write to a base whose new value is the replacement."""
    roots = {name for t in ctx.memory.targets.get(node, ()) for name in ctx.memory.storages(t)}
    return any(root not in found and (ctx.memory.outlives(root) or node not in region.own_writes) for root in roots)


def queries(nodes: Set[Node], ctx: Context) -> set[Node]:
    """Size queries of the nodes, arithmetic on them, and the assertions that end there.

    Dynamo reads the length of ``torch.where(mask)[0]`` from a second, otherwise unused item of the tuple.
    """
    found: set[Node] = set()
    stack = [u for n in nodes for u in n.users if u not in nodes]
    while stack:
        node = stack.pop()
        if node in found or node in nodes:
            continue
        call = ctx.calls.get(node)
        if call is None or promised(ctx, node) or not (call.name in SIZE_QUERIES or call.name == "getitem" or _symbolic(node)):
            continue
        found.add(node)
        stack.extend(node.users)
    return found


def _symbolic(node: Node) -> bool:
    """Whether a node computes with sizes only."""
    value = node.meta.get("example_value")
    return value is not None and isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat | bool | int)
