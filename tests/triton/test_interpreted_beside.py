"""Transfers of a spread layer beside what needs none of them: two ranks in one process, in Triton's interpreter.

Ranks are threads of which one runs at a time, from barrier to barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.runtime.transports import symm as runtime
from tests.triton import interpreted_case
from tests.triton.test_interpreted_symm import Group

plans_in_parts = interpreted_case.plans_in_parts

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning", "ignore::RuntimeWarning")
H, I, K = 32, 16, 2  # noqa: E741
BYTES = 1 << 15


class Ranks:
    """Threads, one for each rank, of which one runs at a time: a barrier hands over."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.meeting = threading.Barrier(world, timeout=120)
        self.running = threading.Lock()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * self.world

        def one(rank: int) -> None:
            try:
                with self.running:
                    found[rank] = work(rank)
            except BaseException as error:
                found[rank] = error
                self.meeting.abort()

        threads = [threading.Thread(target=one, args=(rank,), name=str(rank)) for rank in range(self.world)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        for error in found:
            if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return found

    def meet(self) -> None:
        self.running.release()
        self.meeting.wait()
        self.running.acquire()


def memories(world: int) -> list[runtime.Buffers]:
    """For each rank, full of NaN but for what barriers are made of."""
    head = 2 * BYTES
    memory = [torch.full((head + runtime._HEAD * runtime._ALIGN,), 0xFF, dtype=torch.uint8) for _ in range(world)]
    bases = torch.tensor([m.data_ptr() for m in memory], dtype=torch.int64)
    made = []
    for mine in memory:
        flags = mine[head + 3 * runtime._ALIGN :].zero_().view(torch.int32).view(4, -1)
        one = torch.ones(1, dtype=torch.int32)
        made.append(runtime.Buffers(mine, bases, torch.zeros(2, dtype=torch.int32), flags, BYTES, 0, None, memory, one))
    return made


@pytest.fixture
def ranks(plans_in_parts: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Ranks]:
    """Barriers are those of threads."""
    from moefuse.kernels.triton.provide import symm

    here: list[Ranks] = []

    def met(*_: Any) -> bool:
        here[0].meet()
        return True

    def passed(at: Any, how: Any) -> None:
        here[0].meet()
        at.turn[1] = at.turn[0]
        at.turn[0] += 1

    def wait_for_all(at: Any, how: Any) -> None:
        here[0].meet()
        others = [r for r in range(how.size) if r != how.rank]
        assert at.flags[3, others].tolist() == [1] * len(others), "rows are read that nobody has sent"
        at.flags[3] = 0

    monkeypatch.setattr(symm, "met", met)
    monkeypatch.setattr(symm, "wait_for_all", wait_for_all)
    monkeypatch.setattr(symm, "passed", passed)

    def make(world: int) -> Ranks:
        here[:] = [Ranks(world)]
        return here[0]

    return make


class Layer:
    """Experts of all ranks, tokens of each, and what a rank has of them."""

    def __init__(self, counts: list[int], experts: int, dtype: torch.dtype, seed: int, on_input: bool = False) -> None:
        source = torch.Generator().manual_seed(seed)
        self.counts, self.world, self.most = counts, len(counts), max(counts)
        self.slots = -(-experts // self.world)
        self.w_in = (torch.randn(experts, 2 * I, H, generator=source) / 6).to(dtype)
        self.w_out = (torch.randn(experts, H, I, generator=source) / 4).to(dtype)
        self.x = [torch.randn(n, H, generator=source).to(dtype) for n in counts]
        self.w = [torch.rand(n, K, generator=source).to(dtype) for n in counts]
        self.ids = [torch.randint(-1, experts + 1, (n, K), generator=source) for n in counts]
        self.place, self.on_input = torch.arange(experts, dtype=torch.int32), on_input

    def call(self, rank: int, own: slice) -> ExpertsCall:
        lists = [self.w_in[own]], [], [self.w_out[own]], [], [], []
        return ExpertsCall.of(self.x[rank], self.ids[rank], self.w[rank], *lists, weight_on_input=self.on_input)

    def spread(self, rank: int, small: runtime.Buffers, held: runtime.Buffers) -> Tensor:
        from moefuse.kernels.triton.provide import spread, symm

        call = self.call(rank, slice(rank * self.slots, (rank + 1) * self.slots))
        regions = runtime.regions([call.weights], self.world * self.most)
        way = symm.Transfer.of(self.world, rank, BYTES, 0, self.most, regions, 0)
        wire = spread.Wire.lasting(Group(rank, self.world), held, self.most, (H, call.dtype), (H, call.dtype))
        return spread.experts(call, self.place, self.slots, (symm.Shared(small.bases, small.turn, small.flags), way), wire)

    def wanted(self, rank: int) -> Tensor:
        return self.call(rank, slice(None)).reference()


@pytest.mark.parametrize(
    ("counts", "experts", "on_input", "copied"),
    [([6, 2], 3, False, 0.0), ([5, 0, 4], 5, True, 2.0), ([3], 2, False, 2.0)],
)
def test_equal_to_one_process(counts: list[int], experts: int, on_input: bool, copied: float, ranks: Any, monkeypatch: Any) -> None:
    """Rows by copies and by kernels, two layers on the same memory, ranks with more tokens and none, fewer experts, ids of nobody; and in
    order, which a rank may do by itself, the same bit for bit."""
    from moefuse.kernels.triton.host import arriving
    from moefuse.kernels.triton.provide import spread

    monkeypatch.setattr(spread, "COPIED", copied)
    takes = arriving.takes
    layers = [Layer(counts, experts, torch.float16, seed, on_input) for seed in range(2)]
    found: dict[str, list[Any]] = {}
    for how, beside in (("beside", range(8)), ("the first in order", range(1, 8))):
        threads, small, held = ranks(len(counts)), memories(len(counts)), memories(len(counts))
        monkeypatch.setattr(arriving, "takes", lambda plan, beside=beside: takes(plan) and int(threading.current_thread().name) in beside)
        found[how] = threads.run(lambda rank, small=small, held=held: [layer.spread(rank, small[rank], held[rank]) for layer in layers])
    for rank in range(len(counts)):
        for n, layer in enumerate(layers):
            wanted = layer.wanted(rank)
            assert found["beside"][rank][n].shape == wanted.shape
            torch.testing.assert_close(found["beside"][rank][n], wanted, rtol=2e-2, atol=2e-2)
            assert torch.equal(found["the first in order"][rank][n], found["beside"][rank][n]), (rank, n)
