"""All rows to all ranks, and partial sums back: equal counts, no host sync, what NCCL and gloo both have.

Partial sums go to their rank by an equal all-to-all and are added there in the order of ranks, in the accumulation dtype: the bytes of a
reduce-scatter, with the same bits every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.runtime import providers
from moefuse.runtime.collectives import all_gathers, all_to_all
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.peers import refuse
from moefuse.runtime.transports.base import Dispatched, known_arrivals, most_tokens, scaled


class _AllGather:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        return known_arrivals(terms, tokens)

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        return []

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        most, group = most_tokens(terms, ids.shape[0]), terms.group
        *every, all_ids = _every(group, [*rows, ids], [*([0] * len(rows)), -1], most)
        return Dispatched(every, all_ids, [])

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        refuse(terms)

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        rows = scaled(rows, scale)
        return _every(terms.group, rows, [0] * len(rows), arrivals // terms.group.size)

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        return [_sum(terms.group, part, tokens, scale) for part in rows]


def _every(group: Group, rows: Sequence[Tensor], fills: Sequence[float], most: int) -> list[Tensor]:
    """[T, F] each to [P * M, F]."""
    every = [mine.new_empty((group.size * most, *mine.shape[1:])) for mine in rows]
    sent = [padded(mine, most, fill) for mine, fill in zip(rows, fills, strict=True)]
    if rows:
        all_gathers(list(zip(every, sent, strict=True)), group.process_group)
    return every


def _sum(group: Group, part: Tensor, tokens: int, scale: float) -> Tensor:
    """[P * M, F] to [T, F]."""
    every = torch.empty_like(part, memory_format=torch.contiguous_format)
    all_to_all(every, part.contiguous(), group.process_group)
    summed: Tensor = providers.run("sum_ranks", every, group.size, tokens)
    return summed if scale == 1 else summed.mul_(scale)


def padded(rows: Tensor, most: int, fill: float) -> Tensor:
    """[T, F] to [M, F], contiguous."""
    count = rows.shape[0]
    if count == most:
        return rows.contiguous()
    out = rows.new_empty((most, *rows.shape[1:]))
    out[:count] = rows
    out[count:] = fill
    return out


TRANSPORT = _AllGather()
