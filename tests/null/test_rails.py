"""Rows over rails, as numbers: what ranks send is what others expect, and a row crosses to a host once. Up to a thousand ranks."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from torch import Tensor

from moefuse.runtime.transports.all_to_all import destinations
from moefuse.runtime.transports.rails import Rails, rails


@st.composite
def worlds(draw: st.DrawFn, most: int = 48) -> tuple[int, ...]:
    """Hosts of ranks in any order, with any number of ranks, numbered as they come."""
    names = draw(st.lists(st.integers(0, draw(st.integers(0, 9))), min_size=1, max_size=most))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def blocks(world: int, per_host: int) -> tuple[int, ...]:
    return tuple(rank // per_host for rank in range(world))


def needs(world: int, tokens: list[int], seed: int, top_k: int = 4) -> list[Tensor]:
    """[P, T] of each rank: which ranks need its tokens; two experts on each, and some ids of none."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.arange(2 * world, dtype=torch.int32)
    ids = [torch.randint(-1, 2 * world + 1, (count, top_k), generator=generator) for count in tokens]
    return [destinations(mine, place, 2, world) for mine in ids]


def split(hosts: tuple[int, ...], wanted: list[Tensor]) -> tuple[list[Rails], Tensor]:
    """[P, 4, P]: the splits of every rank."""
    every = [rails(hosts, rank) for rank in range(len(hosts))]
    sent = torch.stack([known.counts(mine) for known, mine in zip(every, wanted, strict=True)])
    found = [known.splits(sent[rank], sent[:, rank]).view(4, -1) for rank, known in enumerate(every)]
    return every, torch.stack(found)


def check(hosts: tuple[int, ...], tokens: list[int], seed: int) -> None:
    world, at = len(hosts), torch.tensor(hosts)
    wanted = needs(world, tokens, seed)
    every, splits = split(hosts, wanted)
    over, back, on, by = splits.unbind(1)
    assert torch.equal(over, back.t())
    assert torch.equal(on, by.t())
    assert not on[at[:, None] != at[None, :]].any(), "the second hop leaves no host"
    # What crosses is a row for each token and other host; what arrives, one for each token and rank that needs it.
    pairs = [set(zip(mine.nonzero()[:, 1].tolist(), at[mine.nonzero()[:, 0]].tolist(), strict=True)) for mine in wanted]
    assert [int(over[r][at != at[r]].sum()) for r in range(world)] == [sum(h != hosts[r] for _, h in pairs[r]) for r in range(world)]
    assert by.sum(1).tolist() == torch.cat(wanted, 1).sum(1).tolist()
    # A rank has one rail to a host, of the same place where hosts are of one size.
    for rank, known in enumerate(every):
        assert [hosts[r] for r in known.mine] == list(range(max(hosts) + 1))
        assert known.mine[hosts[rank]] == rank
        assert set(over[rank].nonzero().flatten().tolist()) <= set(known.mine)


@given(worlds(), st.data())
def test_splits_agree(hosts: tuple[int, ...], data: st.DataObject) -> None:
    counts = st.one_of(st.just(0), st.integers(0, 9))
    tokens = data.draw(st.lists(counts, min_size=len(hosts), max_size=len(hosts)))
    check(hosts, tokens, data.draw(st.integers(0, 99)))


def test_large_worlds() -> None:
    """Sixteen hosts of eight; 341 of three and one of one."""
    check(blocks(128, 8), [rank % 5 for rank in range(128)], 1)
    check(blocks(1024, 3), [3] * 1024, 2)


def test_rails_of_hosts_of_one_size_are_the_ranks_of_one_place() -> None:
    """Each network card has the traffic of its own GPU."""
    hosts = blocks(64, 8)
    for rank in range(64):
        assert rails(hosts, rank).mine == tuple(8 * host + rank % 8 for host in range(8))
        assert rails(hosts, rank).over == tuple(8 * hosts[rank] + r % 8 for r in range(64))


def test_smaller_hosts_share_their_rails() -> None:
    """Three ranks on the first host, one on the second: all of the first one's rows come to it, and its own go to the first rank."""
    hosts = (0, 0, 0, 1)
    assert [rails(hosts, rank).mine for rank in range(4)] == [(0, 3), (1, 3), (2, 3), (0, 3)]
    assert rails(hosts, 3).over == (3, 3, 3, 3)
    assert rails(hosts, 0).over == (0, 1, 2, 0)
