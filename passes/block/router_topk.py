"""A router's ``torch.topk`` as ``moefuse::topk``: one launch instead of a search and a sort. Or the whole router, if the user asks for it.

The scores stay the user's arithmetic, and values keep their bits. Of equal scores the op takes the lowest position, where ``torch.topk``
leaves open which, and its results are in descending order under ``sorted=False`` too.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from moefuse.ops.schema import TAKES_IDS
from moefuse.passes.block import router_logits, router_match
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import Call, call_of, fake, location, tensor
from moefuse.passes.graph.op_classes import PRODUCTS
from moefuse.passes.infer.state import Context
from moefuse.passes.lower.devices import unsupported
from moefuse.passes.lower.layout import same_strides

if TYPE_CHECKING:
    from moefuse.config import Options

DEVICES = {"cuda"}
"""Where the op has a kernel that is quicker than ``torch.topk``."""
_ARGUMENTS = ("k", "dim", "largest", "sorted")


def one_kernel(graph: Graph, options: Options) -> list[str]:
    """Replace every top-k between a router's projection and the ids of a fused region, those of groups too. Notes for the report."""
    notes: dict[str, None] = {}
    ctx = Context(graph) if options.fuse_router else None
    for node, call in _choices(graph) if options.router_topk or options.fuse_router else ():
        file, _, line = location(node).rpartition(":")
        where = f" at {os.path.basename(file)}:{line}" if file else ""
        k = _count(call) if node.users else None
        if k is None:
            continue
        read = None if ctx is None else router_match.fused(graph, ctx.memory, node, call, k)
        if ctx is not None and read is not None:
            first = "one kernel and one for its logits" if router_logits.replaced(ctx, read) else "one kernel behind its logits"
            notes[f"the router{where} is {first}"] = None
        elif options.router_topk and _replaced(graph, node, call, k):
            notes[f"the router's top-k{where} is one kernel, which gives equal scores to the lowest expert"] = None
    return list(notes)


def _choices(graph: Graph) -> list[tuple[Node, Call]]:
    """The calls of ``topk`` that ids are computed from, as far back as the product that gives the scores."""
    found: list[tuple[Node, Call]] = []
    stack = [i for target in TAKES_IDS for n in graph.find_nodes(op="call_function", target=target) if isinstance(i := n.args[1], Node)]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        call = call_of(node)
        if node in seen or call is None or call.name in PRODUCTS:
            continue
        seen.add(node)
        if call.name == "topk":
            found.append((node, call))
        stack += node.all_input_nodes
    return found


def _replaced(graph: Graph, node: Node, call: Call, k: int) -> bool:
    """Replace one top-k, if the op has a kernel for it."""
    scores = tensor(call.args[0])
    if any(user.target is not operator.getitem for user in node.users):
        return False
    emit = Emitter(graph, node, node, {})
    emit.mode = getattr(scores, "fake_mode", None)
    made = emit(torch.ops.moefuse.topk.default, call.args[0], k)
    if not _alike(fake(made), fake(node)) or unsupported([made], True) is not None:
        emit.undo()
        return False
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _count(call: Call) -> int | None:
    """K of a top-k on a device with kernels, for the greatest of a fixed number along the last dimension; None for any other."""
    given: dict[str, Any] = {"dim": -1, "largest": True, **dict(zip(_ARGUMENTS, call.args[1:], strict=False)), **call.kwargs}
    scores, k = tensor(call.args[0]), given.get("k")
    if scores is None or not scores.dim() or scores.device.type not in DEVICES or not scores.is_floating_point() or call.inplace:
        return None
    if given["dim"] not in (-1, scores.dim() - 1) or given["largest"] is not True:
        return None
    experts = scores.shape[-1]
    return k if type(k) is int and isinstance(experts, int) and 0 <= k <= experts else None


def _alike(made: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether both results have the sizes, strides, dtypes and device of the program's."""
    pairs = zip(made, theirs, strict=True)
    return all(a.dtype == b.dtype and a.device == b.device and same_strides(a, b) for a, b in pairs)


__all__ = ["one_kernel"]
