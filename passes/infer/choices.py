"""Ids as the places of the best scores: what a top-k, a sort or an argmax says of its indices."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.op_classes import BINARY, INDICES_ALONG, SCORES, UNARY, VALUES_AND_INDICES
from moefuse.passes.graph.sizes import same_shape
from moefuse.passes.infer.state import Context, out_shape

_STAYS = SCORES | frozenset((*UNARY, *BINARY, "masked_fill", "where"))
"""What gives each score a value where it stands."""


def from_topk(ctx: Context, node: Node) -> bool:
    """Whether ids are the indices of a top-k or of a part of a sorted dimension, and so distinct within a token."""
    call = _chosen_by(ctx, node)
    return call is not None and call.name in ("topk", "sort", "argsort") and _last_dim(call)


def one_for_each(ctx: Context, node: Node) -> bool:
    """Whether ids are the best of the scores that a projection gives each [..., features] row: then all their dimensions count tokens.

    (Behind a reshape of the projection the last one may count heads, each with a choice of its own.)
    """
    call = _chosen_by(ctx, node)
    if call is None or call.name not in ("argmax", "argmin", "max", "min") or not _last_dim(call):
        return False
    place = 2  # of keepdim among the arguments
    if call.kwargs.get("keepdim", len(call.args) > place and call.args[place]):
        return False
    return _projected(ctx, call.args[0])


def above(ctx: Context, node: Node) -> int | None:
    """Of how many probabilities a comparison with a number chooses some, one of them or all at once; None for any other operation.

    How many it chooses, only the run knows.
    """
    call = ctx.calls.get(node)
    shape: tuple[Any, ...] = ()
    if call is None or call.name not in ("gt", "ge") or len(call.args) != 2 or not isinstance(call.args[1], int | float):
        return None
    while call is not None and call.args and call.name in ("gt", "ge", "getitem", "select", "unbind") and isinstance(call.args[0], Node):
        shape, call = out_shape(call.args[0]), ctx.calls.get(call.args[0])
    known = call is not None and call.name in ("softmax", "sigmoid") and len(shape) > 1
    return shape[-1] if known and isinstance(shape[-1], int) and shape[-1] > 1 else None


def _projected(ctx: Context, scores: Node) -> bool:
    """Whether scores are a projection's, with a bias, noise or the like on them: whatever is done to each leaves it in its place."""
    stack, seen = [scores], {scores}
    while stack:
        node = stack.pop()
        call = ctx.calls.get(node)
        if call is not None and call.name == "linear":
            return True
        if call is None or call.inplace or call.name not in _STAYS:
            continue
        more = [a for a in node.all_input_nodes if a not in seen and same_shape(out_shape(a), out_shape(scores))]
        seen.update(more)
        stack += more
    return False


def positions(ctx: Context, node: Node) -> int | None:
    """How many positions indices choose among: each is from 0 to one less than that."""
    call = _chosen_by(ctx, node)
    scores = tensor(call.args[0]) if call is not None and call.args else None
    dim = dim_of(call) if call is not None else None
    if scores is None or not isinstance(dim, int) or not scores.dim():
        return None
    size = scores.shape[dim]
    return size if isinstance(size, int) else None


def _chosen_by(ctx: Context, node: Node) -> Call | None:
    """The operation whose indices along a dimension ids are, perhaps only some of them."""
    call = ctx.calls.get(node)
    while call is not None and call.name == "getitem" and _is_slice(call.args[1]):
        call = ctx.calls.get(call.args[0])
    if call is not None and call.name == "getitem" and call.args[1] == 1:
        source = ctx.calls.get(call.args[0])
        return source if source is not None and source.name in VALUES_AND_INDICES else None
    return call if call is not None and call.name in ("argsort", "argmax", "argmin") else None


def _is_slice(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(item, slice) or item is Ellipsis for item in items)


def dim_of(call: Call) -> Any:
    """The dimension that a top-k, sort or maximum goes along; None where it is not one dimension."""
    place, default = INDICES_ALONG[call.name]
    return call.kwargs.get("dim", call.args[place] if len(call.args) > place else default)


def _last_dim(call: Call) -> bool:
    """Whether a call goes along the last dimension."""
    dim, value = dim_of(call), tensor(call.args[0])
    return isinstance(dim, int) and value is not None and dim in (-1, value.dim() - 1)
