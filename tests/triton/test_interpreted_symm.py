"""Rows through shared memory, in Triton's interpreter: ranks are objects of one process, and a schedule says who runs when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moefuse.parallel.placement import placed
from moefuse.runtime.transports.symm import Buffers, regions

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")
SIZE = 1 << 14
H, K, E = 5, 2, 7


@dataclass
class Group:
    rank: int
    size: int


def memories(world: int, sets: int = 2) -> list[Buffers]:
    """A buffer for each rank, full of NaN. ``sets=1``: both are the same memory."""
    memory = [torch.full((2 * SIZE,), 0xFF, dtype=torch.uint8) for _ in range(world)]
    bases = torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64)
    return [
        Buffers(m, bases, torch.zeros(2, dtype=torch.int32), torch.zeros(world, dtype=torch.int32), SIZE if sets == 2 else 0)
        for m in memory
    ]


def shared(held: Buffers) -> Any:
    from moefuse.kernels.triton.provide.symm import Shared

    return Shared(held.bases, held.turn, held.flags)


def transfer(size: int, rank: int, most: int, spans: tuple[int, ...], set_bytes: int = SIZE) -> Any:
    from moefuse.kernels.triton.provide.symm import Transfer

    return Transfer.of(size, rank, set_bytes, 0, most, spans, 0)


class Layer:
    """Dispatch, "experts" that scale a token by each local expert's number, combine: a rank's steps between barriers."""

    def __init__(self, group: Group, held: Buffers, owners: list[int], most: int, x: Tensor, w: Tensor, ids: Tensor, table: bool) -> None:
        self.group, self.held, self.most = group, held, most
        self.rows, self.ids = (x, w), ids
        placement = placed(owners, E, group.size)
        self.place = torch.tensor(placement.table(), dtype=torch.int32) if table else None
        self.slots = placement.slots
        self.mine = placement.ranks[group.rank] if table else tuple(range(E))
        self.out: Any = None

    def steps(self) -> list[Any]:
        return [self.push, "barrier", self.take, self.push_back, "barrier", self.sums]

    def how(self, spans: tuple[int, ...]) -> Any:
        return transfer(self.group.size, self.group.rank, self.most, spans, self.held.set_bytes)

    def push(self) -> None:
        from moefuse.kernels.triton.provide import symm

        self.spans = regions(self.rows, self.group.size * self.most)
        self.came = symm.push_tokens(self.rows, self.ids, self.place, self.slots, shared(self.held), self.how(self.spans))

    def take(self) -> None:
        from moefuse.kernels.triton.provide import symm

        (x, w), ids, self.took, self.to = self.came
        symm.take_tokens((x, w), ids, self.took, shared(self.held), self.how(self.spans))
        assert torch.equal(self.took > 0, (ids >= 0).any(1))
        assert not x[self.took == 0].any()
        assert not w[self.took == 0].any()
        numbers = torch.tensor([*self.mine, 0], dtype=x.dtype)[ids]
        share = 1.0 if self.place is not None else 1 / self.group.size
        self.y = x * (torch.where(ids >= 0, numbers * w, 0).sum(1, keepdim=True) * share).to(x.dtype)
        self.y[self.took == 0] = float("nan")  # nobody may read these

    def push_back(self) -> None:
        from moefuse.kernels.triton.provide import symm

        symm.push_back((self.y,), self.took, shared(self.held), self.how((0,)))

    def sums(self) -> None:
        from moefuse.kernels.triton.provide import symm

        (self.out,) = symm.take_sums((self.y,), self.to, shared(self.held), self.how((0,)))

    def wanted(self) -> Tensor:
        x, w = self.rows
        inside = (self.ids >= 0) & (self.ids < E)
        return x * torch.where(inside, self.ids * w, 0).sum(1, keepdim=True)


def run(layers: list[list[Layer]], order: random.Random) -> None:
    """All ranks' layers, one after another on each; a barrier lets nobody through before all have come."""
    steps = [[step for layer in mine for step in layer.steps()] for mine in layers]
    at, come = [0] * len(steps), [0] * len(steps)
    while any(a < len(s) for a, s in zip(at, steps, strict=True)):
        rank = order.choice([r for r, s in enumerate(steps) if at[r] < len(s)])
        step = steps[rank][at[rank]]
        if step != "barrier":
            step()
            at[rank] += 1
            continue
        passed = sum(s == "barrier" for s in steps[rank][: at[rank]])
        come[rank] = max(come[rank], passed + 1)
        if min(come) > passed:
            at[rank] += 1


def draw(seed: int, world: int, counts: list[int], many: int, sets: int = 2, table: bool = True) -> list[list[Layer]]:
    source = torch.Generator().manual_seed(seed)
    owners = [e % world for e in range(E)]
    held = memories(world, sets)
    out: list[list[Layer]] = [[] for _ in range(world)]
    for _ in range(many):
        for rank in range(world):
            x = torch.randint(-8, 8, (counts[rank], H), generator=source).float()
            w = torch.randint(1, 4, (counts[rank], K), generator=source).float()
            ids = torch.randint(-1 if table else 0, E + int(table), (counts[rank], K), generator=source)
            out[rank].append(Layer(Group(rank, world), held[rank], owners, max(max(counts), 1), x, w, ids, table))
    return out


@settings(max_examples=12, deadline=None)
@given(world=st.integers(1, 4), seed=st.integers(0, 1 << 30), data=st.data(), table=st.booleans())
def test_layers_on_any_schedule(world: int, seed: int, data: st.DataObject, table: bool) -> None:
    """Uneven and no tokens, ids of nobody and out of range, poisoned memory, ranks far ahead: exact, for all are small integers."""
    counts = data.draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    layers = draw(seed, world, counts, 3, table=table)
    run(layers, random.Random(seed))
    for mine in layers:
        for layer in mine:
            if table:
                assert torch.equal(layer.out, layer.wanted())
            else:
                torch.testing.assert_close(layer.out, layer.wanted())


def test_one_set_of_buffers_is_not_enough() -> None:
    """The test above would see it: a rank writes to what another one has not read yet."""
    wrong = 0
    for seed in range(6):
        layers = draw(seed, 2, [2, 2], 3, sets=1)
        run(layers, random.Random(seed))
        wrong += any(not torch.equal(layer.out, layer.wanted()) for mine in layers for layer in mine)
    assert wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
def test_rows_of_any_dtype_are_moved(dtype: torch.dtype) -> None:
    """Scales and adapter numbers that travel with a token, and gradients: zeros where a rank takes nothing."""
    from moefuse.kernels.triton.provide import symm

    held = memories(2)
    rows = [torch.randint(0, 7, (3, 4)).to(dtype) for _ in range(2)]
    to = [torch.tensor([3, 0, 2]), torch.tensor([1, 3, 2])]
    came = [
        symm.push_rows((mine,), who, shared(buffer), transfer(2, rank, 3, (256,)))
        for rank, (mine, who, buffer) in enumerate(zip(rows, to, held, strict=True))
    ]
    every = torch.cat([r.float() for r in rows])
    for rank, (found, buffer) in enumerate(zip(came, held, strict=True)):
        taken = (torch.cat(to) >> rank & 1).int()
        symm.take_rows(found, taken, shared(buffer), transfer(2, rank, 3, (256,)))
        assert found[0].dtype == dtype
        assert torch.equal(found[0].float(), every * taken[:, None])


def test_sums_are_rounded_once() -> None:
    """In the order of ranks in float32: 1 + 2^-9 + 2^-9 is more than 1 in bfloat16, added one by one it is not."""
    from moefuse.kernels.triton.provide import symm

    held = memories(3)
    values = [torch.full((3, 4), value, dtype=torch.bfloat16) for value in (1.0, 2**-9, 2**-9)]
    all_of_them = torch.ones(3, dtype=torch.int32)
    for rank, (value, buffer) in enumerate(zip(values, held, strict=True)):
        symm.push_back((value,), all_of_them, shared(buffer), transfer(3, rank, 1, (0,)))
    to = torch.tensor([7], dtype=torch.int64)
    (found,) = symm.take_sums((values[1],), to, shared(held[1]), transfer(3, 1, 1, (0,)))
    assert torch.equal(found, torch.full((1, 4), 1 + 2**-8).bfloat16())


@pytest.mark.parametrize("own", [True, False])
def test_bytes_travel(own: bool) -> None:
    """Tokens that are rounded before (``moefuse::row_codes``): rows of bytes, of any number, beside their routing weights."""
    from moefuse.kernels.triton.provide import symm

    held, most, source = memories(2), 4, torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (2, most, 48), generator=source, dtype=torch.uint8)
    w, ids = torch.rand(2, most, K, generator=source), torch.randint(0, E, (2, most, K), generator=source)
    place = torch.tensor([e % 2 * 4 + e // 2 for e in range(E)], dtype=torch.int32) if own else None
    spans, came = regions((x[0], w[0]), 2 * most), []
    for rank in range(2):
        how = transfer(2, rank, most, spans)
        came.append(symm.push_tokens((x[rank], w[rank]), ids[rank], place, 4, shared(held[rank]), how))
    for rank in range(2):
        (rows, weights), numbers, took, _ = came[rank]
        symm.take_tokens((rows, weights), numbers, took, shared(held[rank]), transfer(2, rank, most, spans))
        there = (ids % 2 == rank).any(-1).flatten() if own else torch.ones(2 * most, dtype=torch.bool)
        assert torch.equal(took > 0, there)
        assert torch.equal(rows[there], x.flatten(0, 1)[there])
        assert torch.equal(weights[there], w.flatten(0, 1)[there])
        assert not rows[~there].any()
