"""Each row to the ranks that need it, once, and nothing else: exact splits, for which the host waits once in each dispatch.

A token goes to a rank that has at least one of its experts, however many of them. The handle of a dispatch is ``splits`` [2P] on the host,
how many rows go to each rank and how many come, and ``index`` [n], the tokens of the rows that go, ordered by rank. Partial sums come back
over the same splits and are added for a token in the order of ranks, in the accumulation dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.runtime.collectives import all_to_all, is_fake
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.peers import running
from moefuse.runtime.ranks import slots_of
from moefuse.runtime.transports.base import Dispatched, check_tokens, scaled
from moefuse.runtime.words import REFUSED, numbers_of


class _AllToAll:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        return -1

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        sent: Any = torch.library.get_ctx().new_dynamic_size(min=0)
        return [ids.new_empty((2 * terms.group.size,), dtype=torch.int64, device="cpu"), ids.new_empty((sent,), dtype=torch.int64)]

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        check_tokens(terms, ids.shape[0])
        group = terms.group
        wanted = destinations(ids, place, slots, group.size)
        splits = torch.cat(exchanged_counts(terms, wanted.sum(1)))
        # In memory of its own: on a GPU it would be a view that begins at its own length, which compiled code takes for aligned.
        handle = [splits, wanted.nonzero()[:, 1].clone(memory_format=torch.contiguous_format)]
        out = _there(group, [*rows, ids], handle)
        return Dispatched(out[:-1], out[-1], handle)

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        exchanged_counts(terms, ids.new_full((terms.group.size,), REFUSED, dtype=torch.int64))

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        rows = scaled(rows, scale)
        return _there(terms.group, rows, handle)

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        to, by = _splits(handle)
        return list(scaled([_back(terms.group, part, handle[1], to, by, tokens) for part in rows], scale))


def destinations(ids: Tensor, place: Tensor | None, slots: int, world: int) -> Tensor:
    """[P, T] bool: which ranks have an expert of each token. ids [T, K]; ids outside of [0, E) are nobody's."""
    tokens = ids.shape[0]
    if place is None:
        return ids.new_ones((world, tokens), dtype=torch.bool)
    found = slots_of(ids, place)
    owners = torch.where(found >= 0, found // max(slots, 1), world)
    return ids.new_zeros((world + 1, tokens), dtype=torch.bool).scatter_(0, owners.t(), True)[:world]


def exchanged_counts(terms: Terms, sent: Tensor) -> tuple[Tensor, Tensor]:
    """[P, ...] each, on the host: what this rank says and what it is told; row r is for, and of, rank r.

    Every number travels as a word (``runtime/words.py``). Nobody of a fake group sends anything.
    """
    # Words have a group of their own where it takes such tensors: a rank that is elsewhere is waited for, and nothing taken for a word.
    call, group = running(terms), terms.group.host if sent.device.type == "cpu" else terms.group.process_group
    said = sent + call.word(0)
    told = torch.full_like(said, call.word(0))
    call.said = True
    if not is_fake(group):
        all_to_all(told, said, group)
    both = torch.stack([said, told]).cpu()
    call.heard(both[1].view(len(sent), -1)[:, 0].tolist())
    return numbers_of(both[0]), numbers_of(both[1])


def _splits(handle: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    numbers = handle[0].tolist()
    half = len(numbers) // 2
    return numbers[:half], numbers[half:]


def _there(group: Group, rows: Sequence[Tensor], handle: Sequence[Tensor]) -> list[Tensor]:
    """[T, F] each to [R, F]."""
    to, by = _splits(handle)
    every = [mine.new_empty((sum(by), *mine.shape[1:])) for mine in rows]
    for out, mine in zip(every, rows, strict=True):
        all_to_all(out, mine.index_select(0, handle[1]), group.process_group, by, to)
    return every


def _back(group: Group, part: Tensor, index: Tensor, to: list[int], by: list[int], tokens: int) -> Tensor:
    """[R, F] to [T, F]: rows of the tokens ``index`` [n] come back, ``to[r]`` of them from rank r."""
    every = part.new_empty((len(index), *part.shape[1:]))
    all_to_all(every, part.contiguous(), group.process_group, to, by)
    total = part.new_zeros((tokens, *part.shape[1:]), dtype=accumulation_dtype(part.dtype))
    for rows, values in zip(index.split(to), every.split(to), strict=True):
        total.index_add_(0, rows, values.to(total.dtype))  # a token stands once among the rows of a rank
    return total.to(part.dtype)


TRANSPORT = _AllToAll()
