"""Writing nodes: every new node gets the fake value its inputs imply, and the place in the user's code of the node it replaces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import fake

_PROVENANCE = ("nn_module_stack", "stack_trace", "source_fn_stack")

SIZED_BY_THE_RUN = (torch.ops.moefuse.ep_dispatch.default, torch.ops.moefuse.ep_experts.default, torch.ops.moefuse.room.default)
"""The ops with sizes that only the run knows, or of what they keep for backward: how many tokens other ranks have, and how many come."""

LAYERS = (torch.ops.moefuse.experts.default, torch.ops.moefuse.ep_experts.default)
"""The ops that are the routed experts of a layer, here or on several ranks."""


class Emitter:
    """Inserts calls in front of ``before``; arguments that an earlier rewrite replaced become their replacement.

    Raises whatever the fake implementation raises: a rewrite that does not type-check is not made.
    """

    def __init__(self, graph: Graph, before: Node, origin: Node, replaced: dict[Node, Node]) -> None:
        self.graph, self.before, self.origin, self.replaced = graph, before, origin, replaced
        self.nodes: list[Node] = []
        value = fake(origin)
        self.mode = getattr(value, "fake_mode", None)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        args, kwargs = torch.fx.node.map_arg((args, kwargs), lambda n: self.replaced.get(n, n))
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(function, args, kwargs)
        node.meta.update({k: self.origin.meta[k] for k in _PROVENANCE if k in self.origin.meta})
        self.nodes.append(node)
        if self.mode is not None:
            values = torch.fx.node.map_arg((args, kwargs), fake)
            sized = _torch_private.sizes_of_the_run(self.mode) if function in SIZED_BY_THE_RUN else contextlib.nullcontext()
            with self.mode, _torch_private.composites_in_python(), sized:
                node.meta["example_value"] = function(*values[0], **values[1])
        return node

    def undo(self) -> None:
        """Take back everything that was inserted."""
        for node in reversed(self.nodes):
            self.graph.erase_node(node)
        self.nodes.clear()
