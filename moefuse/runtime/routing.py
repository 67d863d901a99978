"""From expert ids to sorted rows: the routing arrays that the ops and the portable provider share.

order [S] int64: slot numbers stably sorted by expert, slots with an invalid id last; the token of a slot is ``slot // K``.
offsets [E + 1] int64: rows [offsets[e], offsets[e + 1]) of the sorted order belong to expert e; offsets[E] counts the valid slots.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

FEW_SLOTS = 64
"""Up to this many slots are sorted in Python on a CPU: each operation of torch costs as much as some dozen of them."""

Group = tuple[int, int, int]
"""(expert, first row, end row) of one expert that has rows."""


def sort_slots(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """(order [S], offsets [E + 1]) of ids [T, K]; no host synchronisation."""
    key = ids.reshape(-1).to(torch.int64)
    key = torch.where(key < 0, num_experts, key).clamp_(max=num_experts)
    key, order = torch.sort(key, stable=True)
    return order, torch.searchsorted(key, torch.arange(num_experts + 1, device=ids.device))


def sort_few(ids: Tensor, num_experts: int) -> tuple[list[int], list[int]]:
    """(order, offsets) as :func:`sort_slots` has them, in Python."""
    by_expert: list[list[int]] = [[] for _ in range(num_experts + 1)]
    for slot, e in enumerate(ids.reshape(-1).tolist()):
        by_expert[e if 0 <= e < num_experts else num_experts].append(slot)
    offsets = [0, *accumulate(map(len, by_expert[:-1]))]
    return [slot for slots in by_expert for slot in slots], offsets


def groups_of(offsets: list[int]) -> list[Group]:
    """The experts that have rows, in order."""
    return [(e, a, b) for e, (a, b) in enumerate(pairwise(offsets)) if b > a]


def groups_of_ids(ids: list[int], num_experts: int) -> tuple[list[int], list[Group]]:
    """(valid slots by expert, groups), for so few slots that Python is quicker than five ops.

    Experts come in the order of their first slot, so slots with different experts stay in slot order and need no gather afterwards.
    """
    by_expert: dict[int, list[int]] = {}
    for slot, e in enumerate(ids):
        if 0 <= e < num_experts:
            by_expert.setdefault(e, []).append(slot)
    order: list[int] = []
    groups: list[Group] = []
    for e, slots in by_expert.items():
        groups.append((e, len(order), len(order) + len(slots)))
        order += slots
    return order, groups


def chunked(groups: list[Group], max_rows: int) -> list[list[Group]]:
    """Consecutive groups taken together while they have at most ``max_rows`` rows (a larger group stands alone)."""
    chunks: list[list[Group]] = []
    start = 0
    for group in groups:
        if not chunks or group[2] - start > max_rows:
            chunks.append([])
            start = group[1]
        chunks[-1].append(group)
    return chunks


def positions(order: Tensor) -> Tensor:
    """Inverse of ``order``: the sorted row [S] of each slot."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
