"""torch.distributed's collectives under one name each, for every version that moefuse runs on."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moefuse import _torch_private

_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_gather(every: Tensor, mine: Tensor, group: Any) -> None:
    """[N, ...] of each of P ranks, in their order, into [P * N, ...]."""
    _gather(_bytes(every), _bytes(mine), group=group)


def all_gathers(pairs: Sequence[tuple[Tensor, Tensor]], group: Any) -> None:
    """Several of (every [P * N, ...], mine [N, ...]), in one launch where the backend can."""
    with _torch_private.coalesced(group, pairs[0][1].device) if len(pairs) > 1 else contextlib.nullcontext():
        for every, mine in pairs:
            _gather(_bytes(every), _bytes(mine), group=group)


def all_to_all(every: Tensor, parts: Tensor, group: Any, come: list[int] | None = None, go: list[int] | None = None) -> None:
    """[P * N, ...]: the r-th N rows go to rank r, and those that come from rank r are the r-th of ``every``.

    Args:
        come, go: rows from and to each rank; None for equally many.
    """
    if come is not None and is_fake(group):
        every.zero_()  # it would check splits that nobody else has agreed to
        return
    dist.all_to_all_single(_bytes(every), _bytes(parts), come, go, group=group)


def all_reduce(total: Tensor, group: Any) -> None:
    """The sum over ranks, in place."""
    dist.all_reduce(total, group=group)


def broadcast(rows: Tensor, rank: int, group: Any) -> None:
    """What the ``rank``-th of a group has, in place."""
    if not is_fake(group):
        dist.broadcast(_bytes(rows), group=group, group_src=rank)


def is_fake(group: Any) -> bool:
    """Whether a group has no other ranks: one of torch's, for a process that asks what one of many would do."""
    return bool(dist.get_backend(group) == "fake")


def _bytes(rows: Tensor) -> Tensor:
    """The same memory; what is one byte wide as bytes, for no backend has every such dtype."""
    return rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
