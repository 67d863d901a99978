"""Ids of which nothing shows that a token has each expert once, and where they come from: top-k may have chosen them all the same."""

from __future__ import annotations

from torch.fx import Node

from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost, Routing
from moefuse.program.breaks import resumed_at


def may_repeat(ctx: Context, anchor: Node, routing: Routing) -> Lost:
    """The refusal of a region that counts a repeated id once."""
    root = ctx.storage[routing.node]
    if root.op != "placeholder":
        return ctx.lost("ids-not-distinct", anchor, ids=f"nothing shows that {named(routing.node)} has none, as what top-k gives has none")
    unknown = "and this graph does not show whether top-k chose it"
    at = resumed_at(anchor.meta.get("stack_trace") or "")
    where = f"comes from before the graph break at {at}" if at else "is given to this graph from outside"
    name = named(root)
    ids = name if name.startswith("`") else "what the ids are made of"
    return ctx.lost("ids-not-distinct", anchor, ids=f"{ids} {where}, {unknown}")


__all__ = ["may_repeat"]
