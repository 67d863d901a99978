"""Experts on rows that nothing says anything about: a loop that takes rows by masks of unknown origin, each for weights of its own.

The facts begin at expert ids. Where an author keeps the choice in another form (NLLB-MoE: a table that is the sum of two, read through
``table.bool()[:, e]``), nothing is fused. What is here only recognises the loop, so that the report can say so. Two such choices are no
loop: text and image tokens, say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import SHAPED, SIZE_QUERIES
from moefuse.passes.graph.sharded import is_parameter
from moefuse.passes.graph.symbols import unbacked
from moefuse.passes.infer.choices import above
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost, View, Weight
from moefuse.passes.rules.refused.capacity import Places
from moefuse.passes.rules.refused.expert_choice import Notes, applies_weights

_LOOP = 3
_LISTS = SHAPED | frozenset("nonzero nonzero_numpy where getitem select unbind".split())
"""What has the elements of a mask, or their numbers."""


@dataclass
class _Rows:
    """``chosen``: what is computed from rows of unknown origin. ``experts``: for each tensor its choices, with the weights they met."""

    chosen: dict[Node, Node] = field(default_factory=dict)
    experts: dict[Node, dict[Node, set[tuple[Node, int | None]]]] = field(default_factory=dict)


def follow(ctx: Context, node: Node, call: Call, fact: Any) -> Lost | None:
    """Notes rows whose number depends on data; a refusal where a second choice out of the same tensor meets weights of its own."""
    if not isinstance(fact, View | Weight | None) or call.name in SIZE_QUERIES or node in ctx.scratch(Places).parts:
        return None
    rows, reported = ctx.scratch(_Rows), ctx.scratch(Notes).reported
    chosen = node if _chooses(ctx, node, call) else next((rows.chosen[n] for n in node.all_input_nodes if n in rows.chosen), None)
    if chosen is None:
        return None
    rows.chosen[node] = chosen
    if chosen is node or not applies_weights(ctx, node, call):
        return None
    source = ctx.storage[ctx.calls[chosen].args[0]]  # type: ignore[union-attr]
    seen = rows.experts.setdefault(source, {})
    weights = {_own(ctx, n) for n in node.all_input_nodes if is_parameter(ctx.storage[n])}
    if not any(weights & others for choice, others in seen.items() if choice is not chosen):
        seen.setdefault(chosen, weights)
    if source in reported or len(seen) < _LOOP:
        return None
    reported.add(source)
    first = next(iter(seen))
    mask = first.all_input_nodes[-1]
    compared = _compared(ctx, mask)
    if above(ctx, compared) is not None or _left_by_relu(ctx, compared):
        return ctx.lost("threshold", first, name=named(mask))
    return ctx.lost("tokens-differ", first, detail=f"no rule reads whose tokens {named(mask)} are")


def _own(ctx: Context, weight: Node) -> tuple[Node, int | None]:
    """Whose memory a weight is, and which expert's of a stack."""
    fact = ctx.facts.get(weight)
    return ctx.storage[weight], fact.expert if isinstance(fact, Weight) else None


def _compared(ctx: Context, node: Node) -> Node:
    """The comparison that a mask, or row numbers, are read out of."""
    while (call := ctx.calls.get(node)) is not None and call.name in _LISTS and call.args and isinstance(call.args[0], Node):
        node = call.args[0]
    return node


def _left_by_relu(ctx: Context, node: Node) -> bool:
    """Whether a mask, or row numbers, are of what ReLU leaves above zero."""
    call = ctx.calls.get(node)
    while call is not None and call.name in ("gt", "ne", "getitem", "select", "unbind") and isinstance(call.args[0], Node):
        call = ctx.calls.get(call.args[0])
    return call is not None and call.name == "relu"


def _chooses(ctx: Context, node: Node, call: Call) -> bool:
    """Whether rows are taken by a mask, or by numbers, that have nothing to do with any routing, and only the run knows how many."""
    value = tensor(node)
    if call.name not in ("getitem", "index_select", "masked_select") or value is None or not value.is_floating_point() or not value.dim():
        return False
    plain = all(isinstance(ctx.fact(n), View | None) for n in node.all_input_nodes[1:])
    return plain and isinstance(call.args[0], Node) and len(node.all_input_nodes) > 1 and bool(unbacked(value.shape[0]))


__all__ = ["follow"]
