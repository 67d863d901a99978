"""Layers whose way to combine, weigh or hold experts is unusual: they are fused, or what is said of them is what is in the way."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefuse import Options
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from tests.cpu.test_messages import WIDTH, E, H, K, Layer, T

Share = Callable[..., Tensor]


class Other(Layer):
    """A loop over experts with its own way to weigh, to compute and to combine."""

    def __init__(self, share: Share, weigh: Any = None, compute: Any = None) -> None:
        super().__init__()
        self.combine, self.weigh, self.compute = share, weigh or (lambda w: w), compute or (lambda expert, x, e: expert(x))
        self.u, self.v, self.b = (nn.Parameter(torch.randn(E, *s)) for s in ((WIDTH, H), (H, WIDTH), (H,)))

    def route(self, x: Tensor) -> Any:
        weights, ids = super().route(x)
        return self.weigh(weights), ids

    def share(self, out: Tensor, x: Tensor, expert: Any, e: int, tok: Tensor, w: Tensor, slot: Tensor) -> Tensor:
        return self.combine(out, tok, self.compute(expert, x[tok], e) * w)


class Dense(Other):
    """Every expert on every token, weighed by a column of a routing table."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = self.combine(out, self.compute(expert, x, e) * (weights * (ids == e)).sum(-1, keepdim=True))
        return out


def added(out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
    return out.index_add_(0, tok, y)


def subtracted(out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
    out[tok] -= y
    return out


def alone(out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
    """A share as a tensor of its own."""
    return torch.zeros_like(out).index_add_(0, tok, y)


def hidden(act: Callable[[Tensor], Tensor], **more: Any) -> Callable[[], Layer]:
    """With something between the projections."""
    return lambda: Other(added, compute=lambda expert, x, _: expert.down(act(expert.up(x))), **more)


def stacked(up: Callable[[int], int], down: Callable[[int], int], kind: type[Other] = Other) -> Callable[[], Layer]:
    """With other numbers for weights than the experts have."""

    def build() -> Layer:
        layer = kind(added if kind is Other else torch.add)
        layer.compute = lambda _, x, e: F.linear(F.gelu(F.linear(x, layer.u[up(e)])), layer.v[down(e)], layer.b[down(e)])
        return layer

    return build


def replaced(at: int, by: Callable[[], nn.Module], kind: type[Other] = Other) -> Callable[[], Layer]:
    def build() -> Layer:
        layer = kind(added if kind is Other else torch.add)
        layer.experts[at] = by()
        return layer

    return build


class Zeros(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class Cut(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return torch.special.i0(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


FUSED: dict[str, Callable[[], Layer]] = {
    "rows subtracted": lambda: Other(subtracted),
    "index_add with a factor": lambda: Other(lambda out, tok, y: out.index_add_(0, tok, y, alpha=-0.5)),
    "subtracted": lambda: Dense(lambda out, y: out - y),
    "subtracted in place": lambda: Dense(lambda out, y: out.sub_(y, alpha=2)),
    "added with a factor": lambda: Dense(lambda out, y: torch.add(out, y, alpha=0.5)),
    "weights of one": lambda: Other(added, torch.ones_like),
    "weights of one number": lambda: Other(added, lambda w: torch.full_like(w, 1 / K)),
    "weights of one, every expert on every token": lambda: Dense(torch.add, torch.ones_like),
    "maximum with zeros": hidden(lambda h: torch.maximum(h, torch.zeros_like(h))),
    "minimum with a number for each feature": hidden(lambda h: torch.minimum(h, torch.full((WIDTH,), 0.1))),
    "clamped by a tensor": hidden(lambda h: h.clamp(min=torch.zeros_like(h), max=h.new_ones(()))),
    "a constant of another dtype": hidden(lambda h: h * torch.full(h.shape, 2, dtype=torch.int64)),
    "sums over features": hidden(lambda h: h.cumsum(-1)),
    "products over features": hidden(lambda h: h.cumprod(dim=1)),
    "one matrix of a stack for all": stacked(lambda e: e, lambda _: 0),
    "two matrices of a stack in turn": stacked(lambda e: e % 2, lambda e: e % 2),
    "a stack from the end": stacked(lambda e: E - 1 - e, lambda e: e),
    "one matrix for all on every token": stacked(lambda e: e, lambda _: 0, Dense),
}

BY = "expert rows reach what the other experts computed by `{}`, and only sums are fused"
REFUSED: dict[str, tuple[Callable[[], Layer], str, str]] = {
    "a share subtracted": (lambda: Other(lambda out, tok, y: out - alone(out, tok, y)), "not-combined", BY.format("sub")),
    "the largest share": (lambda: Other(lambda out, tok, y: torch.maximum(out, alone(out, tok, y))), "not-combined", BY.format("maximum")),
    "a share with a factor": (lambda: Other(lambda o, t, y: torch.add(o, alone(o, t, y), alpha=0.5)), "not-combined", BY.format("add")),
    "the largest": (lambda: Dense(torch.maximum), "not-combined", BY.format("maximum")),
    "from the other side": (lambda: Dense(lambda out, y: y - out), "not-combined", BY.format("sub")),
    "copied": (lambda: Other(lambda out, tok, y: out.index_copy_(0, tok, y)), "not-combined", "are assigned here, not added"),
    "sums over rows": (hidden(lambda h: h.cumsum(0)), "not-row-local", "`cumsum` takes the rows of an expert together"),
    "a mean of nothing": (hidden(lambda h: h.unsqueeze(1).mean(1)), "no-rule", "`mean` in a way that its rule does not read"),
    "a constant for each row and more": (hidden(lambda h: h[:, :1] + torch.zeros_like(h)), "no-rule", "a constant that does not have"),
    "memory of nobody": (hidden(lambda h: h * torch.empty_like(h)), "no-rule", "`torch.empty_like(h)`"),
    "an autograd function": (hidden(lambda h: Cut.apply(h)), "no-rule", "expert rows go through `Cut.apply(h)`"),
    "sorted features": (hidden(lambda h: h.sort(-1).values), "no-rule", "expert rows go through `sort`"),
    "an identity first": (replaced(0, nn.Identity), "experts-differ", "expert 0 has no weights, and one behind it has"),
    "an identity among them": (replaced(1, nn.Identity), "experts-differ", "expert 1 has no weights, and one behind it has"),
    "an identity on every token": (replaced(3, nn.Identity, Dense), "experts-differ", "expert 3 has no weights"),
    "another expert's weights": (stacked(lambda e: e % 2, lambda e: e % 2, Dense), "experts-differ", "meets the weights of expert"),
    "other widths": (
        hidden(lambda h: h.float().to(torch.float64)), "dtype-unsupported", "the program rounds to it inside experts that compute in"
    ),
}  # fmt: skip


def ran(layer: Layer, x: Tensor) -> tuple[FusionReport, list[Tensor]]:
    """What was said of a layer, and its result and gradients, with all but moefuse's ops in eager."""
    found: list[FusionReport] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        found.append(rewrite.rewrite(gm, example_inputs, Options()))
        return gm.forward

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        values = run(torch.compile(layer, backend=backend), layer, x)
    (report,) = found
    return report, values


def run(function: Callable[[Tensor], Tensor], layer: Layer, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    out = function(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]  # type: ignore[list-item]


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FUSED)
def test_fused_as_eager(name: str) -> None:
    layer, x = FUSED[name]().eval(), torch.randn(T, H)
    report, values = ran(layer, x)
    assert (len(report.fused), report.skipped) == (1, [])
    torch.testing.assert_close(values, run(layer, layer, x), atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_in_the_way_is_said(name: str) -> None:
    build, code, text = REFUSED[name]
    layer, x = build().eval(), torch.randn(T, H)
    if code == "dtype-unsupported":
        layer, x = layer.double(), x.double()
    report, values = ran(layer, x)
    (found,) = report.skipped
    assert (found.code, text in found.message) == (code, True), found.message
    assert re.search(r"\.py:\d+$", found.location)
    if name != "memory of nobody":
        torch.testing.assert_close(values, run(layer, layer, x), atol=1e-4, rtol=1e-4)


def test_an_expert_of_zeros_is_not_said_to_have_other_tokens() -> None:
    report, _ = ran(replaced(1, Zeros)().eval(), torch.randn(T, H))
    assert "tokens-differ" not in [s.code for s in report.skipped]
