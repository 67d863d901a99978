"""Experts whose Linears torch shards over processes are refused as such, and run as they did."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moefuse
from tests.cpu.test_causes import Block, H, T

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")


@pytest.fixture
def alone(fresh_dynamo: None, no_code: None) -> Iterator[None]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_sharded_experts_are_refused_as_such() -> None:
    model, x = Block(), torch.randn(T, H)
    expected = model(x)
    plan = {"mlp.experts.*.up": ColwiseParallel(), "mlp.experts.*.down": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (1,)), plan)
    model.compile(backend="moefuse")
    torch.testing.assert_close(model(x), expected)
    report = moefuse.last_report()
    assert report is not None
    assert {(s.code, s.message) for s in report.skipped} == {
        ("sharded", "the experts are spread over processes: they are held as `DTensor`")
    }
