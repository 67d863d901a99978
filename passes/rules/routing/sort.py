"""Sorting slots by expert: the order, its tokens, its inverse, and where each expert's slots end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, as_size
from moefuse.passes.ir.axes import Atom, Axis, atoms
from moefuse.passes.ir.facts import Absent, Entries, Finding, Index, Many, Order, Range, Routing, Sorted, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import sparse_entries
from moefuse.passes.rules.routing.ids import is_integer, role_axes


@rule("sort", "argsort", shown=("stable",))
def on_sort(ctx: Context, node: Node, x: Node, *, dim: int = -1, descending: bool = False) -> Finding:
    """Sorting the flattened ids; ``argsort`` of the order is its inverse."""
    only_order = ctx.calls[node].name == "argsort"  # type: ignore[union-attr]
    if descending:
        return None
    fact = ctx.fact(x)
    if isinstance(fact, Entries):
        return None if only_order else sparse_entries.sort(node, fact, dim)
    if isinstance(fact, Sorted) and fact.of == "slot":
        inverse = replace(fact, of="inverse")
        return inverse if only_order else Many((None, inverse))
    if not isinstance(fact, View) or not is_integer(x) or len(fact.axes) != 1:
        return None
    routing = routing_of(ctx, fact)
    if routing is None or not all_slots(fact, routing):
        return None
    rows = (slot_rows(routing),)
    order = Order(routing, node)
    slot = Sorted(rows, order, "slot")
    return slot if only_order else Many((Sorted(rows, order, "ids"), slot))


def all_slots(view: View, routing: Routing) -> bool:
    """Whether a view of the ids goes through them token by token."""
    axes = role_axes(view, routing)
    if axes is None:
        return False
    names = [a.kind for a in atoms(axes) if not same(a.size, 1)]
    return names == sorted(names, key="tk".index)


def slot_rows(routing: Routing) -> Axis:
    return (Atom("r", 0, routing.num_tokens * routing.top_k),)


@rule("floor_divide")
def on_floor_divide(ctx: Context, node: Node, x: Node, other: Any) -> Finding:
    fact = ctx.fact(x)
    if isinstance(fact, Range):
        return None
    if isinstance(fact, Index) and fact.of == "flat":
        size = as_size(other)
        return replace(fact, of="token") if size is not None and same(size, fact.selection.routing.top_k) else None
    if not isinstance(fact, Sorted) or fact.of != "slot":
        return None
    size = as_size(other)
    return replace(fact, of="token") if size is not None and same(size, fact.order.routing.top_k) else None


def beyond(fact: Sorted, name: str, bound: Any) -> Absent | None:
    """``sorted_ids >= E``: slots that no expert here serves."""
    if fact.of != "ids" or name not in ("ge", "gt") or not isinstance(bound, int) or isinstance(bound, bool):
        return None
    return Absent(fact.axes, fact.order.routing, bound + (name == "gt"))


def on_div(ctx: Context, node: Node, x: Any, other: Any, rounding_mode: str | None) -> Finding:
    """``div`` with rounding, for pointwise.py."""
    return on_floor_divide(ctx, node, x, other) if rounding_mode in ("floor", "trunc") else None


def assign_inverse(ctx: Context, node: Node, target: Node, index: Any, value: Any) -> Finding:
    """``inverse[perm] = arange(S)``."""
    source = ctx.fact(value)
    full = (
        isinstance(source, Range)
        and len(source.axes) == 1
        and same(source.size, index.order.routing.num_tokens * index.order.routing.top_k)
    )
    return Sorted(index.axes, index.order, "inverse") if full and isinstance(index, Sorted) and index.of == "slot" else None
