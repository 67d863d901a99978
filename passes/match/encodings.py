"""Expert weights that are not what they seem: sharded over processes, packed in a tensor subclass, or made of fewer bits on the way."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Leaf, held_leaves, weight_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.coded_weights import is_supposed, unheld, unread
from moefuse.passes.match.whole_stacks import consider, packed_in, unpacked_by_slot

OF_HIT_EXPERTS = ("cuda",)
"""Devices where the op is quicker than a program that unpacks only experts with tokens. In PyTorch alone it does what such a loop does, and
no quicker; and weights that slots choose Inductor unpacks as it multiplies, of one token in a hundredth of the time."""
_COLLECTIVES = ("_c10d_functional::", "c10d::", "_dtensor::", "torch.distributed.")
_SHARDED = ("DTensor", "AsyncCollectiveTensor")


def foreign(ctx: Context, node: Node) -> Lost | None:
    """A refusal for a weight, or what is computed from it, that is a tensor subclass with an encoding of its own."""
    kind = type(tensor(node))
    plain = (torch.Tensor, torch.nn.Parameter, _torch_private.FakeTensor)
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
            found = found if found is None or found.code != "quantised" else _held(ctx, region, leaf, found)
            if found is not None:
                return found
    plain = next((leaf.source for leaf in held_leaves(region.expr) if leaf.held and leaf.held.encoding.activation is None), None)
    lost = None if plain is None or ctx.given.by_row.isdisjoint(region.nodes) else _not_wanted(ctx, region, region.nodes)
    if plain is not None and lost is not None:
        return packed(ctx, region.anchor, fake(plain).dtype, lost.details["detail"])
    for leaf in weight_leaves(region.expr):
        dtype = packed_in(ctx, leaf)
        if dtype is None:
            continue
        fewer = _one_by_one(ctx, region, leaf)
        if not fewer and not _in_turn(region, leaf):
            if unpacked_by_slot(region, leaf):
                return packed(
                    ctx, region.anchor, dtype, "each slot takes its own, which the compiler unpacks as it multiplies: that is quicker here"
                )
            consider(ctx, region, leaf)
            continue
        lost = _not_wanted(
            ctx, region, leaf.parts, by_slot=is_supposed(ctx, leaf), in_turn=not fewer and region.domain == "selected"
        ) or unread(ctx, leaf)
        if lost is not None:
            why = "for every call, and here a call may need fewer of them" if fewer else "at once"
            detail = (
                f"the program unpacks them one by one; fused, all {region.num_experts} would be {why}; "
                f"they are not multiplied as they are, for {lost.details['detail']}"
            )
            return packed(ctx, region.anchor, dtype, detail)
    return None


def needed(ctx: Context, region: Region) -> bool:
    """Whether a region is fused only with its weights as they are held."""
    leaves = [leaf for leaf in weight_leaves(region.expr) if packed_in(ctx, leaf) is not None]
    return any(_one_by_one(ctx, region, leaf) or _in_turn(region, leaf) for leaf in leaves)


def _in_turn(region: Region, leaf: Leaf) -> bool:
    """Whether the program has one expert's weights at a time in memory: in a loop, but for backward, which wants all of them."""
    value = tensor(region.value)
    return bool(leaf.parts) and not (value is not None and value.requires_grad)


def _one_by_one(ctx: Context, region: Region, leaf: Leaf) -> bool:
    """Whether a call of the program may unpack fewer experts than there are.

    One that runs every expert unpacks all of them itself, and each may have a token.
    """
    slots = region.routing.num_tokens * region.routing.top_k
    enough = isinstance(slots, int) and slots >= region.num_experts
    return is_supposed(ctx, leaf) or (bool(leaf.parts) and not (enough and ctx.given.skipped.isdisjoint(leaf.parts)))


def _held(ctx: Context, region: Region, leaf: Leaf, found: Lost) -> Lost | None:
    """A refusal for weights of a class of their own, if it is not known how that holds them, or nothing is won by it."""
    lost = _not_wanted(ctx, region, region.nodes)
    if lost is None:
        return unheld(ctx, leaf, region.num_experts)
    return ctx.lost("quantised", found.node, detail=f"{found.details['detail']}; {lost.details['detail']}")


def _not_wanted(ctx: Context, region: Region, nodes: Collection[Node], *, by_slot: bool = False, in_turn: bool = False) -> Lost | None:
    """Why weights that are unpacked one by one are not even read."""
    value = tensor(region.value)
    device = "cpu" if value is None else value.device.type
    if not ctx.given.packed:
        return ctx.lost("encoding-unknown", region.anchor, detail="`quantised` is off")
    if device not in OF_HIT_EXPERTS and (by_slot or not ctx.given.skipped.isdisjoint(nodes)):
        return ctx.lost("encoding-unknown", region.anchor, detail=f"on {device} no kernel is quicker than to unpack those that have tokens")
    if device not in OF_HIT_EXPERTS and in_turn:
        return ctx.lost("encoding-unknown", region.anchor, detail=f"on {device} no kernel is quicker than to unpack them in turn")
    return None


def packed(ctx: Context, node: Node, dtype: torch.dtype | None, detail: str) -> Lost:
    """A refusal for quantised weights."""
    return ctx.lost("encoding-unknown", node, dtype=str(dtype).removeprefix("torch."), detail=detail)


__all__ = ["between", "encoded", "foreign", "needed", "packed"]
