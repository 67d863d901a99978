"""Transfers of many tokens beside what needs none of them, on two GPUs: bit for bit as in order, in CUDA graphs, from records, and late."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.parallel.meshes import register
from moefuse.runtime import providers
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import beside
from tests.dist import layers
from tests.dist.workers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
NEVER = 1 << 40


@dataclass(frozen=True)
class Layer:
    """Experts of [I, H], E of them, K for a token; how many tokens each of two ranks has, M the most that it may have."""

    tokens: tuple[int, int]
    most: int
    E: int = 32
    K: int = 8
    H: int = 256
    I: int = 128  # noqa: E741
    dtype: torch.dtype = torch.bfloat16
    held: torch.dtype | None = None
    on_input: bool = False
    table: bool = True


CASES = {
    "by copy engines": Layer((2048, 2048), 2048),
    "by kernels": Layer((2048, 2048), 2048, K=1),
    "uneven": Layer((2301, 1100), 2301),
    "nothing on one rank": Layer((0, 2051), 2051),
    "weights on the input": Layer((2048, 2047), 2048, on_input=True, dtype=torch.float16),
    "experts in float32": Layer((2048, 2048), 2048, held=torch.float32),
    "few rows of an expert, in order on both": Layer((2048, 2048), 2048, E=1024, K=2),
    "slices": Layer((2048, 1999), 2048, table=False),
    "large": Layer((4096, 4096), 4096, E=128, H=2048, I=768),
}


def made(case: Layer, rank: int) -> tuple[Any, ...]:
    """(the layer with transfers beside it from so many bytes on, x, ids, routing weights, and weights of experts)."""
    mesh = register(init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"])
    source = torch.Generator("cuda").manual_seed(rank)
    local, held = case.E // 2 if case.table else case.E, case.held or case.dtype
    w_in = (torch.randn(local, 2 * case.I, case.H, device="cuda", generator=source) * 0.05).to(held)
    w_out = (torch.randn(local, case.H, case.I, device="cuda", generator=source) * 0.05).to(held)
    n = case.tokens[rank]
    x = torch.randn(n, case.H, device="cuda", generator=source).to(case.dtype)
    ids = torch.rand(n, case.E, device="cuda", generator=source).topk(case.K).indices.int()
    weights = torch.rand(n, case.K, device="cuda", generator=source).to(case.dtype)
    place = torch.arange(case.E, dtype=torch.int32, device="cuda") if case.table else None
    how: dict[str, Any] = {"place": place, "slots": local if case.table else 0, "terms": Terms(mesh, "symm", "distinct", case.most).text}

    def layer(least: int) -> Tensor:
        if least != beside.LEAST:
            providers.forget_records()
        beside.LEAST = least
        lists: list[list[Tensor]] = [[w_in], [], [w_out], [], [], []]
        op = torch.ops.moefuse.ep_experts.default
        return op(x, ids, weights, *lists, **how, layer="a layer", weight_on_input=case.on_input)  # type: ignore[no-any-return]

    return layer, x, ids, weights, w_in, w_out


@pytest.mark.parametrize("name", CASES)
def test_bit_for_bit(two: Workers, name: str) -> None:
    """As in order, with other tokens in every call, past those from which records are made; no NaN of memory that was never written."""
    for different, nans in two.run(compared, CASES[name]):
        assert not different
        assert not nans


@torch.no_grad()
def compared(rank: int, case: Layer) -> tuple[int, int]:
    layer, x, ids, *_ = made(case, rank)
    outs: list[list[Tensor]] = []
    for least in (1, NEVER):
        source, found = torch.Generator("cuda").manual_seed(7 + rank), []
        for _ in range(6):
            x.copy_(torch.randn(x.shape, device="cuda", generator=source))
            ids.copy_(torch.rand(ids.shape[0], case.E, device="cuda", generator=source).topk(case.K).indices)
            filled = torch.full((1 << 24,), float("nan"), device="cuda")
            del filled
            found.append(layer(least))
        outs.append(found)
    different = sum(not torch.equal(a, b) for a, b in zip(*outs, strict=True))
    return different, sum(int(out.isnan().any()) for out in outs[0])


@pytest.mark.parametrize("name", ["by copy engines", "by kernels", "uneven"])
def test_replays(two: Workers, name: str) -> None:
    """300 replays of a graph with three layers, beside those of a graph in order, calls that are not in a graph between them."""
    assert two.run(replayed, CASES[name]) == [0, 0]


@torch.no_grad()
def replayed(rank: int, case: Layer) -> int:
    layer, x, ids, *_ = made(case, rank)
    graphs = []
    for least in (1, NEVER):
        for _ in range(3):
            layer(least)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [layer(least) for _ in range(3)]
        graphs.append((graph, outs))
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    source = torch.Generator("cuda").manual_seed(rank)
    for step in range(300):
        x.copy_(torch.randn(x.shape, device="cuda", generator=source))
        ids.copy_(ids[torch.randperm(ids.shape[0], device="cuda", generator=source)])
        for graph, outs in graphs:
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
        different += sum((a != b).any() for a, b in zip(graphs[0][1], graphs[1][1], strict=True))
        if step % 50 == 0:
            layer(1)
    return int(different)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank(two: Workers, late: int) -> None:
    """A rank that comes a millisecond after the other, in front of every third layer."""
    assert two.run(delayed, late) == [0, 0]


@torch.no_grad()
def delayed(rank: int, late: int) -> int:
    layer, *_ = made(CASES["uneven"], rank)
    wanted = layer(NEVER)
    different = 0
    for step in range(30):
        if rank == late and step % 3 == 0:
            torch.cuda._sleep(2_000_000)
        different += not torch.equal(layer(1), wanted)
    return different


def test_a_model(two: Workers) -> None:
    """What people write, in default mode and in CUDA graphs of Inductor's."""
    for different, used in two.run(model):
        assert not different
        assert used


@torch.no_grad()
def model(rank: int) -> tuple[int, bool]:
    """How many outputs are other bits than of transfers in order."""
    layers.H, layers.I = 256, 128
    torch.manual_seed(0)
    spread: nn.Module = layers.Model(layers.Stacked, 16).cuda().bfloat16()
    moefuse.parallelize(spread, init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"], max_tokens="equal", transport="symm")
    used: list[bool] = []
    layer = beside.layer

    def seen(*args: Any) -> Any:
        out = layer(*args)
        used.append(out is not None)
        return out

    beside.layer = seen
    different = 0
    try:
        for mode in ("default", "reduce-overhead"):
            outs: dict[int, list[Tensor]] = {}
            for least in (NEVER, 1 << 20):
                torch._dynamo.reset()
                beside.LEAST = least
                providers.forget_records()
                run = torch.compile(spread, backend="moefuse", dynamic=False, mode=mode)
                source, outs[least] = torch.Generator("cuda").manual_seed(rank), []
                for _ in range(4):
                    torch.compiler.cudagraph_mark_step_begin()
                    outs[least].append(run(torch.randn(2304, layers.H, device="cuda", generator=source).bfloat16()).clone())
            different += sum(not torch.equal(a, b) for a, b in zip(*outs.values(), strict=True))
    finally:
        beside.layer = layer
    return different, any(used)


@pytest.mark.parametrize(
    "name", ["by copy engines", "by kernels", "uneven", "nothing on one rank", "weights on the input", "slices", "large"]
)
def test_training(two: Workers, name: str) -> None:
    """Values and all gradients as in order, bit for bit, with other tokens in every step, past those from which records are made."""
    assert two.run(trained, CASES[name]) == [0, 0]


def trained(rank: int, case: Layer) -> int:
    layer, x, ids, *leaves = made(case, rank)
    outs: list[list[Tensor]] = []
    for t in (x, *leaves):
        t.requires_grad_()
    for least in (1, NEVER):
        source, found = torch.Generator("cuda").manual_seed(7 + rank), []
        for _ in range(5):
            with torch.no_grad():
                x.copy_(torch.randn(x.shape, device="cuda", generator=source))
            ids.copy_(torch.rand(ids.shape[0], case.E, device="cuda", generator=source).topk(case.K).indices)
            filled = torch.full((1 << 26,), float("nan"), device="cuda")
            del filled
            steps = [layer(least) for _ in range(2)]  # two layers forward, and then backward
            pulled = torch.randn(steps[0].shape, device="cuda", generator=source).to(case.dtype)
            for out in reversed(steps):
                found += [out.detach(), *torch.autograd.grad(out, [x, *leaves], pulled)]
        outs.append(found)
    return sum(not torch.equal(a, b) or bool(a.isnan().any()) for a, b in zip(*outs, strict=True))


@pytest.mark.parametrize("how", ["dies in forward", "idle in forward", "idle in backward"])
def test_a_rank_that_does_not_come(how: str) -> None:
    """Who waits for its rows stops with an error after the group's timeout, and nobody takes what is there for a result."""
    workers = Workers(2, timeout=15, cuda=True)
    try:
        (done, text), other = workers.try_to(left_alone, how)
    finally:
        workers.close()
    assert done, text
    assert "CUDA" in text
    assert other == ((False, "it died") if how.startswith("dies") else (True, "left"))


def left_alone(rank: int, how: str) -> str:
    layer, x, *_ = made(CASES["by copy engines"], rank)
    x.requires_grad_("backward" in how)
    for _ in range(3):
        out = layer(1)
        if x.requires_grad:
            out.sum().backward()
    torch.cuda.synchronize()
    if rank == 1 and how.startswith("dies"):
        os._exit(1)
    if rank == 1 and how == "idle in forward":
        return "left"
    out = layer(1)
    if rank == 1:
        torch.cuda.synchronize()
        return "left"
    try:
        if x.requires_grad:
            out.sum().backward()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
