"""Experts' rows, and where they belong, collected in lists: ``torch.cat(ys)`` added to the tokens ``torch.cat(toks)`` in one go.

The rows of the experts come one expert after the other, whatever order the experts were visited in. So what lines up item by item is one
expert's rows beside the same expert's row numbers.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.operands import fits, joined, scalar
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes, extent
from moefuse.passes.ir.expr import Expr, Op
from moefuse.passes.ir.facts import Index, Listed, Part, Rows, Selection
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
