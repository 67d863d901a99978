"""Exact splits for ranks of several hosts: a row crosses to a host once, however many of its ranks need it, and is forwarded inside of it.

A rank has a rail to each host: the rank there with the same place among those of its host (modulo their number, where hosts have unequal
numbers). A token goes over the rail to each host with one of its experts, the own one too, and from there to the ranks that have them.
What comes back is added at the rail, in the order of the host's ranks and in the accumulation dtype, rounded once, and sent home as one
row for each host; these are added in the order of rails, and rounded once again.

Both hops are all-to-alls of the whole group whose splits are zero but for the rails, or but for the own host. The counts of both travel in
one exchange: a rank tells each rank how many rows it has for its host, and how many of them each rank of that host needs. The host waits
for them, once in a dispatch. The handle is ``splits`` [4P] on the host, (rows to, rows from) each rank of either hop; ``out`` [n], the
tokens of the rows that go over rails, ordered by rank; and ``near`` [m], which of the rows that came over rails go on, ordered by rank.

After DeepEP's normal mode and DeepSpeed's deduplication by node, which forward in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.runtime.collectives import all_to_all
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.transports.all_to_all import destinations, exchanged_counts
from moefuse.runtime.transports.base import Dispatched, check_tokens, scaled
from moefuse.runtime.words import REFUSED


@dataclass(frozen=True)
class Rails:
    """What a rank has to know of hosts. D of them, n the most ranks of any.

    Attributes:
        hosts: [P], the number of each rank's host.
        most: n.
        seats: [P], ``host * n +`` a rank's place among those of its host.
        mine: [D], the rank over which this one reaches each host.
        near: the ranks of this one's host.
        over: [P], over which rank of this one's host each rank reaches it.
    """

    hosts: tuple[int, ...]
    rank: int
    most: int
    seats: tuple[int, ...]
    mine: tuple[int, ...]
    near: tuple[int, ...]
    over: tuple[int, ...]

    def counts(self, wanted: Tensor) -> Tensor:
        """[P, 1 + n]: for each rank, how many tokens go to its host, and to each rank of that. ``wanted`` [P, T]: who needs a token."""
        seated = self.by_host(wanted)
        numbers = torch.cat([seated.any(1).sum(-1, keepdim=True), seated.sum(-1)], 1)
        return numbers.index_select(0, _index(self.hosts, wanted.device))

    def by_host(self, wanted: Tensor) -> Tensor:
        """[D, n, T] of [P, T]; False where a host has fewer ranks."""
        seated = wanted.new_zeros((len(self.mine) * self.most, wanted.shape[1]))
        seated.index_copy_(0, _index(self.seats, wanted.device), wanted)
        return seated.view(len(self.mine), self.most, -1)

    def splits(self, sent: Tensor, came: Tensor) -> Tensor:
        """[4P]: rows to and from each rank over rails, then inside of the host. sent, came: [P, 1 + n], what each was told, or tells."""
        world = len(self.hosts)
        out, back, on, by = (torch.zeros(world, dtype=torch.int64, device="cpu") for _ in range(4))
        mine, near = torch.tensor(self.mine, device="cpu"), torch.tensor(self.near, device="cpu")
        out[mine] = sent[mine, 0]
        over = torch.tensor(self.over, device="cpu")
        here = over == self.rank
        back[here] = came[here, 0]
        on[near] = came[here, 1 : 1 + len(near)].sum(0)
        by.index_add_(0, over, came[:, 1 + self.near.index(self.rank)])
        return torch.cat([out, back, on, by])


@functools.lru_cache(maxsize=64)
def rails(hosts: tuple[int, ...], rank: int) -> Rails:
    """Those of one rank; ``hosts``: [P], numbered from 0 on."""
    ranks: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    place = []
    for r, host in enumerate(hosts):
        place.append(len(ranks[host]))
        ranks[host].append(r)
    most, near = max(map(len, ranks)), ranks[hosts[rank]]
    seats = tuple(host * most + place[r] for r, host in enumerate(hosts))
    mine = tuple(there[place[rank] % len(there)] for there in ranks)
    return Rails(hosts, rank, most, seats, mine, tuple(near), tuple(near[at % len(near)] for at in place))


@functools.lru_cache(maxsize=256)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


class _Rails:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        return -1

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        out, near = (torch.library.get_ctx().new_dynamic_size(min=0) for _ in range(2))
        splits = ids.new_empty((4 * terms.group.size,), dtype=torch.int64, device="cpu")
        return [splits, ids.new_empty((out,), dtype=torch.int64), ids.new_empty((near,), dtype=torch.int64)]

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        check_tokens(terms, ids.shape[0])
        group = terms.group
        known = rails(group.hosts, group.rank)
        wanted = destinations(ids, place, slots, group.size)
        sent = known.counts(wanted)
        splits = known.splits(*exchanged_counts(terms, sent))
        to, by, on, over = splits.view(4, -1).tolist()
        order = sorted(range(len(known.mine)), key=known.mine.__getitem__)
        reached = known.by_host(wanted).any(1).index_select(0, _index(tuple(order), ids.device))
        out = _columns(reached, sum(to))
        *halfway, all_ids = _moved(group, [part.index_select(0, out) for part in (*rows, ids)], to, by)
        local = destinations(all_ids, place, slots, group.size).index_select(0, _index(known.near, ids.device))
        near = _columns(local, sum(on))
        *arrived, all_ids = _moved(group, [part.index_select(0, near) for part in (*halfway, all_ids)], on, over)
        return Dispatched(arrived, all_ids, [splits, out, near])

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        known = rails(terms.group.hosts, terms.group.rank)
        exchanged_counts(terms, ids.new_full((terms.group.size, 1 + known.most), REFUSED, dtype=torch.int64))

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        rows = scaled(rows, scale)
        splits, out, near = handle
        to, by, on, over = splits.view(4, -1).tolist()
        halfway = _moved(terms.group, [part.index_select(0, out) for part in rows], to, by)
        return _moved(terms.group, [part.index_select(0, near) for part in halfway], on, over)

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        splits, out, near = handle
        to, by, on, over = splits.view(4, -1).tolist()
        sums = [_added(part, near, on, sum(by)) for part in _moved(terms.group, rows, over, on)]
        return list(scaled([_added(part, out, to, tokens) for part in _moved(terms.group, sums, by, to)], scale))


def _columns(which: Tensor, count: int) -> Tensor:
    """[count]: the columns of the True of [D, T], row by row; ``count`` of them, which the host knows already."""
    return torch.nonzero_static(which, size=count)[:, 1].clone(memory_format=torch.contiguous_format)


def _moved(group: Group, parts: Sequence[Tensor], to: list[int], by: list[int]) -> list[Tensor]:
    """Rows ordered by the rank that they go to, each to those that come, ordered by the rank that they come from."""
    out = [part.new_empty((sum(by), *part.shape[1:])) for part in parts]
    for every, part in zip(out, parts, strict=True):
        all_to_all(every, part.contiguous(), group.process_group, by, to)
    return out


def _added(part: Tensor, index: Tensor, counts: list[int], tokens: int) -> Tensor:
    """[n, F] to [tokens, F]: row ``index[i]`` gets row i; ``counts`` rows of each rank, added in their order and rounded once."""
    total: Any = part.new_zeros((tokens, *part.shape[1:]), dtype=accumulation_dtype(part.dtype))
    for rows, values in zip(index.split(counts), part.split(counts), strict=True):
        total.index_add_(0, rows, values.to(total.dtype))  # a row stands once among those of a rank
    return total.to(part.dtype)  # type: ignore[no-any-return]


TRANSPORT = _Rails()
