"""Boolean masks as broad as what they select from: ``x.masked_select(mask[:, None])`` lists features one by one, ``masked_scatter`` puts
them back in the same order. With a mask over the rows of one expert that is ``x[mask]`` and ``out[mask] = rows``, seen flat.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.sizes import Size, product, same
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Axes, atoms, extent
from moefuse.passes.ir.facts import Buffer, Fact, Mask, Rows, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.masks import selection
from moefuse.passes.rules.rows.advanced_index import by_any_mask, tokens_together
from moefuse.passes.rules.sums.assign import put
from moefuse.passes.rules.sums.scatter_by_expert import fill_slots


@rule("masked_select")
def on_masked_select(ctx: Context, node: Node, x: Node, mask: Node) -> Any:
    """``x.masked_select(mask[:, None])``, ``weights.masked_select(mask)``."""
    where = ctx.fact(mask)
    return by_wide_mask(ctx, node, x, where) if isinstance(where, Mask | Table) else None


@rule("masked_scatter")
def on_masked_scatter(ctx: Context, node: Node, target: Node, mask: Node, source: Node) -> Any:
    """``zeros.masked_scatter(mask[:, None], rows)``: an expert's rows where they came from."""
    where, rows, shape = ctx.fact(mask), ctx.fact(source), out_shape(target)
    narrow = by_rows_of(where, shape) if isinstance(where, Mask | Table) else None
    if narrow is None or not isinstance(rows, Rows | Buffer):
        return None
    if not _in_order(rows, product(shape[len(narrow.axes) :])):
        return ctx.lost("tokens-differ", node, detail="an expert's rows are not put back as they stand")
    filled = fill_slots(ctx, node, target, [narrow], source)
    if filled is not None:
        return filled
    found = selection(narrow, tokens_together(narrow.axes)[1])
    if found is None or found[1] != ("token",):
        return None
    elsewhere = ctx.lost("tokens-differ", node, detail="an expert's rows are not put where they were taken from")
    return put(ctx, node, target, found[0], rows) or elsewhere


def by_wide_mask(ctx: Context, node: Node, x: Node, mask: Mask | Table) -> Any:
    """``x.masked_select(mask[:, None])``: the features of an expert's tokens, one row behind the other."""
    narrow, base = by_rows_of(mask, out_shape(x)), ctx.fact(x)
    if narrow is None or not isinstance(base, Fact):
        return None
    rank = len(narrow.axes)
    found = by_any_mask(ctx, node, x, base, narrow, [])
    if not isinstance(found, Rows | Buffer):
        return found
    rows = found.axes[0][0]._replace(size=out_shape(node)[0] / product(out_shape(x)[rank:]))
    features = (a._replace(kind="f", index=0) for a in atoms(base.axes[rank:]) if not same(a.size, 1))
    return found.with_axes(((rows, *features),))


def by_rows_of(mask: Mask | Table, shape: tuple[Size, ...]) -> Any:
    """A mask that is broadcast over the features of a tensor, without them; None if it is not as long as the tensor's other dimensions."""
    last = max((i for i, axis in enumerate(mask.axes) if any(a.kind != "b" for a in axis)), default=-1)
    lead: Axes = mask.axes[: last + 1]
    fits = len(mask.axes) == len(shape) and all(same(extent(axis), s) for axis, s in zip(lead, shape, strict=False))
    return mask.with_axes(lead) if lead and fits else None


def _in_order(rows: Rows | Buffer, width: Size) -> bool:
    """Whether the elements come row by row, ``width`` of each."""
    flat = atoms(rows.axes)
    if [a.kind for a in flat] != ["r", *["f"] * (len(flat) - 1)]:
        return False
    features = [a.index for a in flat[1:]]
    return features == sorted(features) and same(extent(flat[1:]), width)
