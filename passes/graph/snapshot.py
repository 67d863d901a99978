"""A graph as it was, to put back."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch


class Saved(NamedTuple):
    """A graph module as it was: its nodes then, and the copy of its graph with a node for each."""

    module: torch.fx.GraphModule
    nodes: tuple[torch.fx.Node, ...]
    graph: torch.fx.Graph
    modules: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]


class GraphSnapshot:
    """The graphs of a module and of the bodies inside it, to put back if a rewrite fails half-way. Copies nodes, not tensors."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        self.modules = [
            Saved(
                module,
                tuple(module.graph.nodes),
                copy_graph(module.graph),
                dict(module._modules),
                dict(module._parameters),
                dict(module._buffers),
            )
            for module in gm.modules()
            if isinstance(module, torch.fx.GraphModule)
        ]

    def restore(self) -> None:
        for saved in self.modules:
            # Whatever the rewrite attached goes; nn.Module keeps attributes of these kinds in three dicts.
            saved.module.__dict__.update(_modules=saved.modules, _parameters=saved.parameters, _buffers=saved.buffers)
            saved.module.graph = saved.graph


def copy_graph(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A copy of a graph from Dynamo that AOTAutograd takes for one."""
    copied: torch.fx.Graph = copy.deepcopy(graph)
    for new, old in zip(copied.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder"), strict=True):
        # Dynamo ties inputs to guards by this attribute, and AOTAutograd reads it; a graph copy does not carry attributes.
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
    return copied
