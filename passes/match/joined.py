"""Where the shares of several experts come together by something else than a sum."""

from __future__ import annotations

from torch.fx import Node

from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost, Routing, Sum

_SUMS = frozenset(("add", "sum", "index_add", "getitem"))
_BESIDE = frozenset(("stack", "cat"))
"""They put values beside each other: what follows says how they come together."""


def met(ctx: Context, share: Sum, routing: Routing) -> Lost | None:
    """The refusal at the first operation that reads what is made of one share of a sum and what is made of another; None without one."""
    mine: set[Node] = set()
    others: set[Node] = set()
    beside: set[Node] = set()
    for node, call in ctx.calls.items():
        fact = ctx.facts.get(node)
        inputs = node.all_input_nodes
        if isinstance(fact, Sum) and fact.parts[0].rows.domain.routing is routing:
            (mine if set(fact.parts) & set(share.parts) else others).add(node)
            continue
        if call is None:
            continue
        both = any(n in mine for n in inputs) and any(n in others for n in inputs)
        if both and call.name in _BESIDE:
            beside.add(node)
        elif (both or any(n in beside for n in inputs)) and not (call.name in _SUMS and call.kwargs.get("alpha", 1) == 1):
            return ctx.lost("not-combined", node, by=call.name)
        if any(n in mine for n in inputs):
            mine.add(node)
        if any(n in others for n in inputs):
            others.add(node)
    return None


__all__ = ["met"]
