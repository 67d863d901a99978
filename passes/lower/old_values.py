"""What gradients need of an input is kept, where the graph writes to that input.

AOTAutograd computes values again in backward of what an input holds by then, which is what the graph has written to it: of a counter that
weights of experts are computed of, and that the loop over the experts adds to, behind a break of the graph unless capture has made it one.
Such a graph works on a copy, which no partitioner computes again, and writes that to the input at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.symbols import example_of
from moefuse.passes.graph.values import fake, tensor, tensors_in
from moefuse.passes.graph.writes import statistics, written


def keep(gm: GraphModule, inputs: Collection[Node]) -> Node | None:
    """Copy those of some inputs of a graph, which it writes to, that gradients are computed of; one of which that cannot be done."""
    plain = [node for node in inputs if (value := tensor(node)) is not None and not value.requires_grad]
    wanted = _read_by_gradients(gm, plain) if plain else set()
    for node in (n for n in plain if n in wanted):
        if not tensor(node).is_contiguous() or _is_seen(gm, node):  # type: ignore[union-attr]
            return node
        _work_on_a_copy(gm, node)
    return None


def gains_gradients(inputs: Collection[Node]) -> Node | None:
    """An input of a graph that keeps, behind the call, what the graph has computed with gradients: a statistic nobody has detached.

    Where such a value is written outside of the graph, backward of a later call does not look at it unless it is asked for.
    """
    for node in inputs:
        value, example = tensor(node), example_of(node)
        if value is None or not value.requires_grad or not isinstance(example, torch.Tensor):
            continue
        if not example.requires_grad or (not example.is_leaf and "_buffers_" in str(node.target)):
            return node
    return None


def _keys(node: Node) -> set[int]:
    """The memory of a node's tensors."""
    return {_torch_private.storage_key(t) for t in tensors_in(fake(node))}


def _read_by_gradients(gm: GraphModule, inputs: Sequence[Node]) -> set[Node]:
    """The inputs of which something with gradients is computed."""
    found: set[Node] = set()
    of_node: dict[Node, set[Node]] = {}
    of_memory: dict[int, set[Node]] = defaultdict(set)
    for node in inputs:
        for key in _keys(node):
            of_memory[key].add(node)
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        read: set[Node] = set()
        for n in set(node.all_input_nodes).difference(statistics(node)):  # which a norm only updates where it writes to them
            read |= of_node.get(n, set()).union(*(of_memory[key] for key in _keys(n) if key in of_memory))
        if not read:
            continue
        of_node[node] = read
        found |= read if any(t.requires_grad for t in tensors_in(fake(node))) else set()
        for key in set().union(*map(_keys, written(node))):
            of_memory[key] |= read
    return found


def _is_seen(gm: GraphModule, source: Node) -> bool:
    """Whether memory of an input is another one's, too, or a part of it among what the graph returns: a copy would be none of those."""
    others = [n for n in gm.graph.find_nodes(op="placeholder") if n is not source]
    others += [n for n in _output(gm).all_input_nodes if not _is_itself(n, source)]
    return any(not _keys(source).isdisjoint(_keys(node)) for node in others)


def _output(gm: GraphModule) -> Node:
    output: Node = gm.graph.output_node()
    return output


def _is_itself(node: Node, source: Node) -> bool:
    """Whether a node is an input, as it is after a write: ``buffer += 1`` binds it again."""
    one, other = tensor(node), tensor(source)
    if one is None or other is None or one.requires_grad or _keys(node) != _keys(source):
        return False
    same = (one.shape, one.stride(), one.storage_offset()) == (other.shape, other.stride(), other.storage_offset())
    return bool(same and one.dtype == other.dtype)


def _work_on_a_copy(gm: GraphModule, node: Node) -> None:
    first = next(n for n in gm.graph.nodes if n.op != "placeholder")
    with gm.graph.inserting_before(first):
        own = gm.graph.call_function(torch.ops.moefuse.own.default, (node,))
    own.meta = {"example_value": fake(node)}
    node.replace_all_uses_with(own)
    own.args = (node,)
    output = _output(gm)
    for out in output.all_input_nodes:
        if _is_itself(out, node):
            output.replace_input_with(out, node)
    with gm.graph.inserting_before(output):
        gm.graph.call_method("copy_", (node, own)).meta = {"example_value": fake(node)}


__all__ = ["gains_gradients", "keep"]
