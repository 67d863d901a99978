"""Inputs of a compiled graph that were made in inference mode, where a gradient needs them.

Autograd refuses to keep such tensors for backward. A program that unpacks weights from them does not ask it to: it keeps what it unpacked.
The op in its place keeps what they were unpacked from, and is given the same memory as ordinary tensors.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from moefuse import _torch_private

ops = torch.ops.moefuse
HELD = {ops.experts_extended.default: (3, 4, 5, 15), ops.grouped_linear_coded.default: (2, 3)}
"""Ops, and which of their arguments are storage and what belongs to it."""


def kept(gm: GraphModule, example_inputs: Sequence[object]) -> list[int]:
    """Which inputs of a graph are inference tensors that quantised weights are made of."""
    inputs = gm.graph.find_nodes(op="placeholder")
    made = [at for at, value in enumerate(example_inputs) if isinstance(value, Tensor) and value.is_inference()]
    made = [at for at in made if _torch_private.made_of_others(example_inputs[at]) is None]
    if not made:
        return []
    reached: set[Node] = set()
    left = [node for op, at in HELD.items() for call in gm.graph.find_nodes(op="call_function", target=op) for node in _nodes(call, at)]
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += node.all_input_nodes
    return [at for at in made if inputs[at] in reached]


def _nodes(call: Node, at: Sequence[int]) -> list[Node]:
    return [node for i in at for node in (call.args[i] if isinstance(call.args[i], list | tuple) else ()) if isinstance(node, Node)]  # type: ignore[union-attr]


def ordinary(compiled: _torch_private.CompiledFn, inputs: Sequence[int]) -> _torch_private.CompiledFn:
    """The compiled graph, given these inputs as tensors that autograd keeps where a gradient may be wanted."""
    if not inputs or not isinstance(compiled, types.FunctionType) or _torch_private.compiled_code_is_stored():
        return compiled

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        given = list(args)
        for at in inputs:
            given[at] = _ordinary(args[at])
        return compiled(*given)

    return run


def _ordinary(t: Tensor) -> Tensor:
    """The same memory; an inference tensor has no count of its versions that a copy could lose."""
    if not t.is_inference():
        return t
    return t.new_empty(0).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


__all__ = ["kept", "ordinary"]
