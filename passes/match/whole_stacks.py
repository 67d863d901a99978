"""Quantised weights that a program unpacks whether they are needed or not: a stack as a whole, or every expert of a loop that runs all.

The op reads them as they are held where they are read and that is quicker. Where not, they stay what the program makes of them, which is
right too, and the report says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import location, tensor
from moefuse.passes.graph.op_classes import SIZE_QUERIES
from moefuse.passes.graph.symbols import hint
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.unpacking import unpacked_from, unpacking
from moefuse.passes.ir.expr import Leaf, weight_leaves
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.coded_weights import unread

READ = {"cuda": 64.0, "cuda 9": 1024.0, "cpu": 0.5}
"""Devices (of CUDA also by the first number of the compute capability), and up to how many slots for each expert the op on what is stored
is quicker than to unpack all of it first.

PyTorch alone takes experts with tokens one by one: with 4 of 32 a tenth of the time, with all of them up to twice. Kernels for every CUDA
device multiply many rows at less than half the speed of unpacked weights, which pays for unpacking from about 64 rows of an expert on.
Those for Hopper were 1.06x to 2.9x as quick as to unpack first at all sizes that were measured, the last of which is this one
(docs/design/gpu-kernels.md, "Quantised weights").
"""
LIVE = ("cuda",)
"""Devices where it is taken for calls of any number of tokens."""
BY_SLOT = {"cpu": 8}
"""Devices, and up to how many slots for each expert, where Inductor is quicker with ``W[ids]`` of a stack that a program unpacks: it
unpacks each slot's as it multiplies, and makes no W. With 4 of 32 experts a seventieth of the time that it takes to make W."""
_MATRIX = 2


@dataclass
class _Stay:
    """Why weights stay what the program makes of them."""

    why: dict[Node, str] = field(default_factory=dict)


def packed_in(ctx: Context, leaf: Leaf) -> torch.dtype | None:
    """The dtype of what the program unpacks the weights of a projection from; None where it does not unpack them."""
    if leaf.held is not None:
        return None  # its storage is what the program multiplies
    node = (leaf.parts or (leaf.source,))[0]
    if ctx.calls.get(node) is None:
        return None
    made = unpacking(ctx).of(ctx, node)
    return unpacked_from(ctx, node) if made is None else made.packed


def consider(ctx: Context, region: Region, leaf: Leaf) -> None:
    """Read a projection's weights, if that is of use; else they stay."""
    if not ctx.given.packed or len(leaf.order) != _MATRIX or not _quicker(region):
        return
    nodes = leaf.parts or (leaf.source,)
    other = next((user for node in nodes for user in _readers(ctx, node) if user not in region.nodes), None)
    if other is not None:
        where = "the graph gives them out" if other.op == "output" else f"they are read at {location(other)} too"
        ctx.scratch(_Stay).why[nodes[0]] = where
        return
    lost = unread(ctx, leaf)
    if lost is not None:
        ctx.scratch(_Stay).why[nodes[0]] = lost.details["detail"]


def _quicker(region: Region) -> bool:
    """Whether the op is quicker than what the program does."""
    value = tensor(region.value)
    device = torch.device("cpu") if value is None else value.device
    slots = region.routing.num_tokens * region.routing.top_k
    if not isinstance(slots, int):
        return device.type in LIVE
    return slots <= most_slots(device) * region.num_experts


def most_slots(device: torch.device) -> float:
    """Slots for each expert up to which the op is quicker on a device."""
    most = READ.get(device.type, 0.0)
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return most
    return READ.get(f"cuda {torch.cuda.get_device_capability(device)[0]}", most)


def unpacked_by_slot(region: Region, leaf: Leaf) -> bool:
    """Whether a program is quicker as it is, for it takes each slot's weights out of a stack that it unpacks."""
    value = tensor(region.value)
    most = None if value is None else BY_SLOT.get(value.device.type)
    slots = region.routing.num_tokens * region.routing.top_k
    return leaf.stacked and region.domain == "slots" and most is not None and isinstance(slots, int) and slots <= most * region.num_experts


def stay(ctx: Context, region: Region, lost: Lost) -> None:
    """Say that the weights of a region stay what the program makes of them, though they were read."""
    for leaf in weight_leaves(region.expr):
        if packed_in(ctx, leaf) is not None:
            ctx.scratch(_Stay).why[(leaf.parts or (leaf.source,))[0]] = str(lost.details.get("detail", lost.code))


def notes(ctx: Context, fused: Sequence[Region]) -> list[str]:
    """A note for each fused region that reads weights of which the program unpacks all in each call, and why that is so."""
    why, found = ctx.scratch(_Stay).why, []
    for region in fused:
        stays = [leaf for leaf in weight_leaves(region.expr) if (leaf.parts or (leaf.source,))[0] in why]
        if stays:
            nodes = [node for leaf in stays for node in leaf.parts or (leaf.source,)]
            size = f"{sum(map(_bytes, dict.fromkeys(nodes))) / 2**20:.2g} MiB"
            found.append(
                f"quantised expert weights are unpacked as a whole in each call ({size}) at {location(nodes[0])}, "
                f"as without moefuse: {why[nodes[0]]}"
            )
    return found


def _readers(ctx: Context, node: Node) -> Iterator[Node]:
    """Who reads a tensor, by any name, and neither makes it nor asks for its sizes."""
    for name in ctx.memory.storages(node):
        for alias in ctx.aliases.get(name, ()):
            for user in alias.users:
                call = ctx.calls.get(user)
                makes = ctx.storage.get(user) is name or user in ctx.writes.get(name, ())
                if not makes and (call is None or call.name not in SIZE_QUERIES):
                    yield user


def _bytes(node: Node) -> int:
    value = tensor(node)
    return 0 if value is None else math.prod(int(hint(s) or 0) if not isinstance(s, int) else s for s in value.shape) * value.dtype.itemsize


__all__ = ["BY_SLOT", "READ", "consider", "most_slots", "notes", "packed_in", "stay", "unpacked_by_slot"]
