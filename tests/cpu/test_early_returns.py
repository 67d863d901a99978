"""Experts that return early where they have no rows: both ways return tensors without elements, so the layer is one graph, and fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse

E, K, H = 4, 2, 16


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 24, bias=False), nn.Linear(24, H, bias=False)

    def nothing(self, x: Tensor) -> Tensor:
        return x.new_zeros(0, H)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return self.nothing(x)
        return self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class Itself(Expert):
    """What is returned early has been there before."""

    def nothing(self, x: Tensor) -> Tensor:
        return x


class Sized(Expert):
    def nothing(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)


class Inner(nn.Module):
    """Two early returns, one in the other."""

    def __init__(self) -> None:
        super().__init__()
        self.of = Sized()

    def forward(self, x: Tensor) -> Tensor:
        if not x.numel():
            return torch.zeros_like(x)
        return self.of(x) * 2.0  # type: ignore[no-any-return]


class One(Expert):
    """A row where there is none."""

    def nothing(self, x: Tensor) -> Tensor:
        return x.new_ones(1, H)


class None_(Expert):
    def nothing(self, x: Tensor) -> Any:
        return None


class Written(Expert):
    """Something is written to where there are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return torch.empty_like(x)
        self.calls.add_(1)
        return self.down(F.silu(self.up(x)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(make() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows = expert(x[tok])
            if isinstance(rows, Tensor):
                out.index_add_(0, tok, rows * weights[tok, slot, None])
        return out


@pytest.mark.code_elsewhere
@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [Expert, Sized, Itself, Inner])
def test_they_are_fused(make: type[nn.Module]) -> None:
    """One graph; one token leaves experts without rows, and there may be no token at all."""
    model = Layer(make)
    compiled = torch.compile(model, backend="moefuse")
    for tokens in (9, 1, 0):
        torch._dynamo.reset()
        x = torch.randn(tokens, H)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x))
        report = moefuse.last_report()
        assert report is not None
        assert not tokens or (report.graph_count, len(report.fused), report.graph_breaks) == (1, 1, []), f"{tokens} {report}"


@pytest.mark.code_elsewhere
def test_gradients() -> None:
    """Those of tokens and of experts with tokens are the program's; others are zeros, as in all loops."""
    model = Layer(Sized)
    compiled = torch.compile(model, backend="moefuse")
    grads = []
    for run in (compiled, model):
        model.zero_grad()
        x = torch.randn(3, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        run(x).square().sum().backward()
        grads.append([x.grad, *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*grads)
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 1, str(report)


@pytest.mark.code_elsewhere
@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [One, None_, Written])
def test_others_run_as_they_did(make: type[nn.Module]) -> None:
    """What is returned, or done, depends on whether there are rows. A counter is a sum under the mask."""
    model, other = Layer(make), Layer(make)
    other.load_state_dict(model.state_dict())
    compiled, x = torch.compile(model, backend="moefuse"), torch.randn(1, H)
    results = []
    for run in (compiled, other):
        with torch.no_grad():
            try:
                results.append(run(x))
            except Exception as error:  # more rows than positions
                results.append(type(error).__name__)
    if isinstance(results[1], Tensor):
        torch.testing.assert_close(*results)
    torch.testing.assert_close(dict(model.named_buffers()), dict(other.named_buffers()))
    report = moefuse.last_report()
    assert bool(report is not None and report.fused) is (make is Written), str(report)
