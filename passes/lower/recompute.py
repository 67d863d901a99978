"""Experts that compute their hidden activations again in backward, where the user wants memory more than time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from moefuse.passes.graph.calls import location, tensor

_PLAIN = torch.ops.moefuse.experts.default
_ASKED = (torch.ops.moefuse.experts_extended.default, torch.ops.moefuse.ep_experts.default)
"""The ops of a whole layer; others of several ranks have ``bound=``."""


def recompute(gm: GraphModule) -> None:
    """For every layer of one op in a graph, and in the bodies inside it."""
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=_PLAIN):
            node.target = torch.ops.moefuse.recomputed_experts.default
        for target in _ASKED:
            for node in module.graph.find_nodes(op="call_function", target=target):
                node.kwargs = {**node.kwargs, "recompute": True}
        module.recompile()


def still_kept(anchor: Node, new_nodes: Sequence[Node], tier: str, grad: bool) -> list[str]:
    """A note where the hidden activations of a differentiated layer are kept all the same. ``new_nodes``: what stands in its place."""
    if any(node.target in (_PLAIN, *_ASKED) for node in new_nodes) or not (grad and any(map(_differentiated, new_nodes))):
        return []
    if tier == "fused":
        why = "experts on several ranks keep as many rows as `moefuse.parallelize(..., bound=)` says"
    else:
        why = (
            "they are grouped products around the program's own operations; an activation checkpoint around the layer computes those again"
        )
    return [f"recompute: the experts at {location(anchor)} keep their hidden activations, since {why}"]


def _differentiated(node: Node) -> bool:
    return any((value := tensor(n)) is not None and value.requires_grad for n in node.all_input_nodes)
