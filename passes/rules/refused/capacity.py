"""Places for tokens: experts that take a fixed number of tokens, as GShard (arXiv:2006.16668) and Switch (arXiv:2101.03961) write it.

``cumsum`` of the mask of the chosen experts says where a token stands in the queue of its expert, ``one_hot`` of that gives it a place,
and an einsum over the tokens puts it there. The experts then run on all places, filled or not: one batched product, with nothing to leave
out. It stays as it is; what is here only recognises it, so that the report can say so. (A mask times a condition on such numbers, without
places, is a routing with fewer slots: masked_slots.py.) So does a loop that keeps some of each expert's tokens, ``tok[:capacity]``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.equations import equation
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import SIZE_QUERIES
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.facts import Index, IndexMatrix, Lost, Mask, Routing, Table, View, Weight
from moefuse.passes.rules.refused.expert_choice import Notes, applies_weights

PLACES = "`{op}` puts them into a fixed number of places of each expert, and the experts run on all places, filled or not"
SOME = (
    "{name} is some of the tokens that chose an expert, and which depends on the others; to keep the first of each, a condition on the "
    "mask of all experts is fused, `mask * (mask.sum(1).cumsum(0) <= capacity)[:, None]` of `mask = one_hot(ids, E)` [tokens, K, E]"
)


@dataclass
class Places:
    """``queues``: what is computed from places in the queues of a routing. ``parts``: what is computed from some of an expert's tokens."""

    queues: dict[Node, Routing] = field(default_factory=dict)
    parts: dict[Node, tuple[Node, Routing]] = field(default_factory=dict)


def follow(ctx: Context, node: Node, call: Call, fact: Any) -> Lost | None:
    """Notes what is computed from places in a queue; a refusal where tokens are put there."""
    lost = _some_tokens(ctx, node, call, fact)
    if lost is not None:
        return lost
    queues = ctx.scratch(Places).queues
    # Who is left after a condition is a routing again; places as one-hot rows are none.
    places = any(n in queues and isinstance(f := ctx.fact(n), Mask | Table) and f.routing.node in queues for n in node.all_input_nodes)
    fewer = isinstance(fact, Mask | Table) and fact.routing.node is node and not places
    if fewer or call.name in SIZE_QUERIES:
        return None
    routing = _queue(ctx, call) or next((queues[n] for n in node.all_input_nodes if n in queues), None)
    if routing is None:
        return None
    if fact is None and _puts_tokens(ctx, call, routing):
        return ctx.lost("capacity", node, detail=PLACES.format(op=call.name))
    queues[node] = routing
    return None


def _some_tokens(ctx: Context, node: Node, call: Call, fact: Any) -> Lost | None:
    """Follows part of an expert's tokens to the expert; one refusal for all experts of a routing, where the part is taken."""
    if not isinstance(fact, View | Weight | None) or call.name in SIZE_QUERIES:
        return None
    parts, reported = ctx.scratch(Places).parts, ctx.scratch(Notes).reported
    whole = ctx.fact(call.args[0]) if call.name in ("getitem", "narrow", "index_select") and call.args else None
    if isinstance(whole, Index | IndexMatrix):
        parts[node] = (node, whole.selection.routing)
        return None
    found = next((parts[n] for n in node.all_input_nodes if n in parts), None)
    if found is None:
        return None
    parts[node] = found
    source, routing = found
    if routing.node in reported or not applies_weights(ctx, node, call):
        return None
    reported.add(routing.node)
    return ctx.lost("capacity", source, detail=SOME.format(name=named(source)))


def _queue(ctx: Context, call: Call) -> Routing | None:
    """The routing whose chosen experts a running sum counts."""
    fact = ctx.fact(call.args[0]) if call.name == "cumsum" and call.args else None
    counts = fact.weight is None if isinstance(fact, Mask) else isinstance(fact, Table) and fact.ones
    return fact.routing if isinstance(fact, Mask | Table) and counts and fact.expert is None else None


def _puts_tokens(ctx: Context, call: Call, routing: Routing) -> bool:
    """Whether a product of places and something else is summed over the tokens, and has features that the places do not have."""
    labels = _labels(call)
    if labels is None:
        return False
    operands, names, out = labels
    placed = [n in ctx.scratch(Places).queues for n in operands]
    if placed.count(True) != 1:
        return False
    at = placed.index(True)
    mine, theirs = names[at], names[1 - at]
    value = tensor(operands[1 - at])
    summed = [c for c in mine if c in theirs and c not in out]
    sizes = [out_shape(operands[at])[mine.index(c)] for c in summed]
    features = any(c in out and c not in mine for c in theirs)
    return features and value is not None and value.dtype.is_floating_point and len(sizes) == 1 and same(sizes[0], routing.num_tokens)


def _labels(call: Call) -> tuple[list[Node], list[str], str] | None:
    """(two operands, their index names, those of the result) of a contraction; None for any other operation."""
    if call.name == "einsum":
        read = equation(*call.args)
    else:
        rank = len(out_shape(call.args[0])) if call.name in ("matmul", "mm") and len(call.args) == 2 else 0
        more = "abcdefgh"[: max(rank - 2, 0)]
        read = equation(f"{more}ij,jk->{more}ik", *call.args) if rank >= 2 else None
    return None if read is None or len(read.operands) != 2 else (list(read.operands), list(read.labels), read.out)


__all__ = ["Places", "follow"]
