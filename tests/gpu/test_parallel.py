"""Expert-parallel ops on a CUDA device: one rank of NCCL, so that everything runs but the wire. Padding, experts elsewhere, graphs."""

from __future__ import annotations

import copy
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import moefuse
from moefuse.runtime import groups
from tests.dist import idioms, layers

pytestmark = pytest.mark.gpu

E, T = 6, 37


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,), mesh_dim_names=("ep",))
    dist.destroy_process_group()
    groups._groups.clear()


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(layers, "H", 64)
    monkeypatch.setattr(layers, "I", 48)


def both(kind: type[nn.Module], mesh: DeviceMesh, **how: object) -> tuple[nn.Module, nn.Module]:
    """(spread, as it is), compiled."""
    single = layers.Model(kind, E).cuda()
    model = copy.deepcopy(single)
    moefuse.parallelize(model, mesh, **how)  # type: ignore[arg-type]
    return model, single


def close(mine: Tensor | None, theirs: Tensor | None) -> None:
    """Sums in another order: float32, relative to the largest value, through two layers."""
    assert mine is not None
    assert theirs is not None
    assert (mine - theirs).abs().max() <= 2e-5 * theirs.abs().max()


@pytest.mark.parametrize("most", [None, 50, "equal"])
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.Grouped])
def test_training(kind: type[nn.Module], most: object, mesh: DeviceMesh) -> None:
    """With max_tokens=50, 13 rows of padding go through the experts' kernels, forward and backward."""
    model, single = both(kind, mesh, max_tokens=most)
    run = torch.compile(model, backend="moefuse", options={"expect": 2})
    for tokens in (T, 5):
        x = torch.randn(tokens, layers.H, device="cuda")
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        for out, given in ((run(mine), mine), (single(theirs), theirs)):
            out.square().sum().backward()
            assert given.grad is not None
        close(mine.grad, theirs.grad)
    for name, parameter in single.named_parameters():
        found = dict(model.named_parameters()).get(name)
        if found is not None and parameter.grad is not None:
            assert found.grad is not None
            grad = found.grad.full_tensor() if hasattr(found.grad, "full_tensor") else found.grad
            close(grad, parameter.grad)


def test_a_graph_that_is_replayed(mesh: DeviceMesh) -> None:
    """``mode="reduce-overhead"`` records the collectives; a thousand replays with other tokens, buffers poisoned between them."""
    model, single = both(layers.Stacked, mesh, max_tokens=T + 3)
    run = torch.compile(model, backend="moefuse", mode="reduce-overhead")
    with torch.no_grad():
        for number in range(1000):
            x = torch.randn(T, layers.H, device="cuda")
            torch.compiler.cudagraph_mark_step_begin()
            found = run(x).clone()
            if number % 100 < 3:
                torch.testing.assert_close(found, single(x), rtol=1e-4, atol=1e-4)
                poison: Tensor = torch.full((1 << 20,), float("nan"), device="cuda")
                del poison
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 2


def test_experts_of_another_rank_are_left_out(mesh: DeviceMesh) -> None:
    """Rows whose ids are -1 are not computed: what this rank has not is zero, and NaN in padding goes nowhere."""
    model, single = both(layers.Stacked, mesh, max_tokens=T + 5)
    for layer in (model.first, model.second):
        layer._moefuse_place[3:] = 100  # type: ignore[index,union-attr,operator]
    run = torch.compile(model.first, backend="moefuse")
    x = torch.randn(T, layers.H, device="cuda")
    with torch.no_grad():
        single.first.down[3:] = 0  # type: ignore[index,union-attr,operator]
        torch.testing.assert_close(run(x), single.first(x), rtol=1e-4, atol=1e-4)  # type: ignore[operator]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("rounds", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("body", ["adapted", "scaled", "loop"])
def test_what_every_rank_has_whole(body: str, rounds: bool, mode: str, mesh: DeviceMesh) -> None:
    """Adapters, numbers and vectors beside spread experts, and experts that autocast rounds as they are read: values, and gradients."""
    single = idioms.Block(body, "softmax", "nothing", E, 2).cuda()
    exact, model = copy.deepcopy(single).double(), copy.deepcopy(single)
    moefuse.parallelize(model, mesh, max_tokens=T + 3)
    how = {"options": {"expect": 1}} if mode == "default" else {"mode": mode}
    run = torch.compile(model, backend="moefuse", **how)  # type: ignore[call-overload]
    x, nudge = torch.randn(T, idioms.H, device="cuda"), torch.rand(T, E, device="cuda").argsort(-1) * 4.0
    found = []
    for called, dtype, casts in ((run, torch.float32, rounds), (single, torch.float32, rounds), (exact, torch.float64, False)):
        with torch.autocast("cuda", torch.bfloat16, enabled=casts):
            out = called(x.to(dtype), nudge.to(dtype))
        (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device="cuda").view(out.shape)).sum().backward()
        found.append([out.detach()])
    for values, of in zip(found, (model, single, exact), strict=True):
        values += [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in of.parameters() if p.grad is not None]
    for mine, theirs, true in zip(*found, strict=True):
        largest = true.abs().max()
        allowed = (theirs - true).abs().max() * 1.5 + (2.0**-7 if rounds else 2e-6) * largest
        assert (mine.double() - true).abs().max() <= allowed
