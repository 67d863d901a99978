"""A router's ``torch.topk`` as ``moefuse::topk``: one launch instead of a search and a sort.

The scores stay the user's arithmetic, and values keep their bits. Of equal scores the op takes the lowest position, where ``torch.topk``
leaves open which, and its results are in descending order under ``sorted=False`` too.
"""

from __future__ import annotations

import operator
import os
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.devices import unsupported
from moefuse.passes.emit import Emitter
from moefuse.passes.ops import Call, call_of, fake, location, tensor

DEVICES = {"cuda"}
"""Where the op has a kernel that is quicker than ``torch.topk``."""
_ROUTED = (torch.ops.moefuse.experts.default, torch.ops.moefuse.permute.default)
"""Ops whose second argument is ids."""
_PRODUCTS = frozenset("linear matmul mm bmm addmm baddbmm einsum".split())
_ARGUMENTS = ("k", "dim", "largest", "sorted")


def one_kernel(graph: Graph) -> list[str]:
    """Replace every top-k between a router's projection and the ids of a fused region, those of groups too. Notes for the report."""
    notes: dict[str, None] = {}
    for node, call in _choices(graph):
        if _replaced(graph, node, call):
            file, _, line = location(node).rpartition(":")
            where = f" at {os.path.basename(file)}:{line}" if file else ""
            notes[f"the router's top-k{where} is one kernel, which gives equal scores to the lowest expert"] = None
    return list(notes)


def _choices(graph: Graph) -> list[tuple[Node, Call]]:
    """The calls of ``topk`` that ids are computed from, as far back as the product that gives the scores."""
    found: list[tuple[Node, Call]] = []
    stack = [i for target in _ROUTED for n in graph.find_nodes(op="call_function", target=target) if isinstance(i := n.args[1], Node)]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        call = call_of(node)
        if node in seen or call is None or call.name in _PRODUCTS:
            continue
        seen.add(node)
        if call.name == "topk":
            found.append((node, call))
        stack += node.all_input_nodes
    return found


def _replaced(graph: Graph, node: Node, call: Call) -> bool:
    """Replace one top-k, if the op computes the same and has a kernel for it."""
    scores, k = tensor(call.args[0]), _count(call)
    if scores is None or k is None or scores.device.type not in DEVICES or not scores.is_floating_point():
        return False
    if not scores.dim() or not isinstance(scores.shape[-1], int) or not 0 <= k <= scores.shape[-1]:
        return False
    if any(user.target is not operator.getitem for user in node.users):
        return False
    emit = Emitter(graph, node, node, {})
    emit.mode = getattr(scores, "fake_mode", None)
    made = emit(torch.ops.moefuse.topk.default, call.args[0], k)
    if _shapes(made) != _shapes(node) or unsupported([made], True) is not None:
        emit.undo()
        return False
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _count(call: Call) -> int | None:
    """K of a top-k for the greatest along the last dimension; None for any other."""
    given: dict[str, Any] = {"dim": -1, "largest": True, **dict(zip(_ARGUMENTS, call.args[1:], strict=False)), **call.kwargs}
    scores, k = tensor(call.args[0]), given.get("k")
    last = scores is not None and isinstance(given["dim"], int) and given["dim"] in (-1, scores.dim() - 1)
    plain = type(k) is int and given["largest"] is True and last and not call.inplace
    return k if plain else None


def _shapes(node: Node) -> list[tuple[Any, ...]]:
    """Sizes and dtypes of both results."""
    return [(t.dtype, t.device, *map(str, t.shape)) for t in fake(node)]


__all__ = ["one_kernel"]
