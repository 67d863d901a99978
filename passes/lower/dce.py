"""Dead-code elimination: what is left of a captured loop in the graph once its layers are fused."""

from __future__ import annotations

import torch
from torch.fx import Node

from moefuse.passes.infer.state import Context
from moefuse.passes.match.liveness import live


def erase(ctx: Context, scoped: set[Node]) -> None:
    """Erase what nothing reads any more, and the assertions about sizes that are gone with it.

    Args:
        ctx: the graph, already rewritten.
        scoped: what was recorded under assumptions; grad modes are switched back for operations that are gone only here.
    """
    needed = live(ctx)
    for node in reversed(list(ctx.graph.nodes)):
        if node not in needed and not any(u in needed for u in node.users):
            ctx.graph.erase_node(node)
    _drop_idle_modes(ctx, scoped)


def _drop_idle_modes(ctx: Context, scoped: set[Node]) -> None:
    """Grad modes that were switched in a scope for operations that are gone."""
    order = [n for n in ctx.graph.nodes if n.op not in ("placeholder", "get_attr")]
    now = torch.is_grad_enabled()
    kept: list[tuple[Node, bool]] = []
    for node in order:
        call = ctx.calls.get(node)
        switches = call is not None and call.name == "_set_grad_enabled" and isinstance(call.args[0], bool)
        if switches and kept and kept[-1][1] and kept[-1][0] in scoped:
            ctx.graph.erase_node(kept.pop()[0])
        kept.append((node, switches))
    for node, switches in kept:
        if not switches:
            continue
        wanted = bool(node.args[0])
        if wanted == now and node in scoped:
            ctx.graph.erase_node(node)
        now = wanted
