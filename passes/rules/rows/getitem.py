"""``x[...]``: which of it is basic indexing, and which is indexing by tensors."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.facts import Combined, Fact, Finding, Many, Sum
from moefuse.passes.rules import rule
from moefuse.passes.rules.rows.advanced_index import by_tensor
from moefuse.passes.rules.rows.index import basic, up_to_last, without_features


@rule("getitem")
def on_getitem(ctx: Context, node: Node, x: Any, index: Any) -> Finding:
    known = ctx.facts.get(x) if isinstance(x, Node) else None
    if isinstance(known, Many):
        return known.items[index] if isinstance(index, int) and -len(known.items) <= index < len(known.items) else None
    if not isinstance(x, Node) or tensor(x) is None:
        return None
    given = index if isinstance(index, tuple) else (index,)
    among = any(isinstance(i, Node) and ctx.number(i) is None and (t := tensor(i)) is not None and t.dim() for i in given)
    items = [_known(ctx, i, among) for i in given]
    tensors = [i for i in items if isinstance(i, Node) and tensor(i) is not None]
    if tensors:
        return by_tensor(ctx, node, x, without_features(ctx, up_to_last(items, len(out_shape(x))), out_shape(x)))
    if any(isinstance(i, list | Node | bool) for i in items):
        return None
    fact = ctx.fact(x)
    return basic(ctx, node, x, fact, items) if isinstance(fact, Fact) and not isinstance(fact, Sum | Combined) else None


def _known(ctx: Context, item: Any, among: bool) -> Any:
    """An index tensor of one element whose value is known, as the constant index that takes the same.

    ``among``: other index tensors are beside it, with whose elements its one is broadcast.
    """
    at = ctx.number(item)
    if at is None:
        return item
    if among:
        return at if tensor(item).dim() < 2 else item  # type: ignore[union-attr]
    # Counted from the front: a slice of -1 would end at 0.
    return at if tensor(item).dim() == 0 else slice(at, at + 1) if at >= 0 else item  # type: ignore[union-attr]
