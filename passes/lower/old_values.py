"""What gradients need of an input is kept, where the graph writes to that input.

AOTAutograd computes values again in backward of what an input holds by then, which is what the graph has written to it: of a counter that
weights of experts are computed of, and that the loop over the experts adds to, behind a break of the graph unless capture has made it one.
Such a graph works on a copy, which no partitioner computes again, and writes that to the input at its end.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.values import fake, tensor, tensors_in
from moefuse.passes.graph.writes import statistics, written


def keep(gm: GraphModule, inputs: Collection[Node]) -> Node | None:
    """Copy those of some inputs of a graph, which it writes to, that gradients are computed of; one of which that cannot be done."""
    for node in inputs:
        value = tensor(node)
        if value is None or value.requires_grad or not _reaches_gradients(gm, node):
            continue
        if not value.is_contiguous() or _is_seen(gm, node):
            return node
        _work_on_a_copy(gm, node)
    return None


def _keys(node: Node) -> set[int]:
    """The memory of a node's tensors."""
    return {_torch_private.storage_key(t) for t in tensors_in(fake(node))}


def _reaches_gradients(gm: GraphModule, source: Node) -> bool:
    """Whether something with gradients is computed of what an input holds."""
    memory, nodes = _keys(source), {source}
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        read = [n for n in node.all_input_nodes if n not in statistics(node)]  # which a norm only updates where it writes to them
        if not any(n in nodes or not memory.isdisjoint(_keys(n)) for n in read):
            continue
        if any(t.requires_grad for t in tensors_in(fake(node))):
            return True
        nodes.add(node)
        memory |= set().union(*map(_keys, written(node)))
    return False


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


__all__ = ["keep"]
