"""What is done to rows of several ranks beside their transport, for every device: the meaning of what GPU kernels do in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.meaning.reference import accumulation_dtype


def slots_of(ids: Tensor, place: Tensor) -> Tensor:
    """[T, K] int64: the slot of each expert, ``rank * L + local``; -1 for ids outside of [0, E)."""
    if not place.shape[0]:
        return torch.full_like(ids, -1, dtype=torch.int64)
    wide = ids.long()
    inside = (wide >= 0) & (wide < place.shape[0])
    return torch.where(inside, place[wide.clamp(0, place.shape[0] - 1)].long(), -1)


def local_ids(ids: Tensor, place: Tensor, first: int, slots: int) -> Tensor:
    """[T, K]: the number of each expert among the ``slots`` from slot ``first`` on; -1 for one that is not there. ``place`` [E]."""
    local = slots_of(ids, place) - first
    here = (local >= 0) & (local < slots)
    return torch.where(here, local, -1).to(numbers_dtype(ids.dtype))


def sum_ranks(parts: Tensor, world: int, tokens: int) -> Tensor:
    """[P * M, ...] to [T, ...]: the first T rows of each of P = ``world`` ranks, added in order in the accumulation dtype, rounded once."""
    first, *rest = parts.unflatten(0, (world, parts.shape[0] // world))[:, :tokens].unbind()
    total: Tensor = first.to(accumulation_dtype(parts.dtype), copy=True)
    for part in rest:
        total += part
    return total.to(parts.dtype)


def numbers_dtype(ids: torch.dtype) -> torch.dtype:
    """Of local numbers of experts. (``torch.promote_types`` is an operation, which a record of a call would have to repeat.)"""
    return torch.int64 if ids == torch.int64 else torch.int32
