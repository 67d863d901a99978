"""Experts' rows, and where they belong, collected in lists: ``torch.cat(ys)`` added to the tokens ``torch.cat(toks)`` in one go.

The rows of the experts come one expert after the other, whatever order the experts were visited in. So what lines up item by item is one
expert's rows beside the same expert's row numbers. ``x[torch.cat(toks)].split([len(t) for t in toks])`` takes them apart again.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.infer.operands import fits, joined, scalar
from moefuse.passes.infer.state import Context, as_size, out_shape
from moefuse.passes.ir.axes import Atom, Axes, extent
from moefuse.passes.ir.expr import Expr, Op
from moefuse.passes.ir.facts import Finding, Index, Listed, Lost, Many, Part, RowNumber, Rows, Selection, Span
from moefuse.passes.rules.routing.offsets import bound
from moefuse.passes.rules.rows.leaves import row_domain


def listed(ctx: Context, node: Node, tensors: Any, facts: list[Any], dim: Any) -> Listed | None:
    """``cat`` of several experts' rows, or of their row numbers; None if it is anything else."""
    chosen = [_selection(f) for f in facts]
    if dim != 0 or len(facts) < 2 or None in chosen or len({type(f) for f in facts}) != 1:
        return None
    if any(_rest(f) != _rest(facts[0]) or [a.kind for a in f.axes[0]] != ["r"] for f in facts):
        return None
    # An expert without tokens adds nothing: capture may leave its rows out.
    ctx.segments[node] = tuple(Part(_as_rows(f), t) for f, t in zip(facts, tensors, strict=True))
    rows = Atom("r", 0, out_shape(node)[0])
    return Listed(((rows,), *facts[0].axes[1:]), tuple(facts))


def _selection(fact: Any) -> Selection | None:
    if isinstance(fact, Index):
        return fact.selection
    return fact.domain.selection if isinstance(fact, Rows) and fact.axes else None


def _as_rows(fact: Rows | Index) -> Rows:
    """The rows that row numbers are of."""
    return fact if isinstance(fact, Rows) else Rows(fact.axes, row_domain(fact.selection), Expr(fact.selection.routing.node))


def _rest(fact: Any) -> list[tuple[str, Any]]:
    """What the dimensions behind the rows are."""
    return [("".join(a.kind for a in axis if not same(a.size, 1)), extent(axis)) for axis in fact.axes[1:]]


def items(fact: Listed) -> list[Any]:
    """Each expert's own, with its rows where the list has them."""
    return [item.with_axes(_own(fact.axes, item.axes[0][0])) for item in fact.items]


def _own(axes: Axes, rows: Atom) -> Axes:
    return tuple(tuple(rows if a.kind == "r" else a for a in axis) for axis in axes)


def as_list(node: Node, like: Listed, found: list[Any]) -> Listed | None:
    """What was found for each item of a list, as a list as long; None if it is not of one kind."""
    if any(_selection(f) is None or type(f) is not type(found[0]) or _rest(f) != _rest(found[0]) for f in found):
        return None
    whole = _own(found[0].axes, Atom("r", 0, out_shape(node)[0]))
    own = (f.with_axes(_own(f.axes, item.axes[0][0])) for f, item in zip(found, like.items, strict=True))
    return Listed(whole, tuple(own))


def of_sizes(ctx: Context, node: Node, fact: Listed, sizes: Any) -> Many | Lost | None:
    """``xs.split([len(t) for t in toks])``: the items again."""
    values, own = fake(node), items(fact)
    if not isinstance(values, tuple | list) or len(sizes) != len(own) or not all(map(_is_length, [ctx] * len(own), own, sizes)):
        return _unknown(ctx, node, fact)
    return Many(tuple(item.with_axes(_own(item.axes, Atom("r", 0, shape_of(v)[0]))) for item, v in zip(own, values, strict=True)))


def of_bounds(ctx: Context, node: Node, fact: Listed, start: Any, stop: Any) -> Finding:
    """``xs[start:stop]``, where the experts stand in order."""
    low, high = bound(ctx, start), bound(ctx, stop) if stop is not None else None
    if low is None or high is None or high[0] is None or high[1] != low[1] + 1 or low[0] not in (None, high[0]):
        return _unknown(ctx, node, fact)
    before = fact.items[: high[1]]
    if len(before) < high[1] or not all(_has_slots(item, Span((), high[0], e, e + 1)) for e, item in enumerate(before)):
        return _unknown(ctx, node, fact)
    item: Rows | Index = items(fact)[low[1]]
    return item.with_axes(_own(item.axes, Atom("r", 0, out_shape(node)[0])))


def _is_length(ctx: Context, item: Rows | Index, size: Any) -> bool:
    """Whether a number is how many rows an item of a list has."""
    known, number = as_size(size) if isinstance(size, Node) else None, ctx.fact(size)
    return (known is not None and same(known, extent(item.axes[0]))) or (isinstance(number, Span) and _has_slots(item, number))


def _has_slots(item: Rows | Index, number: Span) -> bool:
    """Whether a number of slots is that of an item's expert, which has a row for each of them."""
    chosen = _selection(item)
    if chosen is None or chosen.routing is not number.routing or isinstance(chosen.expert, RowNumber):
        return False
    # A token with one expert twice has two slots of it and one row.
    by_slot = chosen.slot is None and (not chosen.by_token or chosen.routing.distinct)
    return by_slot and (number.start, number.stop) == (chosen.expert, chosen.expert + 1)


def _unknown(ctx: Context, node: Node, fact: Listed) -> Lost | None:
    text = "the rows are cut where no expert's rows are known to end"
    return ctx.lost("tokens-differ", node, detail=text) if isinstance(fact.items[0], Rows) else None


def product(node: Node, name: str, a: Any, b: Any) -> Listed | None:
    """A list times (or divided by) another of the same experts in the same order, or a number."""
    rank = len(out_shape(node))
    lists = [items(f) if isinstance(f, Listed) else None for f in (a, b)]
    first = next(found for found in lists if found is not None)
    made: list[Rows] = []
    for i, own in enumerate(first):
        pair = [found[i] if found is not None and i < len(found) else f for found, f in zip(lists, (a, b), strict=True)]
        rows = [p for p in pair if isinstance(p, Rows)]
        if not all(isinstance(p, Rows) or scalar(p) for p in pair) or any(not r.domain.same(own.domain) for r in rows):
            return None
        axes = joined([r.axes for r in rows], rank)
        if not all(fits(axes, (*((),) * (rank - len(r.axes)), *r.axes)) for r in rows):
            return None
        args = tuple(p.expr if isinstance(p, Rows) else p for p in pair)
        made.append(Rows(axes, own.domain, Op(node, name, args)))
    if any(found is not None and len(found) != len(first) for found in lists):
        return None
    whole = joined([f.axes for f in (a, b) if isinstance(f, Listed)], rank)
    return Listed(whole, tuple(made))
