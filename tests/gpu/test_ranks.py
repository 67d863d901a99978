"""Experts on two GPUs: NCCL and symmetric memory against one process, with all gradients; CUDA graphs with tokens that change."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.ops.meaning.encoding import Encoding, Rounding
from moefuse.runtime.transports import beside, symm
from tests.cpu import ops_case as cases
from tests.cpu.coded_case import coded, rounded_before
from tests.dist import balanced, copied, equal, layers
from tests.dist.equal import Case
from tests.dist.workers import Workers
from tests.gpu.test_coded import on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
REPLAYS = 1000


CASES = {
    "stacked, uneven": Case(layers.Stacked, (5, 7)),
    "a list, nothing on one rank": Case(layers.Listed, (9, 0)),
    "grouped products": Case(layers.Grouped, (5, 7)),
    "most tokens known": Case(layers.Shared, (3, 8), how={"max_tokens": 11}),
    "the same tokens": Case(layers.Stacked, (6, 6), how={"tokens": "replicated"}),
    "slices": Case(layers.Interleaved, (5, 7), how={"experts": "tp"}),
    "exact splits": Case(layers.Listed, (5, 7), how={"transport": "all_to_all"}),
    "exact splits, nothing on one rank": Case(layers.Stacked, (0, 7), how={"transport": "all_to_all"}),
    "shared memory": Case(layers.Stacked, (3, 8), how={"transport": "symm", "max_tokens": 11}),
    "shared memory, a list, a table": Case(layers.Listed, (9, 0), how={"transport": "symm", "max_tokens": 9, "placement": [1, 0, 1]}),
    "shared memory, grouped, equal": Case(layers.Grouped, (6, 6), how={"transport": "symm", "max_tokens": "equal"}),
    "shared memory, slices": Case(layers.Transposed, (5, 2), how={"transport": "symm", "max_tokens": 7, "experts": "tp"}),
    "shared memory, computed again": Case(layers.Stacked, (5, 7), how={"transport": "symm", "max_tokens": 7}, checkpointed=True),
    "shared memory, float64": Case(layers.OnInput, (5, 7), how={"transport": "symm", "max_tokens": 7}, dtype=torch.float64),
}


@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(two: Workers, name: str) -> None:
    """Through AOTAutograd; sums in float32 are in another order on a GPU."""
    case = replace(CASES[name], device="cuda")
    for found in two.run(equal.run, case):
        assert found.worst <= (1e-12 if case.dtype == torch.float64 else 2e-5), found
        assert len(found.report.fused) == 2, found.report


@pytest.mark.parametrize("transport", ["allgather", "symm"])
def test_replays(two: Workers, transport: str) -> None:
    """A CUDA graph replayed with other tokens, fewer on one rank, memory poisoned, and eager calls in between."""
    for worst in two.run(replays, transport):
        assert worst <= 2e-5


def replays(rank: int, transport: str) -> float:
    """The largest relative difference of outputs from one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(layers.Stacked, 6).cuda()
    model: nn.Module = copy.deepcopy(single)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    how: dict[str, Any] = {"transport": transport, "max_tokens": 33}
    moefuse.parallelize(model, mesh, **how)
    run = torch.compile(model, backend="moefuse", dynamic=False)
    count = 33 if rank else 17
    x = torch.randn(count, layers.H, device="cuda")
    source = torch.Generator("cuda").manual_seed(rank)
    with torch.no_grad():
        for _ in range(3):
            run(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x)
        worst = torch.zeros((), device="cuda")
        for step in range(REPLAYS):
            x.copy_(torch.randn(x.shape, device="cuda", generator=source))
            out.fill_(float("nan"))
            del_me = torch.full((1 << 20,), float("nan"), device="cuda")
            del del_me
            graph.replay()
            if step % 7 == 0:
                wanted = single(x)
                worst = torch.maximum(worst, (out - wanted).abs().max() / wanted.abs().max())
            if step % 50 == 0:
                run(x)  # not in the graph
    return worst.item()


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("tokens", [6, 2304])
def test_the_first_call_is_for_a_graph(two: Workers, tokens: int, train: bool) -> None:
    """``mode="reduce-overhead"`` of a model that has never run: buffers come into being in the call that warms up, whose pool may keep
    nothing; torch keeps tables of addresses beside them. With 2304 tokens transfers have buffers of their own."""
    for worst in two.run(first_in_a_graph, tokens, train):
        assert worst <= 3e-2


def first_in_a_graph(rank: int, tokens: int, train: bool) -> float:
    """The relative difference of outputs and gradients from those of all experts, a token's with a larger one than nine in ten: in
    bfloat16 a few choose other experts."""
    before = layers.H, layers.I, beside.LEAST
    layers.H, layers.I, beside.LEAST = 256, 128, 1 << 20
    torch._dynamo.reset()
    symm._buffers.clear()
    torch.manual_seed(0)
    single = layers.Model(layers.Stacked, 6).cuda().bfloat16()
    model: nn.Module = copy.deepcopy(single)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    moefuse.parallelize(model, mesh, max_tokens=tokens, transport="symm")
    run, worst = torch.compile(model, backend="moefuse", dynamic=False, mode="reduce-overhead"), 0.0
    for _ in range(4):
        model.zero_grad()  # gradients that are kept are memory of the graph
        x = torch.randn(tokens, layers.H, device="cuda").bfloat16()
        mine, theirs = x.clone().requires_grad_(train), x.clone().requires_grad_(train)
        torch.compiler.cudagraph_mark_step_begin()
        found = [run(mine), single(theirs)]
        if train:
            for out in found:
                out.float().square().mean().backward()
            found += [mine.grad, theirs.grad]
        for ours, wanted in zip(found[::2], found[1::2], strict=True):
            off, size = (ours - wanted).float().norm(dim=-1), wanted.float().norm(dim=-1).mean()
            worst = max(worst, (off / size).quantile(0.9).item())
    layers.H, layers.I, beside.LEAST = before
    return worst


@pytest.mark.parametrize(
    ("kind", "transport", "near"), [(balanced.Once, "symm", 2e-5), (balanced.Exact, "symm", 2e-2), (balanced.Exact, "allgather", 2e-2)]
)
def test_bit_for_bit_while_experts_move(two: Workers, kind: type[nn.Module], transport: str, near: float) -> None:
    """A CUDA graph beside that of a model whose experts stay. Every expert moves in every three balances, and the last one is the 25th.

    ``near``: to one process, where a routing weight that is rounded may be on the other side of a step.
    """
    for wrong, off, moves in two.run(balanced.kept, kind, {"transport": transport}, device="cuda", steps=REPLAYS, every=REPLAYS // 25):
        assert wrong == 0
        assert off <= near
        assert min(map(min, moves)) >= 8, moves


@pytest.mark.parametrize(
    ("transport", "count", "width", "mode"),
    [("symm", 9, 8, None), ("symm", 9, 8, "reduce-overhead"), ("allgather", 9, 8, None), ("symm", 2304, 2048, None)],
)
def test_copies_of_the_hottest(two: Workers, transport: str, count: int, width: int, mode: str | None) -> None:
    """Transfers beside kernels with 2304 tokens, too. A CUDA graph that is captured reads no copies, and they may not be made behind it."""
    for found in two.run(copied.on_gpus, transport, count, width, mode):
        assert {what: off for what, off in found["off"].items() if not off <= 1e-4} == {}
        assert found["read"] == [True] * 2
        assert ("a CUDA graph was captured of first" in found["refused"]) == (mode is None), found["refused"]


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("how", [{"transport": "all_to_all"}, {}, {"transport": "symm", "max_tokens": 1021}], ids=["exact", "all", "symm"])
def test_odd_numbers_of_tokens(two: Workers, how: dict[str, Any], train: bool) -> None:
    """Through Inductor, which asserts on GPUs alone that results of operations are where their fakes are: at multiples of 16 bytes."""
    for tokens in ((1021, 1021), (1021, 7), (1, 1021)):
        case = Case(layers.Stacked, tokens, how=how, behind="inductor", train=train, device="cuda")
        for found in two.run(equal.run, case):
            assert found.worst <= 2e-5, found
            assert len(found.report.fused) == 2, found.report


@pytest.mark.parametrize("how", [{}, {"transport": "all_to_all"}, {"max_tokens": 8}], ids=["any", "exact", "static"])
def test_tokens_want_gradients_on_one_rank(two: Workers, how: dict[str, Any]) -> None:
    """NCCL has no errors for collectives that do not fit: it hangs, or mixes them."""
    for worst in two.run(wants_on_one_rank, how):
        assert worst <= 2e-5


def wants_on_one_rank(rank: int, how: dict[str, Any]) -> float:
    """The largest relative difference of the gradients of experts from those of one process."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(layers.Stacked, 6).cuda()
    model: nn.Module = copy.deepcopy(single)
    moefuse.parallelize(model, init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"], **how)
    every = [torch.randn(n, layers.H, generator=torch.Generator().manual_seed(n)).cuda() for n in (5, 7)]
    run = torch.compile(model, backend="moefuse")
    for _ in range(2):
        model.zero_grad()
        single.zero_grad()
        run(every[rank].clone().requires_grad_(rank == 0)).square().mean().backward()
        sum((single(x).square().mean() for x in every), torch.zeros((), device="cuda")).div(2).backward()
    worst = 0.0
    for name in ("first.gate_up", "first.down", "second.gate_up", "second.down"):
        layer, _, part = name.partition(".")
        grad: Any = model.get_submodule(layer)._parameters[part].grad  # type: ignore[union-attr]
        wanted = getattr(single.get_submodule(layer), part).grad
        worst = max(worst, ((grad.full_tensor() - wanted).abs().max() / wanted.abs().max()).item())
    return worst


@pytest.mark.parametrize("most", [64, "equal"])
def test_from_records(two: Workers, most: Any) -> None:
    """Other tokens in every step, in memory full of NaN, past the calls in which Python makes the records; and what C++ has then."""
    for worst, played in two.run(from_records, most):
        assert worst <= 2e-5
        assert played >= 10


def from_records(rank: int, most: Any) -> tuple[float, int]:
    """(The largest relative difference of outputs and gradients from one process, kinds of calls that are played)."""
    from moefuse.kernels.triton.launch import player

    torch._dynamo.reset()
    torch.manual_seed(0)
    single = layers.Model(layers.Stacked, 6).cuda()
    model: nn.Module = copy.deepcopy(single)
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    moefuse.parallelize(model, mesh, max_tokens=most, transport="symm")
    run = torch.compile(model, backend="moefuse", dynamic=False)
    worst, drawn = 0.0, torch.Generator().manual_seed(3)
    for step in range(7):
        every = [torch.randn(n, layers.H, generator=drawn).cuda() for n in ((64, 64) if most == "equal" else (5, 64))]
        model.zero_grad()
        single.zero_grad()
        filled = torch.full((1 << 20,), float("nan"), device="cuda")
        del filled
        out = run(every[rank])
        out.square().mean().backward()
        wanted = [single(x) for x in every]
        sum((y.square().mean() for y in wanted), torch.zeros((), device="cuda")).div(2).backward()
        with torch.no_grad():
            again = run(every[rank])
        for name in ("first.gate_up", "first.down", "second.gate_up", "second.down"):
            layer, _, part = name.partition(".")
            grad: Any = model.get_submodule(layer)._parameters[part].grad  # type: ignore[union-attr]
            theirs = getattr(single.get_submodule(layer), part).grad
            worst = max(worst, ((grad.full_tensor() - theirs).abs().max() / theirs.abs().max()).item())
        for found in (out, again):
            worst = max(worst, ((found - wanted[rank]).abs().max() / wanted[rank].abs().max()).item())
        if step == 2:  # weights that have changed are those of the next call
            for made in (single, model):
                with torch.no_grad():
                    for p in made.parameters():
                        p.mul_(1.25)
    known = player.active()
    return worst, 0 if known is None else int(known.library.moefuse_known())


@pytest.mark.parametrize("transport", ["allgather", "all_to_all", "symm"])
def test_tokens_in_8_bits(two: Workers, transport: str) -> None:
    """Float8 experts that round their rows make the same bits of tokens that come rounded; twice, the second time from records."""
    for same in two.run(in_8_bits, transport):
        assert same == [True] * 8


def in_8_bits(rank: int, transport: str) -> list[bool]:
    """Whether it is so: for few tokens and many, unequal numbers of them."""
    ops, experts = torch.ops.moefuse, 6
    how = {"max_tokens": 700} if transport == "symm" else {}
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    model = layers.Model(layers.Stacked, experts).cuda()
    layer = moefuse.parallelize(model, mesh, transport=transport, **how).layers[0]
    (terms,), slots, place = [t.text for t in layer.terms], layer.placement.slots, model.first._moefuse_place
    encoding, found = Encoding("e4m3", (128, 128), activation=Rounding("e4m3", 128)), []
    for count in (30, 700 - 40 * rank):
        case = cases.Case(count, 256, 384, slots, 2, 256, dtype=torch.bfloat16)
        args, _, options = coded(case, encoding, None, encoding)
        x, _, weights, *rest = on_gpu(args)
        ids = torch.randint(0, experts, (count, 2), device="cuda")
        sent, named = rounded_before([x, ids, weights, *rest], options)
        for _ in range(2):
            results = []
            for rows, given in ((x, options), (sent[0], named)):
                arrived, scores, local, *handle = ops.ep_dispatch([rows, weights], ids, place, slots, terms, "first")
                y = ops.experts_extended(arrived, local, scores, *rest, **given)
                results.append((y[(local >= 0).any(1)], ops.ep_combine(y, handle, count, terms, "first")))
            found += [torch.equal(a, b) for a, b in zip(*results, strict=True)]
    return found


def test_unequal_numbers_are_loud() -> None:
    """Rows would not be where the other rank looks for them: the device stops, which nobody can take for a result."""
    workers = Workers(2, timeout=60, cuda=True)
    try:
        for done, text in workers.try_to(unequal):
            assert done
            assert "CUDA" in text, text
    finally:
        workers.close()


def unequal(rank: int) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: nn.Module = layers.Model(layers.Stacked, 6).cuda()
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"]
    moefuse.parallelize(model, mesh, max_tokens="equal", transport="symm")
    run = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        run(torch.randn(16, layers.H, device="cuda"))
        torch.cuda.synchronize()
        try:
            run(torch.randn(16 - rank, layers.H, device="cuda"))
            torch.cuda.synchronize()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"
