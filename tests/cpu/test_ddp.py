"""DistributedDataParallel under torch's default ``optimize_ddp``, which splits graphs: whole layers are fused, and then split."""

from __future__ import annotations

import copy
import functools
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import moefuse
from moefuse import _torch_private
from tests.conftest import without_code
from tests.dist.conftest import groups, two  # noqa: F401
from tests.dist.workers import Workers

EXPERTS, TOP_K, HIDDEN, WIDTH, LAYERS, TOKENS = 4, 2, 128, 256, 2, 40
pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(HIDDEN, WIDTH), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """More than the megabyte of parameters that DDP sends first."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, experts, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, ids = self.router(rows).softmax(-1).topk(TOP_K)
        out = torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(rows[token]) * weights[token, slot, None])
        return x + out


class Model(nn.Module):
    def __init__(self, layers: int = LAYERS, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(experts) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batches() -> Tensor:
    return torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def gradients(model: Any, x: Tensor) -> None:
    model(x).square().mean().backward()


@pytest.fixture
def alone(fresh_dynamo: None) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("compiled_first", [False, True])
def test_the_graph_is_fused_as_a_whole_and_split_afterwards(capture: bool, compiled_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[list[str]] = []

    def front(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        pieces.append([str(node.target) for node in gm.graph.nodes if str(node.target).startswith("moefuse.experts")])
        return _torch_private.compile_front(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", front)
    model, options = Model(), {"capture": capture}
    if compiled_first:
        model.compile(backend="moefuse", options=options)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=not capture):
        gradients(wrapped if compiled_first else torch.compile(wrapped, backend="moefuse", options=options), batches()[0])
    report = moefuse.last_report()
    assert (len(report.fused), report.graph_count, report.graph_breaks) == (LAYERS, 1, [])
    # A bucket is full with the experts of one layer, whose Parameters are in lists; the first norm and router are left over.
    assert pieces == [[], *[["moefuse.experts.default"]] * LAYERS]


@pytest.mark.usefixtures("alone")
def test_a_compiler_that_has_the_frame_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Inductor has it for a float that changes: Dynamo finds the backend again, and captures the loops."""
    from torch._dynamo.exc import TensorifyScalarRestartAnalysis

    attempts: list[int] = []

    def front(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            raise TensorifyScalarRestartAnalysis
        return _torch_private.compile_front(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", front)
    model = Model()
    model.compile(backend="moefuse")
    gradients(DistributedDataParallel(model, bucket_cap_mb=1), batches()[0])
    report = moefuse.last_report()
    assert (len(attempts), len(report.fused), report.graph_count, report.graph_breaks) == (2 + LAYERS, LAYERS, 1, [])


@pytest.mark.usefixtures("alone")
def test_routing_is_replayed_in_a_split_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids go in and out of the pieces; outputs and gradients are those of a model that takes the given experts."""
    pieces: list[int] = []

    def front(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        pieces.append(sum(str(node.target).startswith("moefuse.experts") for node in gm.graph.nodes))
        return aot_autograd(fw_compiler=lambda graph, _: graph)(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", front)
    model, x = Model(), batches()[0]
    ids = [torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]) for _ in range(LAYERS)]
    other = copy.deepcopy(model)
    for layer, given in zip(other.layers, ids, strict=True):
        layer.forward = functools.partial(taking, layer, given)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
    run = torch.compile(wrapped, backend="moefuse", options={"expect": LAYERS})
    with moefuse.replay_routing(model, ids), moefuse.capture_routing(wrapped) as routing:
        out = run(x)
    out.square().mean().backward()
    expected = other(x)
    expected.square().mean().backward()
    assert pieces == [0, *[1] * LAYERS]
    assert [torch.equal(taken, given) for (taken,), given in zip(routing.values(), ids, strict=True)] == [True] * LAYERS
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)


def taking(layer: Layer, ids: Tensor, x: Tensor) -> Tensor:
    """A layer with these experts."""
    rows = layer.norm(x)
    weights = layer.router(rows).softmax(-1).gather(-1, ids)
    out = torch.zeros_like(rows)
    for e, expert in enumerate(layer.experts):
        token, slot = torch.where(ids == e)
        out = out.index_add(0, token, expert(rows[token]) * weights[token, slot, None])
    return x + out


@pytest.mark.thorough
@pytest.mark.usefixtures("alone")
def test_what_the_compiler_cannot_take_goes_back_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def front(gm: torch.fx.GraphModule, inputs: Any, *_: Any) -> Any:
        fused = any("moefuse" in str(node.target) for node in gm.graph.nodes)
        seen.append(fused)
        if fused:
            raise RuntimeError("not this one")
        return _torch_private.compile_front(gm, inputs)

    monkeypatch.setattr(_torch_private, "compile_fx", front)
    model, x = Model(), batches()[0]
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="moefuse")
        torch.testing.assert_close(compiled(x), expected)
    assert seen[:2] == [False, True]
    assert not any(seen[2:])
    assert [skipped.code for skipped in moefuse.last_report().skipped] == ["internal-error"]


def one_of_two(rank: int) -> None:
    """A process: its half of the batch, and gradients that are the mean of both halves'."""
    torch._dynamo.reset()
    _torch_private.compile_fx = without_code
    model = Model()
    compiled = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1), backend="moefuse")
    for _ in range(2):
        model.zero_grad()
        gradients(compiled, batches()[rank])
    assert len(moefuse.last_report().fused) == LAYERS
    whole = Model()
    gradients(whole, batches().flatten(0, 1))
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_of_two_processes_are_those_of_one(two: Workers) -> None:  # noqa: F811
    two.run(one_of_two)
