"""Layers of a few experts with one projection each, which are trained as fast in their loop on a CPU: left, and the reason is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moefuse.passes.lower.cost_gate import LOOPED
from tests.cpu.capture_case import Seen, capturing, plain

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, K = 8, 2


class Layer(nn.Module):
    def __init__(self, experts: int = 2, bias: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(H, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(H, H, bias=bias) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).topk(K)
        weights, out = weights.softmax(-1), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


class Block(Layer):
    """More of a model around it, which the loop would break in pieces."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__(experts)
        self.norm, self.around = nn.LayerNorm(H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.around(self.norm(x)).relu()
        return x + super().forward(self.norm(x))


class Masked(Layer):
    """Every expert runs on every token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return sum((expert(x) * (weights * (ids == e)).sum(-1, keepdim=True) for e, expert in enumerate(self.experts)), torch.zeros_like(x))


def run(model: nn.Module, *, grad: bool = True, fullgraph: bool = False, **options: Any) -> Seen:
    torch.manual_seed(0)
    seen, twin, x = Seen(), copy.deepcopy(model), torch.randn(9, H)
    compiled = torch.compile(model, backend=capturing(seen, plain(**options)), fullgraph=fullgraph)
    with torch.set_grad_enabled(grad):
        results = [compiled(x), twin(x)]
    torch.testing.assert_close(*results)
    if grad:
        grads = [torch.autograd.grad(out.square().sum(), list(m.parameters())) for out, m in zip(results, (model, twin), strict=True)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    return seen


def test_a_few_experts_are_trained_in_their_loop() -> None:
    (skipped,) = run(Layer()).report.skipped
    assert skipped.code == "not-faster"
    assert skipped.message.startswith("with 2 experts of one projection each, the loop over them is trained as fast")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "how"),
    [
        (lambda: Layer(LOOPED), {}),
        (Layer, {"grad": False}),
        (lambda: Layer().requires_grad_(False), {"grad": False}),
        (Layer, {"cost_gate": False}),
        (Layer, {"fullgraph": True}),  # Inductor would be given one graph as well
        (Block, {}),
        (Masked, {}),
    ],
    ids=["more experts", "inference", "frozen", "switched off", "one graph", "a model around", "every token"],
)
def test_what_is_fused(model: Any, how: dict[str, Any]) -> None:
    seen = run(model(), **how)
    assert ([s.message for s in seen.report.skipped], len(seen.report.fused)) == ([], 1)


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_is_added_by_the_product(bias: bool) -> None:
    graph = run(Layer(bias=bias), grad=False).graphs[-1]
    assert not [n for n in graph.graph.nodes if "expert_rows" in str(n.target)]
