"""Slots that no expert here serves: rows of experts that are set to zero where the slot's id is as many as there are experts, or more.

The fused op gives such slots nothing at all, so they are the rows as they were. Lift checks that the bound is the number of experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.operands import leaf
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Linear, SlotWeight, walk
from moefuse.passes.ir.facts import Absent, Rows, View
from moefuse.passes.rules.routing.ids import is_integer
from moefuse.passes.rules.routing.sort import all_slots

_BEYOND, _BELOW = {"ge": 0, "gt": 1}, {"lt": 0, "le": 1}


@dataclass
class _Products:
    """Products behind which rows of absent slots become zeros, and those that leave such rows as they are in memory."""

    emptied: set[Node] = field(default_factory=set)
    unwritten: set[Node] = field(default_factory=set)


def unwritten(ctx: Context, product: Node) -> None:
    """Note a product that leaves the rows of absent slots as they are in memory."""
    ctx.scratch(_Products).unwritten.add(product)


def seen(ctx: Context, nodes: Collection[Node]) -> Node | None:
    """The first of these nodes that leaves rows as they are in memory which nothing sets to zero behind it."""
    known = ctx.scratch(_Products)
    return min(known.unwritten.intersection(nodes) - known.emptied, key=ctx.position.__getitem__, default=None)


def zeroed(ctx: Context, node: Node, kept: Any, mask: Any, where: bool = True) -> Rows | None:
    """Rows that are set to zero where a mask is ``where``; None if that is not where slots have no expert."""
    rows, out, given = ctx.fact(kept), tensor(node), tensor(kept)
    if not isinstance(rows, Rows) or not isinstance(mask, Node) or out is None or given is None or out.dtype != given.dtype:
        return None
    count = _sorted(ctx, rows, mask) if where and rows.domain.name == "sorted" else _slots(ctx, node, rows, mask, where)
    if count is None or rows.domain.routing is None:
        return None
    ctx.sentinels.setdefault(rows.domain.routing, set()).add(count)
    ctx.scratch(_Products).emptied.update(e.node for e in walk(rows.expr) if isinstance(e, Linear))
    return rows


def _sorted(ctx: Context, rows: Rows, mask: Node) -> int | None:
    """The bound of a mask over the sorted slots."""
    fact = ctx.fact(mask)
    return fact.count if isinstance(fact, Absent) and rows.domain.routing is fact.routing else None


def _slots(ctx: Context, node: Node, rows: Rows, mask: Node, where: bool) -> int | None:
    """The bound of a mask over all slots, token by token: ids that nobody writes to, compared with a number."""
    view, domain = ctx.fact(mask), rows.domain
    if domain.name != "slots" or domain.routing is None or not isinstance(view, View) or ctx.storage[view.root] in ctx.writes:
        return None
    bound = _bound(ctx, view.root, where)
    if bound is None:
        return None
    ids = ctx.view(bound[0])
    if ids is None or not is_integer(bound[0]) or ctx.storage[ids.root] in ctx.writes or routing_of(ctx, ids) is not domain.routing:
        return None
    beside = leaf(ctx, node, rows.axes, domain, view)
    return bound[1] if all_slots(ids, domain.routing) and isinstance(beside, SlotWeight) else None


def _bound(ctx: Context, mask: Node, where: bool) -> tuple[Node, int] | None:
    """(ids, the number from which on they are marked) of a comparison, or of its negation."""
    call = ctx.calls[mask]
    if call is None or call.inplace or call.kwargs:
        return None
    if call.name in ("bitwise_not", "logical_not"):
        return _bound(ctx, call.args[0], not where)
    more = (_BEYOND if where else _BELOW).get(call.name)
    if more is None or len(call.args) != 2 or not isinstance(call.args[0], Node):
        return None
    number = call.args[1]
    return (call.args[0], number + more) if isinstance(number, int) and not isinstance(number, bool) else None
