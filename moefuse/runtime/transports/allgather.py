"""All rows to all ranks, and partial sums back: equal counts, no host sync, what NCCL and gloo both have.

Partial sums go to their rank by an equal all-to-all and are added there in the order of ranks, in the accumulation dtype: the bytes of a
reduce-scatter, with the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops.reference import accumulation_dtype
from moefuse.runtime.collectives import all_gather, all_to_all
from moefuse.runtime.groups import Group, Terms


class _AllGather:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        if terms.most == "any":
            return -1
        return terms.group.size * (tokens if terms.most == "equal" else int(terms.most))

    def send(self, group: Group, rows: Sequence[Tensor], fills: Sequence[float], most: int) -> list[Tensor]:
        out = []
        for mine, fill in zip(rows, fills, strict=True):
            every = mine.new_empty((group.size * most, *mine.shape[1:]))
            all_gather(every, padded(mine, most, fill), group.process_group)
            out.append(every)
        return out

    def give_back(self, group: Group, rows: Sequence[Tensor], tokens: int) -> list[Tensor]:
        return [self._sum(group, part, tokens) for part in rows]

    def _sum(self, group: Group, part: Tensor, tokens: int) -> Tensor:
        """[P * M, F] to [T, F]."""
        every = torch.empty_like(part, memory_format=torch.contiguous_format)
        all_to_all(every, part.contiguous(), group.process_group)
        return ordered_sum(every.view(group.size, -1, *part.shape[1:])[:, :tokens])


def padded(rows: Tensor, most: int, fill: float) -> Tensor:
    """[T, F] to [M, F], contiguous."""
    count = rows.shape[0]
    if count == most:
        return rows.contiguous()
    out = rows.new_empty((most, *rows.shape[1:]))
    out[:count] = rows
    out[count:] = fill
    return out


def ordered_sum(parts: Tensor) -> Tensor:
    """[P, ...] to [...]: added in order in the accumulation dtype, rounded once."""
    wide = accumulation_dtype(parts.dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


TRANSPORT = _AllGather()
