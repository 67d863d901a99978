"""Weights of all ranks in one tensor, and the gradients of such a tensor back to the ranks: what a region that is not fused runs.

Experts: L slots on each of P ranks; expert e is in slot ``place[e]``. A rank with fewer experts has empty slots behind its own.

Slices: a dimension of N consists of equal blocks (two, where gate and up projection stand one behind the other), and of each block every
rank has its part, in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.runtime.collectives import all_gather, all_to_all
from moefuse.runtime.groups import Group
from moefuse.runtime.ranks import sum_ranks
from moefuse.runtime.transports.allgather import padded


def all_rows(group: Group, local: Tensor, place: Tensor, slots: int) -> Tensor:
    """[<=L, ...] to [E, ...]."""
    every = local.new_empty((group.size * slots, *local.shape[1:]))
    all_gather(every, padded(local, slots, 0), group.process_group)
    return every.index_select(0, place)


def own_rows(group: Group, grad: Tensor, place: Tensor, slots: int, held: int) -> Tensor:
    """[E, ...] on each rank to [held, ...]: the sum over ranks of the rows that this one holds."""
    sent = grad.new_zeros((group.size * slots, *grad.shape[1:])).index_copy_(0, place.long(), grad)
    every = torch.empty_like(sent)
    all_to_all(every, sent, group.process_group)
    return sum_ranks(every, group.size, held)


def all_slices(group: Group, local: Tensor, axis: int, blocks: int) -> Tensor:
    """[.., N / P, ..] to [.., N, ..] along ``axis``."""
    mine = local.movedim(axis, 0).contiguous()
    every = mine.new_empty((group.size * mine.shape[0], *mine.shape[1:]))
    all_gather(every, mine, group.process_group)
    whole = every.view(group.size, blocks, -1, *mine.shape[1:]).transpose(0, 1).reshape(every.shape)
    return whole.movedim(0, axis).contiguous()


def own_slice(group: Group, grad: Tensor, axis: int, blocks: int) -> Tensor:
    """[.., N, ..] on each rank to [.., N / P, ..] along ``axis``: the sum over ranks of what this one holds."""
    rows = grad.movedim(axis, 0)
    parts = rows.reshape(blocks, group.size, -1, *rows.shape[1:]).transpose(0, 1).contiguous()
    every = torch.empty_like(parts)
    all_to_all(every, parts, group.process_group)
    total = sum_ranks(every.flatten(0, 1), group.size, blocks)
    return total.reshape(-1, *rows.shape[1:]).movedim(0, axis).contiguous()


def slice_of(whole: Tensor, axis: int, blocks: int, rank: int, world: int) -> Tensor:
    """What a rank holds, [.., N / P, ..], of ``whole`` [.., N, ..], in memory of its own."""
    rows = whole.movedim(axis, 0)
    parts = rows.reshape(blocks, world, -1, *rows.shape[1:])[:, rank]
    return parts.flatten(0, 1).movedim(0, axis).clone(memory_format=torch.contiguous_format)
