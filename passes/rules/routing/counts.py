"""How many slots each expert has, and where its segment ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import CASTS, COPIES, RESHAPES, TURNS
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.ranges import holds, interval
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.infer.symbolic_sizes import refine, settle
from moefuse.passes.ir.axes import Atom, atoms, extent
from moefuse.passes.ir.facts import Column, Counts, Finding, Many, Occurring, Present, Range, Routing, Sorted, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.ids import all_of_them, is_integer, out_length, role_axes
from moefuse.passes.rules.routing.masks import counted
from moefuse.passes.rules.routing.offsets import exact

_SAME_NUMBERS = CASTS | COPIES | RESHAPES | TURNS | {"t"}


@rule("bincount", "histc")
def on_count(
    ctx: Context,
    node: Node,
    x: Node,
    *,
    weights: Any = None,
    minlength: Any = 0,
    bins: Any = 100,
    min: Any = 0,  # noqa: A002  (so torch.histc calls them)
    max: Any = 0,  # noqa: A002
) -> Finding:
    if ctx.calls[node].name == "bincount":  # type: ignore[union-attr]
        return counts_of(ctx, node, x, minlength) if weights is None else None
    if min != 0 or not isinstance(bins, int) or max not in (bins - 1, bins):
        return None
    return counts_of(ctx, node, x, bins, closed=max == bins)


def counts_of(ctx: Context, node: Node, x: Node, bins: Any, *, closed: bool = False) -> Finding:
    """How often each id is there. ``closed``: the last bin has its right end, too: an id that no expert has."""
    x, dtypes = uncast(ctx, x)
    routing = _all_ids(ctx, x)
    if routing is None or not isinstance(bins, int) or not all(_as_they_are(ctx, x, dtype, bins) for dtype in dtypes):
        return None
    if closed and not routing.within(bins):
        return None
    choices = routing.choices
    if choices is not None and bins < choices and ctx.calls[node].name == "bincount":  # type: ignore[union-attr]
        return Occurring(((Atom("e", 0, out_shape(node)[0]),),), routing, ends=False, count=choices)
    if bins == 0:
        return None
    if isinstance(choices, int) and choices <= bins:
        settle(ctx.sizes, list(out_shape(node)), bins)
        refine(ctx.sizes, node)
    return counted(node, ((Atom("e", 0, bins),),), routing)


def _all_ids(ctx: Context, x: Node) -> Routing | None:
    """The routing of which a tensor has every id once, in any order."""
    fact = ctx.fact(x)
    if isinstance(fact, Sorted):
        return fact.order.routing if fact.of == "ids" else None
    routing = routing_of(ctx, fact) if isinstance(fact, View) and is_integer(x) else None
    return routing if routing is not None and all_of_them(role_axes(fact, routing), routing) else None


def _of_slot(ctx: Context, column: Column) -> Routing | None:
    """The routing of which a tensor has the ids of one slot, of every token."""
    routing = routing_of(ctx, column.base)
    return routing if routing is not None and same(extent(atoms(column.axes)), routing.num_tokens) else None


@rule("unique", "unique_consecutive", shown=("sorted",))
def on_unique(ctx: Context, node: Node, ids: Node, *, return_counts: bool = False) -> Finding:
    """``ids.unique()``, where the ids are known to be below some number; of sorted ids also those that differ from the one before."""
    if ctx.calls[node].name == "unique_consecutive" and not isinstance(ctx.fact(ids), Sorted):  # type: ignore[union-attr]
        return None
    column = ctx.fact(ids)
    slot = column.slot if isinstance(column, Column) and is_integer(ids) else None
    routing = _all_ids(ctx, ids) if slot is None else _of_slot(ctx, column)
    count = routing.choices if routing is not None else None
    if routing is None or not isinstance(count, int):
        return None
    # Of numbers that belong to whoever occurs nobody knows whose the first one is.
    found = Present(((Atom("r", 0, out_length(node)),),), routing, count, slot)
    return Many((found, None)) if return_counts else found


def uncast(ctx: Context, x: Node) -> tuple[Node, list[torch.dtype]]:
    """The ids that are counted in another dtype (``histc`` takes no integers on a CPU), and the dtypes that they went through."""
    dtypes: list[torch.dtype] = []
    while (call := ctx.calls.get(x)) is not None and call.args and ctx.storage[x] not in ctx.writes:
        source, mine, theirs = call.args[0], tensor(x), tensor(call.args[0])
        if mine is None or theirs is None or (is_integer(x) and not (call.name == "to" and is_integer(source))):
            break
        if call.name not in (CASTS if mine.dtype != theirs.dtype else _SAME_NUMBERS):
            break
        dtypes.append(mine.dtype)
        x = source
        if is_integer(x):
            break
    return x, dtypes


def _as_they_are(ctx: Context, ids: Node, dtype: torch.dtype, bins: int) -> bool:
    """Whether ids are counted as themselves. (What is outside of the bins stays there if it is rounded; for 32 bits see ids_outside.py.)"""
    known = interval(ctx, ids)
    rounds = dtype.is_floating_point or dtype == torch.int32
    return holds(dtype, (0, bins)) if rounds else known is not None and holds(dtype, known)


def running(ctx: Context, node: Node, x: Node, dim: int | None) -> Finding:
    """The running sum of counts: where the segments of experts end."""
    fact = ctx.fact(x)
    if not isinstance(fact, Counts | Occurring) or (dim is None and len(fact.axes) > 1):
        return None
    if [a.kind for a in fact.axes[normalize(dim or 0, len(fact.axes))]] != ["e"]:
        return None
    return replace(fact, ends=True) if not fact.ends and exact(node, fact.routing) else None


@rule("searchsorted", "bucketize", shown=("out_int32",))
def on_searchsorted(ctx: Context, node: Node, a: Node, b: Node, *, right: bool = False, side: str | None = None) -> Finding:
    """Where each expert's sorted slots end: ``searchsorted(sorted_ids, arange(E), right=True)``; without ``right``, where they begin."""
    first, second = (a, b) if ctx.calls[node].name == "searchsorted" else (b, a)  # type: ignore[union-attr]
    ids, values = ctx.fact(first), ctx.fact(second)
    behind = right or side == "right"
    if not isinstance(ids, Sorted) or ids.of != "ids" or not isinstance(values, Range):
        return None
    # What is below 0 lies in front of the first expert then, as if it were another one.
    if not behind and not (isinstance(values.size, int) and ids.order.routing.within(values.size)):
        return None
    return Counts(((Atom("e", 0, values.size),),), ids.order.routing, ends=True, first=1 if behind else 0)
