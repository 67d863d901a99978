"""Transfers of a spread layer beside what needs none of them: two ranks in one process, in Triton's interpreter.

Ranks are threads of which one runs at a time, from barrier to barrier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
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

    def wait_for(at: Any, how: Any, rank: int, piece: int) -> None:
        here[0].meet()
        place = rank * symm.PIECES + piece
        assert at.flags[3, place] == 1, "rows are read that nobody has sent"
        at.flags[3, place] = 0

    monkeypatch.setattr(symm, "met", met)
    monkeypatch.setattr(symm, "wait_for", wait_for)
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


class Trained(Layer):
    """The op as it is differentiated, on memory that the ranks share."""

    def __init__(self, *how: Any, bias: bool = False, trained: Sequence[bool] = (True,) * 3) -> None:
        super().__init__(*how)
        self.biases = [torch.randn(len(self.w_out), H, generator=torch.Generator().manual_seed(5)).to(self.w_out.dtype)] if bias else []
        self.trained = trained

    def step(self, rank: int, own: slice, op: Callable[..., Tensor], trained: bool = True) -> list[Tensor]:
        """The output, and the gradients of tokens, routing weights, and weights of experts."""
        lists = [t.clone().requires_grad_(trained) for t in (self.w_in[own], self.w_out[own], *(b[own] for b in self.biases))]
        x, w = (t.clone().requires_grad_() for t in (self.x[rank], self.w[rank]))
        out = op(x, self.ids[rank], w, lists[:1], [], lists[1:2], [], [], lists[2:], weight_on_input=self.on_input)
        source = torch.Generator().manual_seed(40 + rank)
        pulled = torch.autograd.grad(out, [x, w, *(lists if trained else [])], torch.randn(out.shape, generator=source).to(out.dtype))
        return [out.detach(), *pulled]

    def spread_step(self, rank: int, terms: str, recompute: bool) -> list[Tensor]:
        if recompute:
            self.without_result(rank, terms)

        def op(*data: Any, **options: Any) -> Tensor:
            how = {"place": self.place, "slots": self.slots, "terms": terms, "layer": "a layer", "recompute": recompute}
            found: Tensor = torch.ops.moefuse.ep_experts.default(*data, **how, **options)
            return found

        return self.step(rank, slice(rank * self.slots, (rank + 1) * self.slots), op, self.trained[rank])

    def without_result(self, rank: int, terms: str) -> None:
        """Forward as it is computed again: equal routing and hidden activations, and no rows go back."""
        call = self.call(rank, slice(rank * self.slots, (rank + 1) * self.slots)).pack()
        once, again = (
            torch.ops.moefuse.ep_experts_forward.default(*call, self.place, self.slots, terms, "a layer", result=result)
            for result in (True, False)
        )
        assert list(again[0].shape) == [0, H]
        for i, (mine, its) in enumerate(zip(once[2:], again[2:], strict=True)):
            assert torch.equal(mine, its), i

    def wanted_steps(self) -> list[list[Tensor]]:
        """Of each rank, by all experts at once: those of experts are the mean of what all ranks' tokens give, which is their sum here."""
        double = [t.double() for t in (self.w_in, self.w_out, *self.biases)]
        saved, self.w_in, self.w_out, self.biases = (self.w_in, self.w_out, self.biases), double[0], double[1], double[2:]
        own, self.x, self.w = (self.x, self.w), [x.double() for x in self.x], [w.double() for w in self.w]
        try:
            found = [
                self.step(rank, slice(None), lambda *data, **how: ExpertsCall.of(*data, **how).reference()) for rank in range(self.world)
            ]
        finally:
            (self.w_in, self.w_out, self.biases), (self.x, self.w) = saved, own
        summed = [sum(parts) / self.world for parts in zip(*(f[3:] for f in found), strict=True)]
        own_experts = [slice(rank * self.slots, (rank + 1) * self.slots) for rank in range(self.world)]
        return [[*f[:3], *(t[own] for t in summed if wanted)] for f, own, wanted in zip(found, own_experts, self.trained, strict=False)]


TRAINED = {
    "by copy engines": ([6, 2], 4, False, 0.0, {}),
    "by kernels": ([6, 2], 4, False, 2.0, {}),
    "three ranks, one without tokens": ([5, 0, 4], 5, False, 0.0, {}),
    "weights on the input: gradients come in order": ([6, 2], 3, True, 0.0, {}),
    "biases: gradients come in order": ([3, 4], 4, False, 0.0, {"bias": True}),
    "nothing of the experts is trained on one rank": ([3, 4], 4, False, 0.0, {"trained": [True, False]}),
    "hidden activations computed again": ([3, 4], 4, False, 0.0, {}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers on the same memory: values and gradients of one process, and those of transfers in order bit for bit."""
    from moefuse.kernels.triton.provide import spread, training
    from moefuse.ops import autograd
    from moefuse.runtime import groups, providers
    from moefuse.runtime.groups import Terms
    from moefuse.runtime.transports import beside

    counts, experts, on_input, copied, how = TRAINED[name]
    monkeypatch.setattr(spread, "COPIED", copied)
    monkeypatch.setattr(autograd, "IN_PARTS", ("cpu",))
    for op in ("experts_forward", "experts_hidden", "experts_backward_rows", "experts_backward_in", "experts_backward_out"):
        monkeypatch.setitem(providers.PROVIDERS, op, [providers.Provider("interpreted", lambda *_: None, getattr(training, op))])
    monkeypatch.setattr("moefuse.ops.experts.forward", training.experts_forward)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layers = [Trained(counts, experts, torch.float16, seed, on_input, **how) for seed in range(2)]
    world = len(counts)
    made = [groups.register(f"trained {rank}", tuple(range(world)), rank, object(), None) for rank in range(world)]
    texts = [Terms(group.name, "symm", most=max(counts)).text for group in made]
    found: dict[bool, list[Any]] = {}
    for ahead in (True, False)[: 1 + name.startswith("by ")]:
        threads, held = ranks(world), {use: memories(world) for use in ("", "beside")}
        monkeypatch.setattr(beside, "LEAST", 1 if ahead else 1 << 40)
        monkeypatch.setattr(runtime, "buffers", lambda group, device, needed, use="", held=held: held[use][group.rank])
        found[ahead] = threads.run(lambda rank: [layer.spread_step(rank, texts[rank], "again" in name) for layer in layers])
    for group in made:
        del groups._groups[group.name]
    wanted = [layer.wanted_steps() for layer in layers]
    for rank in range(world):
        for n in range(2):
            for mine, true in zip(found[True][rank][n], wanted[n][rank], strict=True):
                torch.testing.assert_close(mine.double(), true, rtol=1e-2, atol=1e-2)
            for other in found.values():
                assert all(torch.equal(a, b) for a, b in zip(found[True][rank][n], other[rank][n], strict=True)), (rank, n)
