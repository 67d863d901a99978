"""Weights of all ranks in one tensor, and the gradients of such a tensor back to the ranks: what a region that is not fused runs.

L slots on each of P ranks; expert e is in slot ``place[e]``. A rank with fewer experts has empty slots behind its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.runtime.collectives import all_gather, all_to_all
from moefuse.runtime.groups import Group
from moefuse.runtime.transports.allgather import ordered_sum, padded


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
    return ordered_sum(every.view(group.size, slots, *grad.shape[1:]))[:held].contiguous()
