"""A shared expert on a side stream across the transfers of spread experts, on two GPUs: bit for bit as in order, with late ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import moefuse
from moefuse.runtime import overlap, providers
from moefuse.runtime.transports import beside
from tests.dist import layers
from tests.dist.workers import Workers

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


@pytest.mark.parametrize("transport", ["symm", "allgather"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 2304])
def test_bit_for_bit(two: Workers, tokens: int, transport: str) -> None:
    """Other tokens in each of 100 replays of two layers, one rank or the other late by half a millisecond; with 2304 tokens transfers
    have a stream themselves."""
    for different, forked in two.run(compared, tokens, transport):
        assert not different
        assert forked


@torch.no_grad()
def compared(rank: int, tokens: int, transport: str) -> tuple[int, int]:
    """(outputs with other bits than in order, shared experts that had a stream of their own)."""
    layers.H, layers.I = 256, 128
    torch.manual_seed(0)
    providers.forget_records()
    beside.LEAST = 1 << 20
    spread: nn.Module = layers.Model(layers.Shared, 16).cuda().bfloat16()
    moefuse.parallelize(spread, init_device_mesh("cuda", (2,), mesh_dim_names=("ep",))["ep"], max_tokens=tokens, transport=transport)
    x, fork, forked = torch.zeros(tokens, layers.H, device="cuda", dtype=torch.bfloat16), overlap.fork, 0

    def counted(*args: Any) -> Tensor:
        nonlocal forked
        forked += 1
        return fork(*args)

    overlap.fork = counted
    try:
        graphs = [recorded(spread, x, allowed) for allowed in ("0", "1")]
    finally:
        overlap.fork = fork
    different, source = torch.zeros((), dtype=torch.int64, device="cuda"), torch.Generator("cuda").manual_seed(rank)
    for step in range(100):
        x.copy_(torch.randn(x.shape, device="cuda", generator=source))
        for graph, out in graphs:
            out.fill_(float("nan"))
            if step % 4 == rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
        different += (graphs[0][1] != graphs[1][1]).any()
    return int(different), forked


def recorded(model: nn.Module, x: Tensor, allowed: str) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    os.environ["MOEFUSE_OVERLAP"] = allowed
    torch._dynamo.reset()
    run = torch.compile(model, backend="moefuse", dynamic=False, options={"overlap": 1 << 30})
    for _ in range(3):
        run(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    return graph, out
