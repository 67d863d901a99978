"""Who was chosen, listed expert by expert: a map [E, tokens] is gone through as a sort by expert goes through the slots.

``expert, token = torch.where(chosen.T)``, ``arange(T).expand(E, -1)[chosen.T]``, ``gates.T.masked_select(chosen.T)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.symbolic_sizes import refine, settle
from moefuse.passes.ir.axes import Axis, extent
from moefuse.passes.ir.facts import Entries, Many, Order, Range, Routing, Rows, Sorted, Table
from moefuse.passes.rules.routing import sparse_entries
from moefuse.passes.rules.routing.ids import out_length
from moefuse.passes.rules.routing.sort import slot_rows


@dataclass
class _Orders:
    """One order for each routing: all such lists go through its slots alike."""

    of: dict[Routing, Order] = field(default_factory=dict)


def is_map(fact: Any) -> bool:
    """Whether a value is a table [E, tokens] of all experts."""
    return isinstance(fact, Table) and fact.expert is None and [{a.kind for a in axis} for axis in fact.axes] == [{"e"}, {"t"}]


def _order(ctx: Context, node: Node, table: Table) -> tuple[Order, Axis] | None:
    """The order in which a map lists the slots, and the dimension of that list."""
    routing: Routing | None = table.routing
    if table.negated or table.slot is not None or table.fill != 0.0 or not table.routing.distinct or len(table.axes[1]) != 1:
        return None
    if not table.ones:
        routing = sparse_entries.kept(ctx, replace(table, axes=table.root_axes), above=None) if table.root_axes else None
    count = extent(table.axes[0])
    if routing is None or routing.valid is not None or routing.columns is not None or not routing.within(count):
        return None
    order = ctx.scratch(_Orders).of.setdefault(routing, Order(routing, node))
    rows: Axis = (slot_rows(routing)[0]._replace(size=out_length(node)),)
    if routing.whole:  # every slot has one of these experts
        settle(ctx.sizes, [out_length(node)], extent(slot_rows(routing)))
        refine(ctx.sizes, node)
        rows = slot_rows(routing)
    return order, rows


def listed(ctx: Context, node: Node, table: Table, *, as_tuple: bool) -> Many | Entries | None:
    """``torch.where(chosen.T)``, or as a matrix [slots, 2]: expert and token of each."""
    found = _order(ctx, node, table)
    if found is None:
        return None
    order, rows = found
    if as_tuple:
        return Many((Sorted((rows,), order, "ids"), Sorted((rows,), order, "token")))
    return Entries((rows, (table.axes[0][0]._replace(kind="d", index=1, size=2),)), order.routing, order, "places")


def selected(ctx: Context, node: Node, of: Any, table: Table) -> Sorted | Rows | None:
    """``of[chosen.T]``: the numbers of tokens or experts, or the entries of a table, in that order."""
    if not isinstance(of, Range | Table) or len(of.axes) != 2:
        return None
    found = _order(ctx, node, table)
    if found is None:
        return None
    order, rows = found
    if isinstance(of, Range):
        broadcast = [all(a.kind == "b" for a in axis) for axis in of.axes]
        sizes = [extent(axis) for axis in table.axes]
        what = {(True, False): "token", (False, True): "ids"}.get((broadcast[0], broadcast[1]))
        return Sorted((rows,), order, what) if what and same(of.size, sizes[1 if what == "token" else 0]) else None
    return sparse_entries.weights(node, of, order, (rows,)) if is_map(of) and not of.negated else None
