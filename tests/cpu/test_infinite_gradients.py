"""A unit that relu switched off gets no gradient, however large the one above is: 0, not 0 * inf."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.beside_eager import H, K, MoE
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Weighted(MoE):
    """Routing weights are an argument, so that one of them can be infinite."""

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.add_experts(torch.zeros_like(x), x, weights, self.route(x)[1])


def test_relu_under_an_infinite_gradient() -> None:
    torch.manual_seed(0)
    model, x, weights, seen = Weighted(), torch.randn(13, H), torch.rand(13, K), Seen()
    weights[3] = float("inf")
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=capturing(seen))
    for run in (compiled, twin):
        run(x, weights).sum().backward()
    assert len(seen.report.fused) == 1
    for got, wanted in zip(_first_projections(model), _first_projections(twin), strict=True):
        # Where infinities of both signs meet, it is the order of the weighting that makes them one or no number.
        assert torch.equal(got.isfinite(), wanted.isfinite())


def _first_projections(model: MoE) -> list[Tensor]:
    """Gradients of the first projections; zeros where an expert had no token."""
    found = []
    for expert in model.experts:
        assert isinstance(expert, nn.Sequential)
        weight = expert[0].weight
        found.append(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return found
