"""What a program means by ids that belong to no expert. The ops leave such slots out; where the program does not, ids are mapped first.

A mask drops them, as the ops do. Indexing counts negative ones from the end. A gather, a scatter, ``one_hot`` and ``bincount`` raise, and
so does indexing beyond the end. Slots sorted by expert and cut by counts are shifted by negative ids, which stand in front of all others
and are in no count: no layer means that, so it raises too; ``searchsorted`` gives them to expert 0. Operators of libraries that write no
rows for ids beyond the end drop them where the program puts zeros there. The table is in docs/design/facts.md.

Nothing of this is asked where the ids are known to be in range: indices of a top-k over the experts are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.infer.ranges import Interval, holds, interval
from moefuse.passes.infer.state import Context, normalize, out_shape
from moefuse.passes.ir.facts import Absent, Counts, Lost, Occurring, Routing, Rows, Sorted, View
from moefuse.passes.ir.regions import Outside, Region
from moefuse.passes.rules.routing.absent import seen
from moefuse.passes.rules.routing.counts import uncast
from moefuse.passes.rules.sums.segments import segment_of

#: operations that read or write at ids and raise for what is not there: where the ids and the dimension stand among their arguments
_RAISE = {"index_select": (2, 1), "gather": (2, 1), "take_along_dim": (1, 2), "scatter": (2, 1), "scatter_add": (2, 1), "index_add": (2, 1)}

_SEARCH = {"searchsorted", "bucketize"}

_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1


def outside(ctx: Context, region: Region) -> Outside | Lost | None:
    """What a region means by ids outside of its experts; None where that is nothing, as for the ops, or where there are none."""
    routing, count = region.routing, region.all_experts
    low, high = routing.bounds or (-1, count)
    if routing.columns is not None or (low >= 0 and high < count):
        return None
    if (product := seen(ctx, region.nodes)) is not None:
        name = ctx.calls[product].name.rpartition("::")[2]  # type: ignore[union-attr]
        return ctx.lost("ids-out-of-range", product, detail=f"`{name}` leaves rows of other ids as they are in memory")
    uses = [u for u in _raising(ctx, routing) if u[0] > low or u[1] < high]
    indexed = [] if region.parts else [i for n in region.nodes for i in _indexed(ctx, n, routing)]
    wraps = any(i[0] < 0 for i in indexed)
    if any(i[1] >= count for i in indexed):
        uses.append((low, count - 1))
    first = False
    if routing.kept is None:
        counts = [n for n in region.nodes if isinstance(ctx.facts.get(n), Counts | Occurring) and not _by_our_op(ctx, n)]
        pieces = _pieces(ctx, region)
        if region.domain == "sorted" and high >= count and _clamped(ctx, region) and not (counts and _left_out(ctx, region)):
            detail = f"those of {count} and more are clamped to the last expert, and nothing leaves their rows out"
            return ctx.lost("ids-out-of-range", region.anchor, detail=detail)
        cut = bool(pieces or (counts and region.domain == "sorted"))
        first = cut and bool(counts) and _counting(ctx, counts) <= _SEARCH and not wraps
        if cut and not first:
            if -_INT32 <= low < 0 and all(u[0] < 0 for u in uses):
                return ctx.lost("ids-out-of-range", region.anchor, detail="negative ones come first and shift the rows of all experts")
            uses.append((0, _INT32 if _cut_off(ctx, counts) else high))
        if any((call := ctx.calls[n]) is not None and call.name == "cat" for n in pieces):
            uses.append((low, count - 1))  # fewer rows than slots
    least, most = max((u[0] for u in uses), default=low), min((u[1] for u in uses), default=high)
    negative = least < 0 and low < 0
    found = Outside(wraps and negative, first and negative, least if least > low else None, most if most < high else None)
    return found if found != Outside() else None


def _raising(ctx: Context, routing: Routing) -> Iterator[Interval]:
    """The ids that everything in the graph takes that raises for others, be it the region's or not."""
    for call in ctx.calls.values():
        found = _takes(ctx, call) if call is not None else None
        if found is None or not _are_ids(ctx, found[0], routing):
            continue
        known = _numbers(ctx, found[0], routing)
        if known is not None and not (known[0] >= found[1][0] and known[1] <= found[1][1]):
            yield found[1]


def _takes(ctx: Context, call: Call) -> tuple[Node, Interval] | None:
    """(the ids, which of them do not raise) of an operation."""
    args, names = call.args, call.kwargs
    if call.name == "one_hot":
        size = names.get("num_classes", args[1] if len(args) > 1 else -1)
        return (args[0], (0, size - 1)) if isinstance(size, int) and size > 0 else None
    if call.name == "embedding":
        size = out_shape(args[1])[0] if len(args) > 1 else None
        return (args[0], (0, size - 1)) if isinstance(size, int) else None
    if call.name == "bincount":
        return args[0], (0, _INT64)
    if call.name not in _RAISE:
        return None
    at, place = _RAISE[call.name]
    index = names.get("index", names.get("indices", args[at] if len(args) > at else None))
    dim = names.get("dim", args[place] if len(args) > place else None)
    if not isinstance(index, Node) or not isinstance(dim, int) or not isinstance(args[0], Node):
        return None
    shape = out_shape(args[0])
    size = shape[normalize(dim, len(shape))] if shape else None
    return (index, (0, size - 1)) if isinstance(size, int) else None


def _are_ids(ctx: Context, value: Any, routing: Routing) -> bool:
    """Whether a tensor holds the ids of a routing, in any shape or order."""
    fact = ctx.fact(value)
    if isinstance(fact, Sorted):
        return fact.of == "ids" and fact.order.routing.node is routing.node
    return isinstance(fact, View) and fact.root is routing.node


def _indexed(ctx: Context, node: Node, routing: Routing) -> list[Interval]:
    """The numbers by which ``W[ids]`` indexes."""
    call = ctx.calls[node]
    if call is None or call.name != "getitem":
        return []
    items = call.args[1] if isinstance(call.args[1], tuple | list) else (call.args[1],)
    found = [_numbers(ctx, i, routing) for i in items if isinstance(i, Node) and tensor(i) is not None and _are_ids(ctx, i, routing)]
    return [i for i in found if i is not None]


def _numbers(ctx: Context, ids: Node, routing: Routing) -> Interval | None:
    """What ids can be; sentinels that were clamped in place no longer are."""
    found, bounds = interval(ctx, ids), ctx.sentinels.get(routing)
    in_place = found is not None and bounds and isinstance(ctx.facts.get(ids), Sorted) and ctx.storage[ids] in ctx.writes
    return (found[0], min(found[1], min(bounds) - 1)) if in_place and found is not None and bounds else found


def _pieces(ctx: Context, region: Region) -> list[Node]:
    """What puts pieces of the sorted slots to where they belong."""
    ordered = [p.node for p in region.parts if segment_of(p.rows) is not None]
    return [*ordered, *(n for n in region.nodes if any(segment_of(p.rows) is not None for p in ctx.segments.get(n, ())))]


def _left_out(ctx: Context, region: Region) -> bool:
    """Whether the rows of sentinels are set to zero."""
    masked = (n for n in region.nodes if any(isinstance(ctx.facts.get(i), Absent) for i in n.all_input_nodes))
    return any(isinstance(ctx.facts.get(n), Rows) for n in masked)


def _by_our_op(ctx: Context, node: Node) -> bool:
    """Whether the program asked ``moefuse::permute`` where experts' rows begin: it leaves out what belongs to no expert."""
    return any((call := ctx.calls[n]) is not None and call.name == "moefuse::permute" for n in node.all_input_nodes)


def _counting(ctx: Context, nodes: list[Node]) -> set[str]:
    """The operations that count, or search."""
    first = [n for n in nodes if not any(isinstance(ctx.facts.get(i), Counts | Occurring) for i in n.all_input_nodes)]
    return {call.name for n in first if (call := ctx.calls[n]) is not None}


def _cut_off(ctx: Context, nodes: list[Node]) -> bool:
    """Whether ids are counted as 32 bits of themselves that may not be all."""
    for node in nodes:
        call = ctx.calls[node]
        given = call.args[0] if call is not None and call.name in ("histc", "bincount") else None
        ids, dtypes = uncast(ctx, given) if isinstance(given, Node) else (None, [])
        known = interval(ctx, ids)
        if known is not None and any(not dtype.is_floating_point and not holds(dtype, known) for dtype in dtypes):
            return True
    return False


def _clamped(ctx: Context, region: Region) -> bool:
    """Whether sorted ids were clamped on the way to a weight."""
    calls = [ctx.calls[n] for n in region.nodes if isinstance(ctx.facts.get(n), Sorted)]
    return any(call is not None and call.name == "clamp" for call in calls)


def placed(emit: Emitter, ids: Node, means: Outside, bounds: Interval | None, count: int) -> Node:
    """The ids as the ops take them: one pointwise kernel. What raises is the bounds check of an index, which waits for no device."""
    value, (lowest, highest) = fake(ids), bounds or (-1, count)
    if means.wraps and means.high is None and lowest >= -count and highest < count:
        return emit(torch.where, emit(torch.lt, ids, 0), emit(torch.add, ids, count), ids)
    if means.wraps:
        return emit(operator.getitem, emit(torch.arange, count, dtype=value.dtype, device=value.device), ids)
    if means.first:
        ids = emit(torch.clamp, ids, min=0)
    if means.low is None and means.high is None:
        return ids
    low = 0 if means.first else -1 if means.low is None else means.low
    high = count if means.high is None or means.high > count else means.high
    if means.low is None:
        ids = emit(torch.clamp, ids, min=low)
    if means.high is not None and means.high > high:
        ids = emit(torch.where, emit(torch.gt, ids, means.high), low - 1, ids)
    if means.high is None or means.high > high:
        ids = emit(torch.clamp, ids, max=high)
    table = emit(torch.arange, low, high + 1, dtype=value.dtype, device=value.device)
    at = emit(torch.Tensor.to, ids if low == 0 else emit(torch.sub, ids, low), torch.int64)
    if means.low is not None:  # Inductor of torch 2.11 lets a gather count from the end
        at = emit(torch.where, emit(torch.lt, at, 0), high + 1 - low, at)
    return emit(torch.Tensor.reshape_as, emit(torch.gather, table, 0, emit(torch.reshape, at, (-1,))), ids)


__all__ = ["outside", "placed"]
