"""One rank of 64 or of 256, in one process over torch's fake group: its graph, its report, its memory. What such a rank computes is not
asked here, for nothing arrives."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import moefuse
from moefuse.runtime import groups
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers

TWO = 2
"""Experts of a rank."""


@contextlib.contextmanager
def one_of(world: int, rank: int) -> Iterator[DeviceMesh]:
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("ep",))
    finally:
        dist.destroy_process_group()
        groups._groups.clear()


def spread(world: int, mesh: DeviceMesh, **how: Any) -> tuple[layers.Model, moefuse.Plan]:
    torch.manual_seed(0)
    model = layers.Model(layers.Transposed, TWO * world)
    return model, moefuse.parallelize(model, mesh, **how)


WAYS: dict[str, tuple[dict[str, Any], str, str]] = {
    "allgather": ({}, "", "allgather"),
    "tokens are bounded": ({"max_tokens": 8}, "", "allgather, tokens <= 8"),
    "exact splits": ({"transport": "all_to_all"}, "", "all_to_all"),
    "several hosts": ({}, "8", "all_to_all over {hosts} hosts"),
    "several hosts, few tokens": ({"max_tokens": 8}, "8", "allgather, tokens <= 8"),
}


@pytest.mark.usefixtures("as_traced")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", [64, 256])
@pytest.mark.parametrize("name", WAYS)
def test_explain(monkeypatch: pytest.MonkeyPatch, world: int, name: str) -> None:
    """What the report says of a rank is what its plan says; and it holds its experts, no more."""
    how, local, way = WAYS[name]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
    with one_of(world, 3) as mesh:
        model, plan = spread(world, mesh, **how)
        report = moefuse.explain(model, torch.randn(4, layers.H))
        said = f"ep={world} linear, 2 of {TWO * world} experts here, {way.format(hosts=world // 8)}"
        assert [fused.parallel for fused in report.fused] == [said] * 2
        assert str(plan) == f"first: {said}\nsecond: {said}"
        assert (report.skipped, report.graph_breaks) == ([], [])
        for parameter in plan.parameters:
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().nbytes * world == parameter.numel() * parameter.element_size()
            assert parameter.to_local().untyped_storage().nbytes() == parameter.to_local().nbytes


def graphs(world: int, rank: int, train: bool, **how: Any) -> tuple[list[str], list[list[str]]]:
    """(The text of each graph, with shapes; what communicates in it, in order)."""
    with one_of(world, rank) as mesh:
        model, _ = spread(world, mesh, **how)
        seen = Seen()
        with torch.set_grad_enabled(train):
            torch.compile(model, backend=capturing(seen, behind="eager"))(torch.randn(4, layers.H))
        texts = [gm.print_readable(print_output=False, include_stride=True) for gm in seen.graphs]
        targets = [[str(n.target) for n in gm.graph.nodes] for gm in seen.graphs]
        calls = [[t.removeprefix("moefuse.") for t in one if t.startswith("moefuse")] for one in targets]
        return texts, calls


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["allgather", "several hosts"])
def test_graphs_of_all_ranks_are_equal(monkeypatch: pytest.MonkeyPatch, name: str, train: bool) -> None:
    """As text: one compiled by a rank is good for any other. What communicates is each layer's op, or dispatch and combine, in order."""
    how, local, _ = WAYS[name]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local or "0")
    (three, calls), (five, _) = graphs(64, 3, train, **how), graphs(64, 5, train, **how)
    assert len(three) == 1
    assert three == five
    wanted = ["ep_experts.default"] if name == "allgather" else ["ep_dispatch.default", "ep_combine.default"]
    assert [c for c in calls[0] if c.startswith("ep_")] == wanted * 2
    assert not [c for c in calls[0] if "gather" in c]
