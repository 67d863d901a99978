"""Where a shared expert starts and where it is met: as early as its inputs are there, in front of the router, and at the sum.

Between the two must be nothing that would end the recording of a CUDA graph: no tensor on another device, no size that is read from a
tensor, neither by position nor by what the sum needs and the start does not. Else the shared expert is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.ops.meaning.call import Body
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.infer.state import Context


@dataclass(frozen=True)
class Weight:
    """What a shared expert is multiplied by: a tensor [T, 1] or None, and a number."""

    tensor: Any
    scale: float


def start_and_join(ctx: Context, emit: Emitter, add: Node, other: Node, alone: Node, tokens: int, weight: Weight) -> Node | None:
    """The sum's new value, of its shape; None if the shared expert cannot start earlier.

    Args:
        emit: what was written where the sum is needed, and where the new nodes go.
        other: the addend that the shared expert is.
        alone: ``moefuse::experts`` with the one expert, among ``emit.nodes``.
        tokens: up to so many tokens it runs on another stream.
    """
    term = next((a for a in add.all_input_nodes if a is not other), None)
    tensors = [alone.args[0], *(n for part in alone.args[3:9] for n in part)]  # type: ignore[union-attr]
    moved, sources = _with_sources(tensors, set(emit.nodes))
    place = _behind(ctx.graph, sources)
    at = emit.before
    if term is None or place is None or not _as_good(ctx, place, sources, at):
        return None
    wanted = [n for n in (term, weight.tensor) if n is not None]
    if not all(_recordable(node, fake(alone).device) for node in (*_between(place, at), *_needed(wanted, sources))):
        return None
    cursor = place
    for node in moved:
        cursor.append(node)
        cursor = node
    counts = [len(part) for part in alone.args[3:9]]  # type: ignore[arg-type]
    options: Any = alone.kwargs
    args = tuple(options["activation_args"])
    body = Body(options["activation"], args, options["gating"], options["up_first"], options["weight_on_input"]).encode()
    emit.before = cursor.next
    start = emit(torch.ops.moefuse.shared_start.default, tensors, counts, *body, fake(alone).dtype, tokens)
    emit.before = at
    return emit(torch.ops.moefuse.shared_join.default, term, start, weight.tensor, weight.scale, [tensors[0]], tokens)


def _with_sources(tensors: Iterable[Any], new: set[Node]) -> tuple[list[Node], list[Node]]:
    """(new nodes that the tensors are made of, in order; the nodes that these and the tensors read)."""
    moved: dict[Node, None] = {}
    sources: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node in moved or node in sources:
            return
        if node not in new:
            sources[node] = None
            return
        for n in node.all_input_nodes:
            visit(n)
        moved[node] = None

    for node in tensors:
        visit(node)
    return list(moved), list(sources)


def _behind(graph: Graph, sources: Iterable[Node]) -> Node | None:
    """The node behind which all sources are there, and all inputs of the graph."""
    wanted, last = set(sources), None
    for node in graph.nodes:
        if node in wanted or node.op == "placeholder":
            last = node
    return last


def _as_good(ctx: Context, place: Node, sources: Iterable[Node], at: Node) -> bool:
    """Whether the sources hold the same behind ``place`` as at the sum, and gradients are recorded at both or at neither."""
    first = place.next
    if first not in ctx.mode or ctx.mode[first] != ctx.mode[at]:
        return False
    return all(ctx.written_between(source, place, at) is None for source in sources)


def _between(place: Node, at: Node) -> Iterator[Node]:
    node = place.next
    while node is not at:
        yield node
        node = node.next


def _needed(wanted: Iterable[Node], known: Iterable[Node]) -> set[Node]:
    """What is computed for ``wanted`` but not for ``known``: Inductor may put it behind the start, wherever it stands."""
    there = _ancestors(known, set())
    return _ancestors(wanted, there) - there


def _ancestors(nodes: Iterable[Node], there: set[Node]) -> set[Node]:
    """The nodes and what they are computed from, as far as ``there``."""
    found, stack = set(there), list(nodes)
    while stack:
        node = stack.pop()
        if node in found or node.op in ("placeholder", "get_attr"):
            continue
        found.add(node)
        stack += node.all_input_nodes
    return found


def _recordable(node: Node, device: torch.device) -> bool:
    """Whether a node is work on the device whose sizes the host knows."""
    value = fake(node)
    each = value if isinstance(value, tuple | list) else (value,)
    return not unbacked_in(value) and all(v.device == device for v in each if isinstance(v, torch.Tensor))


def start_early(graph: Graph) -> None:
    """Put every start back in front of the router, in an Inductor graph that has been ordered by who reads what.

    Inductor moves what has one reader next to it. With a start goes what only the start reads: views and casts of its inputs.
    """
    for start in graph.find_nodes(op="call_function", target=torch.ops.moefuse.shared_start.default):
        moved, sources = _with_sources([start], _only_for(start))
        place = _behind(graph, sources)
        if place is None or _writes_between(place, start):
            continue
        for node in moved:
            place.append(node)
            place = node


def _only_for(node: Node) -> set[Node]:
    """The node, and what only it and its join need."""
    found, stack = {node, *node.users}, list(node.all_input_nodes)
    while stack:
        each = stack.pop()
        if each.op == "call_function" and not each.is_impure() and each not in found and all(user in found for user in each.users):
            found.add(each)
            stack += each.all_input_nodes
    return found


def _writes_between(place: Node, start: Node) -> bool:
    return any(node.op == "root" or node.is_impure() for node in _between(place, start))
