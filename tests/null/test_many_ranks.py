"""Dispatch and combine by all-gather on 8 and 64 ranks in one process: the values, by torch's ``LocalTensorMode`` over a fake group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from moefuse.runtime import groups
from moefuse.runtime.groups import Terms
from moefuse.runtime.ranks import slots_of
from moefuse.runtime.transports import allgather

local_tensor = pytest.importorskip("torch.distributed._local_tensor", reason="torch 2.11 simulates no ranks")
H, K, MOST = 4, 3, 5


@pytest.fixture(params=[8, 64])
def world(request: pytest.FixtureRequest) -> Iterator[int]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()
    groups._groups.clear()


def test_values(world: int) -> None:
    """Expert e multiplies by e + 1; two experts on each rank in round robin, ids of none, and padding up to MOST, which is never read."""
    experts = 2 * world
    terms = Terms(groups.register("ep", tuple(range(world)), 0, dist.group.WORLD, dist.group.WORLD).name, most=MOST)
    place = torch.tensor([e % world * 2 + e // world for e in range(experts)])
    generator = torch.Generator().manual_seed(world)
    ids = [torch.randint(-1, experts + 1, (MOST - 1, K), generator=generator) for _ in range(world)]
    x = [torch.randint(-9, 10, (MOST - 1, H), generator=generator).double() for _ in range(world)]  # sums are exact
    with local_tensor.LocalTensorMode(world):
        tokens, wanted, rank = (local_tensor.LocalTensor(dict(enumerate(parts))) for parts in (x, ids, map(torch.tensor, range(world))))
        arrived = allgather.TRANSPORT.dispatch(terms, [tokens], wanted, place, 2)
        slots = slots_of(arrived.ids, place)
        here = torch.where(slots // 2 == rank, arrived.ids + 1, 0)  # slots of ids of none are -1
        y = arrived.rows[0] * here.sum(1, keepdim=True)
        (out,) = allgather.TRANSPORT.give_back(terms, [y], arrived.handle, MOST - 1)
        (again,) = allgather.TRANSPORT.send(terms, [tokens], arrived.handle, world * MOST)
    for rank_, (mine, theirs) in enumerate(zip(x, ids, strict=True)):
        inside = torch.where((theirs >= 0) & (theirs < experts), theirs + 1, 0)
        assert torch.equal(_of(out, rank_), mine * inside.sum(1, keepdim=True))
        assert torch.equal(_of(again, rank_).view(world, MOST, H)[:, : MOST - 1], torch.stack(x))
        assert not _of(again, rank_).view(world, MOST, H)[:, MOST - 1].any()


def _of(parts: Tensor, rank: int) -> Tensor:
    found: Tensor = parts._local_tensors[rank]  # type: ignore[attr-defined]
    return found
