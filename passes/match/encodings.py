"""Expert weights that are not what they seem: sharded over processes, packed in a tensor subclass, or made of fewer bits on the way."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import weight_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region

_STEPS = 8
"""How many operations stand between a packed weight and the one that is used, at the most."""
_COLLECTIVES = ("_c10d_functional::", "c10d::", "_dtensor::", "torch.distributed.")
_SHARDED = ("DTensor", "AsyncCollectiveTensor")


def foreign(ctx: Context, node: Node) -> Lost | None:
    """A refusal for a weight, or what is computed from it, that is a tensor subclass with an encoding of its own."""
    kind = type(tensor(node))
    plain = (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
    if kind in plain or not hasattr(kind, "__tensor_flatten__"):
        return None
    code = "sharded" if kind.__name__ in _SHARDED else "quantised"
    return ctx.lost(code, node, detail=f"they are held as `{kind.__name__}`")


def between(ctx: Context, chosen: Collection[Node]) -> Lost | None:
    """A refusal for experts of which this process has some: a collective that depends on what was chosen."""
    for node, call in ctx.calls.items():
        if call is not None and node in chosen and call.name.startswith(_COLLECTIVES) and not call.name.endswith("wait_tensor"):
            name = call.name.rpartition(":")[2].rpartition(".")[2]
            return ctx.lost("sharded", node, detail=f"`{name}` exchanges what depends on the router's choice")
    return None


def encoded(ctx: Context, region: Region) -> Lost | None:
    """A refusal for experts whose weights the program unpacks one by one: fused, it would unpack all of them, also for a single token."""
    for leaf in weight_leaves(region.expr):
        for node in leaf.parts or (leaf.source,):
            found = foreign(ctx, node)
            if found is not None:
                return found
    slots = region.routing.num_tokens * region.routing.top_k
    if isinstance(slots, int) and slots >= region.num_experts:
        return None
    for leaf in weight_leaves(region.expr):
        packed = _packed(ctx, leaf.parts[0]) if leaf.parts and tensor(leaf.parts[0]) is not None else None
        value = tensor(packed) if packed is not None else None
        if value is not None:
            dtype = str(value.dtype).removeprefix("torch.")
            return ctx.lost("encoding-unknown", region.anchor, dtype=dtype, count=len(leaf.parts))
    return None


def _packed(ctx: Context, node: Node) -> Node | None:
    """The packed matrix that a weight is computed from, a few steps before."""
    front = [node]
    for _ in range(_STEPS):
        for at in front:
            value = tensor(at)
            if value is not None and len(shape_of(value)) >= 2 and (value.dtype.itemsize == 1 or not value.dtype.is_floating_point):
                return at
        front = [n for at in front if ctx.calls.get(at) is not None for n in at.all_input_nodes]
    return None


__all__ = ["between", "encoded", "foreign"]
