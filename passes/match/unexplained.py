"""Experts in a form that no rule reads at all: nothing in the graph was fused, nothing was refused, and yet something is chosen by scores.

What counts as evidence is read from the graph, never from names: as many stacked or equal weights as there were scores to choose from,
weights gathered by what was chosen, or rows that were taken by it, multiplied by a weight and put back. A top-k alone is none (sampling,
sparse attention). The result is a refusal for the report; nothing is rewritten because of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import Call, raw_name, tensor
from moefuse.passes.graph.named import operation
from moefuse.passes.graph.op_classes import INDICES_ALONG, METADATA, PRODUCTS
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.graph.writes import bodies
from moefuse.passes.infer.choices import above
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Counts, Hit, Index, IndexMatrix, Lost, Mask, Rows, Sorted, Table, Weight
from moefuse.passes.rules import rule_of

_TAKES = frozenset("getitem index_select gather embedding take_along_dim masked_select index".split())
_PUTS = frozenset("index_add scatter scatter_add index_put setitem scatter_reduce index_copy masked_scatter".split())
_MULTIPLIES = PRODUCTS | frozenset("conv1d conv2d conv3d mul scaled_mm _scaled_mm grouped_mm _grouped_mm".split())
_SELECTS = Mask | Table | Index | IndexMatrix | Sorted | Counts | Hit | Rows | Weight
_FEWEST = 3
"""So many equal weights beside as many scores; of two, one may be anything."""
_GROUPS = 6
"""Where a convolution takes them, of its arguments."""
_FAR = 64
"""So many operations are looked at on the way from scores to the weights that they come from."""


@dataclass
class _Flow:
    """``chosen``: what depends on a choice, and the first node of that choice. ``sizes``: of how many each choice is one, or some."""

    chosen: dict[Node, Node] = field(default_factory=dict)
    sizes: dict[Node, int] = field(default_factory=dict)


def unexplained(ctx: Context) -> Lost | None:
    """A refusal for experts that nothing else in a graph speaks of; None where there is no sign of any."""
    flow = _without_ours(ctx, _flow(ctx))
    if not flow.sizes:
        return None
    for find in (_gathered_weights, _rows_taken_and_put_back):
        exact = find(ctx, flow)
        if exact is not None:
            return _told(ctx, *exact)
    found = _weights_like_scores(ctx, flow)
    if found is None:
        return None
    call = ctx.calls[found[0]]
    plain = found[0] in ctx.levels or (call is not None and call.name in _MULTIPLIES and rule_of(call.name) is None)
    return _told(ctx, found[0] if plain else _last_known(ctx, *found), found[1])


def _without_ours(ctx: Context, flow: _Flow) -> _Flow:
    """The flow of choices that no op of moefuse reads: a program that calls the ops itself has nothing left to recognise there."""
    ours = {flow.chosen[n] for node in ctx.calls if _is_ours(node) for n in node.all_input_nodes if n in flow.chosen}
    chosen = {node: first for node, first in flow.chosen.items() if first not in ours}
    return _Flow(chosen, {node: size for node, size in flow.sizes.items() if node not in ours})


def choices(ctx: Context) -> set[Node]:
    """Everything that depends on what was chosen by scores."""
    return set(_flow(ctx).chosen)


def decided(ctx: Context, node: Node) -> bool:
    """Whether a value depends on what was chosen by scores of experts, or meets something that does."""
    return _meeting(ctx, _flow(ctx, of_experts=True), node) is not None


def of_tokens(ctx: Context, ids: Node) -> bool:
    """Whether ids are of the best tokens, and not of the best experts."""
    flow = _flow(ctx)
    first = flow.chosen.get(ids)
    return first is not None and not _of_weights(ctx, first, flow.sizes[first])


def _flow(ctx: Context, *, of_experts: bool = False) -> _Flow:
    flow = _Flow()
    for node, call in ctx.calls.items():
        if call is None or call.name in METADATA:
            continue
        size = scores_of(ctx, node)
        size = above(ctx, node) if size is None and of_experts else size  # a mask alone is no sign of experts
        first = next((flow.chosen[n] for n in node.all_input_nodes if n in flow.chosen), None)
        # What is sorted by a choice, as slots are by their experts, is no second one.
        if size is not None and ((not of_experts and first is None) or _of_weights(ctx, node, size)):
            flow.sizes[node] = size
            flow.chosen[node] = node
            continue
        if first is not None:
            flow.chosen[node] = first
    return flow


def scores_of(ctx: Context, node: Node) -> int | None:
    """How many scores an operation chooses from."""
    call = ctx.calls[node]
    if call is None or call.name not in INDICES_ALONG or not call.args or not isinstance(call.args[0], Node):
        return None
    scores, (place, default) = tensor(call.args[0]), INDICES_ALONG[call.name]
    dim = call.kwargs.get("dim", call.args[place] if len(call.args) > place else default)
    if scores is None or not scores.is_floating_point() or not isinstance(dim, int) or not scores.dim():
        return None
    size = shape_of(scores)[dim]
    return size if isinstance(size, int) and size > 1 else None


def _of_weights(ctx: Context, choice: Node, size: int) -> bool:
    """Whether the weights that the scores of a choice come from, if any are seen, have as many rows or columns.

    Else the best of some tokens are chosen, and not of some experts.
    """
    seen, stack, shapes = {choice}, [choice], []
    while stack and len(seen) < _FAR:
        node = stack.pop()
        weights = weights_of(ctx, node) if ctx.calls.get(node) is not None else []
        shapes += [shape_of(tensor(weight)) for weight in weights]  # type: ignore[arg-type]
        behind = [n for n in node.all_input_nodes if n not in seen] if not weights else []
        seen.update(behind)
        stack += behind
    return not shapes or any(size in shape for shape in shapes)


def weights_of(ctx: Context, node: Node) -> list[Node]:
    """The model's own tensors that an operation reads, through views."""
    roots = dict.fromkeys(ctx.storage[n] for n in node.all_input_nodes)
    return [r for r in roots if r.op in ("placeholder", "get_attr") and _held(r)]


def _held(root: Node) -> bool:
    value = tensor(root)
    own = isinstance(value, torch.nn.Parameter) or root.op == "get_attr" or "_buffers_" in root.name or "_parameters_" in root.name
    return value is not None and value.dim() >= 2 and own


def _weights_like_scores(ctx: Context, flow: _Flow) -> tuple[Node, int] | None:
    """(what reads the first of them, how many) of weights, stacked or one by one, of which there are as many as scores."""
    apart: dict[tuple[object, ...], dict[Node, Node]] = defaultdict(dict)
    counts = {size for node, size in flow.sizes.items() if _of_weights(ctx, node, size)}
    for node, call in ctx.calls.items():
        if call is None or call.name in METADATA or _explained(node):
            continue
        for weight in weights_of(ctx, node):
            shape = shape_of(tensor(weight))  # type: ignore[arg-type]
            seen = [shape_of(tensor(n)) for n in node.all_input_nodes if ctx.storage[n] is weight]  # type: ignore[arg-type]
            count = next((int(s[0]) for s in (shape, *seen) if len(s) >= 3 and s[0] in counts), None)
            groups = _groups(call, shape)
            count = groups if groups in counts else None if "conv" in call.name else count
            if count is not None and (met := _meeting(ctx, flow, node)) is not None:
                return (node if node in flow.chosen or node in ctx.levels or count == groups else met), count
            if call.name in _MULTIPLIES and call.name != "mul":
                apart[shape].setdefault(weight, node)
    for readers in apart.values():
        count = next((c for c in sorted(counts) if c >= _FEWEST and len(readers) >= c and len(readers) % c == 0), None)
        meetings = (_meeting(ctx, flow, node) for node in readers.values()) if count is not None else ()
        met = next((node for node in meetings if node is not None), None)
        if count is not None and met is not None:
            return next((n for n in readers.values() if rule_of(ctx.calls[n].name) is None), met), count  # type: ignore[union-attr]
    return None


def _groups(call: Call, weight: Sequence[Any]) -> int | None:
    """Of how many groups of several features a convolution is, each with weights of its own; one of single features is no expert."""
    given = call.kwargs.get("groups", call.args[_GROUPS] if len(call.args) > _GROUPS else 1)
    several = "conv" in call.name and isinstance(given, int) and len(weight) >= 2 and weight[1] != 1
    return given if several and given > 1 else None


def _explained(node: Node) -> bool:
    """Whether a node runs a body in which experts are fused: its choices may be read outside, by a loss that balances experts."""
    return any(_is_ours(n) for body in bodies(node) for n in body.graph.nodes)


def _is_ours(node: Node) -> bool:
    return isinstance(node.target, _torch_private.OpOverload | _torch_private.OpOverloadPacket) and str(node.target).startswith("moefuse.")


def _meeting(ctx: Context, flow: _Flow, product: Node) -> Node | None:
    """Where a product, or what is computed from it before anything is chosen by that, meets something that was chosen."""
    if product in flow.chosen:
        return _taken_at(ctx, flow, product)
    seen, stack = {product}, list(product.users)
    while stack:
        node = stack.pop()
        if node in flow.sizes or ctx.calls.get(node) is None:
            continue
        if any(n in flow.chosen and n not in seen for n in node.all_input_nodes):
            return node
        if node not in seen and len(seen) < 64:
            seen.add(node)
            stack.extend(node.users)
    return None


def _taken_at(ctx: Context, flow: _Flow, product: Node) -> Node:
    """Where what a product reads was taken by a choice: the last operation before it that reads something else, too."""
    node = product
    while node not in flow.sizes:
        weights = set(weights_of(ctx, node))
        if any(ctx.calls.get(n) is not None and n not in flow.chosen for n in node.all_input_nodes if ctx.storage[n] not in weights):
            return node
        if node is not product and any(n.op == "placeholder" and ctx.storage[n] not in weights for n in node.all_input_nodes):
            return node
        node = next(n for n in node.all_input_nodes if n in flow.chosen)
    return product


def _gathered_weights(ctx: Context, flow: _Flow) -> tuple[Node, int] | None:
    """Weights that were gathered by what was chosen, multiplied by something that is no weight."""
    gathered: dict[Node, Node] = {}
    for node, call in ctx.calls.items():
        if call is None:
            continue
        taken = call.name in _TAKES and bool(weights_of(ctx, node)) and any(n in flow.chosen for n in node.all_input_nodes)
        source = node if taken else next((gathered[n] for n in node.all_input_nodes if n in gathered), None)
        if source is None:
            continue
        if not taken and call.name in _MULTIPLIES and call.name != "mul":
            if not weights_of(ctx, node):
                return node, flow.sizes[flow.chosen[source]]
            continue
        value = tensor(node)
        if value is not None and value.dim() >= 3:
            gathered[node] = source
    return None


def _rows_taken_and_put_back(ctx: Context, flow: _Flow) -> tuple[Node, int] | None:
    """Rows that were taken by what was chosen, multiplied by a weight, and put back by it."""
    taken: dict[Node, Node | None] = {}
    for node, call in ctx.calls.items():
        if call is None:
            continue
        inputs = node.all_input_nodes
        by_choice = any(n in flow.chosen and not _floats(n) for n in inputs[1:])
        if call.name in _TAKES and by_choice and _floats(node) and not weights_of(ctx, node):
            taken.setdefault(node, None)
            continue
        source = next((n for n in inputs if n in taken), None)
        if source is None:
            continue
        if call.name in _PUTS and taken[source] is not None and by_choice:
            product = taken[source]
            assert product is not None
            return product, flow.sizes[flow.chosen[product]]
        multiplied = call.name in _MULTIPLIES and bool(weights_of(ctx, node))
        taken[node] = node if multiplied else taken[source]
    return None


def _floats(node: Node) -> bool:
    value = tensor(node)
    return value is not None and value.is_floating_point()


def _last_known(ctx: Context, product: Node, count: int) -> Node:
    """The operation where the last thing that was known of the routing is lost; the product where nothing ever was."""
    for node, call in ctx.calls.items():
        known = any(isinstance(ctx.facts.get(n), _SELECTS) for n in node.all_input_nodes)
        value = tensor(node)
        if call is None or call.name in METADATA or not known or ctx.facts.get(node) is not None or value is None or call.targets:
            continue
        if value.is_floating_point() and value.dim() >= 2 and shape_of(value)[-1] != count:
            return node  # type: ignore[no-any-return]
    return product


def _told(ctx: Context, node: Node, count: int) -> Lost:
    call = ctx.calls[node]
    if node in ctx.levels:
        return ctx.lost("transformed", node, name=ctx.levels[node])
    return ctx.lost("not-recognised", node, op=operation(node) if call is None or call.name == raw_name(node) else call.name, count=count)


__all__ = ["choices", "decided", "of_tokens", "scores_of", "unexplained", "weights_of"]
