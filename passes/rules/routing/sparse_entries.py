"""The entries of a routing table that are not zero, listed: ``nonzero(gates)``, sorted by expert, as sparse dispatchers do it.

A chosen expert whose weight is zero is not in such a list. So the list is of another routing: the same ids, without the slots whose entry
of the table is zero (``Routing.kept``). The dispatcher is that of tensor2tensor (Shazeer et al., arXiv:1701.06538, appendix A) and its
translations to PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import KEEPS_SIGN, NEVER_NEGATIVE
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, fresh
from moefuse.passes.ir.expr import Gate
from moefuse.passes.ir.facts import Domain, Entries, Many, Mask, Order, Picked, Routing, Rows, Sorted, Table, View
from moefuse.passes.rules.routing.ids import is_slot_weight


@dataclass
class _Kept:
    """Routings of the entries of a table, by their ids, by table, and by what the entries are above."""

    of: dict[Any, Routing] = field(default_factory=dict)

    def one(self, routing: Routing) -> Routing:
        """The one object for routings that are equal."""
        tokens = tuple(map(str, routing.tokens))
        return self.of.setdefault((routing.node, tokens, routing.kept, routing.above, routing.by_slot), routing)


def kept(ctx: Context, found: Mask | Table, *, above: float | None) -> Routing | None:
    """The routing of the entries of a table (or of the one that a column is of) that are not zero, or above a number; one for each."""
    old = found.routing
    if found.negated or not old.whole:
        return None
    weight = found.weight if isinstance(found, Mask) else found.slots
    by_slot = isinstance(found, Mask) or found.slot is not None or found.root is None
    if by_slot:
        node = weight.root if weight is not None and is_slot_weight(weight, old) else None
    else:
        node = found.root if isinstance(found, Table) and _whole_table(found) else None
    apart = old.distinct or isinstance(found, Mask) or found.slot is not None  # no two slots of a token have the expert
    if node is None or not apart or (isinstance(found, Table) and found.fill != 0.0):
        return None
    return ctx.scratch(_Kept).one(replace(old, kept=node, above=above, by_slot=by_slot))


def of_table(ctx: Context, old: Routing, table: View, *, above: float) -> Routing | None:
    """The routing of the slots whose expert has more than a number in a plain table [tokens, E] of scores."""
    whole = shape_of(tensor(table.root))  # type: ignore[arg-type]
    plain = table.axes == fresh(whole) and len(old.tokens) == 1 and len(whole) == 2 and same(whole[0], old.num_tokens)
    if not plain or not old.whole or not old.distinct or not isinstance(whole[1], int) or not old.within(whole[1]):
        return None
    return ctx.scratch(_Kept).one(replace(old, kept=table.root, above=above, by_slot=False))


def _whole_table(table: Table) -> bool:
    """Whether the table that a column is of, or that it is, is [tokens, E], or [batch, sequence, E] of as many dimensions as ids have."""
    *lead, last = table.axes if table.expert is None else table.root_axes
    tokens = [a.index for axis in lead for a in axis if a.kind == "t"]
    plain = all({a.kind for a in axis} == {"t"} for axis in lead) and {a.kind for a in last} == {"e"}
    return plain and len(lead) == len(table.routing.tokens) and tokens == sorted(tokens)


def compared(ctx: Context, node: Node, found: Mask | Table, *, above: float | None) -> Mask | Table | None:
    """``gates > 0``, ``gates != 0``, ``gates[:, e] > 1e-6``, ``weights * (ids == e) > 0``: who is still chosen."""
    routing = kept(ctx, found, above=above)
    if routing is None:
        return None
    if isinstance(found, Mask):
        return replace(found, routing=routing, weight=None)
    whole = found.expert is None
    return replace(found, routing=routing, root=node if whole else None, root_axes=found.axes if whole else (), slots=None, ones=True)


def above(values: Any, name: str, bound: Any) -> float | None:
    """The number that a value has to be above where ``values > bound`` or ``values >= bound`` holds, which zero does not."""
    known = tensor(values)
    if not isinstance(bound, int | float) or isinstance(bound, bool) or not 0 <= bound < math.inf or known is None:
        return None
    if name == "gt":
        return float(bound)
    # The next lower number. What a bound in 16 bits is rounded to depends on who compares.
    if name != "ge" or known.dtype not in (torch.float32, torch.float64):
        return None
    least = torch.tensor(float(bound), dtype=known.dtype, device="cpu")
    return float(torch.nextafter(least, torch.zeros_like(least))) if 0 < least < math.inf else None


def counted(ctx: Context, routing: Routing) -> Routing:
    """The routing whose slots ``(gates > 0).sum(0)`` counts: all that are not zero, if none is less."""
    if routing.kept is None or routing.above != 0 or not never_negative(ctx, routing.kept):
        return routing
    return ctx.scratch(_Kept).one(replace(routing, above=None))


def never_negative(ctx: Context, value: Any) -> bool:
    """Whether what a value is computed from says that it is not below zero."""
    if isinstance(value, bool | int | float):
        return value >= 0
    call = ctx.calls.get(value) if isinstance(value, Node) and ctx.storage[value] not in ctx.writes else None
    if call is None or call.kwargs.get("out") is not None:
        return False
    if call.name in NEVER_NEGATIVE:
        return True
    if call.name in ("scatter", "scatter_add"):
        return len(call.args) == 4 and not call.kwargs and never_negative(ctx, call.args[0]) and never_negative(ctx, call.args[3])
    count = KEEPS_SIGN.get(call.name, 0)
    return 0 < count <= len(call.args) and "alpha" not in call.kwargs and all(never_negative(ctx, a) for a in call.args[:count])


def listed(ctx: Context, node: Node, table: Table) -> Entries | None:
    """``nonzero(gates)``: [entries, 2], token and expert."""
    routing = None if table.ones else kept(ctx, table, above=None)
    return None if routing is None else Entries((_rows(node), (Atom("d", 1, 2),)), routing)


def sort(node: Node, fact: Entries, dim: Any) -> Many | None:
    """``entries.sort(0)``: each column by itself, the experts among them."""
    if fact.order is not None or not isinstance(dim, int) or normalize(dim, 2) != 0:
        return None
    order = Order(fact.routing, node)
    return Many((replace(fact, order=order, of="ids"), replace(fact, order=order, of="entry")))


def column(fact: Entries, axes: Axes, at: int) -> Sorted | None:
    """One column of what a sort gave; only the experts are told apart by it."""
    if fact.of == "places":
        return Sorted(axes, fact.order, "ids" if at in (0, -2) else "token") if fact.order is not None else None
    return Sorted(axes, fact.order, fact.of) if fact.order is not None and at in (1, -1) else None


def taken(node: Node, base: Entries, index: Sorted, tail: list[Any]) -> Sorted | None:
    """``entries[order, 0]``: the token of each entry, by expert."""
    if index.of != "entry" or base.order is not None or base.routing is not index.order.routing or tail not in ([0], [1]):
        return None
    return Sorted((_rows(node),), index.order, "token" if tail == [0] else "ids")


def rows_of_table(node: Node, base: Table, index: Sorted, tail: list[Any]) -> Picked | Rows | None:
    """``gates[tokens]``, and ``gates[tokens, ids]`` at once."""
    if base.root is None or not _is_of(base, index.order) or index.of != "token":
        return None
    if not tail:
        return Picked((_rows(node), base.axes[1]), base.root, index.order)
    ids = tail[0]
    here = len(tail) == 1 and isinstance(ids, Sorted) and ids.of == "ids" and ids.order is index.order
    return _weights(node, base.root, index.order, (_rows(node),)) if here else None


def gathered(node: Node, base: Picked, dim: int, index: Any) -> Rows | None:
    """``gather(gates[tokens], 1, ids)``: the weight of each entry."""
    here = isinstance(index, Sorted) and index.of == "ids" and index.order is base.order and len(index.axes) == 2 and not index.axes[1]
    return _weights(node, base.root, base.order, (_rows(node), ())) if here and normalize(dim, 2) == 1 else None


def weights(node: Node, base: Table, order: Order, axes: Axes) -> Rows | None:
    """The entries of a table where an order has slots."""
    return _weights(node, base.root, order, axes) if base.root is not None and _is_of(base, order) else None


def _is_of(base: Table, order: Order) -> bool:
    """Whether an order goes through the entries of a table: those that are not zero, or all of the same ids."""
    if order.routing.kept is not None or base.slot is not None:
        return base.root is order.routing.kept
    return base.routing is order.routing and [{a.kind for a in axis} for axis in base.root_axes] == [{"t"}, {"e"}]


def _weights(node: Node, table: Node, order: Order, axes: Axes) -> Rows:
    return Rows(axes, Domain("sorted", order.routing, order=order), Gate(node, table, False, False, None))


def _rows(node: Node) -> Axis:
    """The entries, as many as Dynamo says."""
    return (Atom("r", 0, out_shape(node)[0]),)
