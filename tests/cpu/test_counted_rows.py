"""Loops over the experts whose count of tokens is not zero, as a Python list: Switch Transformers in transformers 4."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H, WIDTH = 4, 12, 20


class Switch(nn.Module):
    """Top-1 with a mask [B, S, E]; the name of the counts becomes that of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def counts(self, mask: Tensor) -> Tensor:
        return mask.reshape(-1, E).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        probs = self.router(x).softmax(-1)
        mask = torch.nn.functional.one_hot(probs.argmax(-1), E).bool()
        out = torch.zeros_like(x)
        chosen = self.counts(mask)
        chosen = torch.nonzero(chosen, as_tuple=True)[0].tolist()
        for e in chosen:
            out[mask[:, :, e]] = self.experts[e](x[mask[:, :, e]])
        return probs.max(-1, keepdim=True).values * out


class WithoutSingles(Switch):
    """The near miss: experts with exactly one token are left out, and a count of zero is not."""

    def counts(self, mask: Tensor) -> Tensor:
        return super().counts(mask) - 1


def check(model: nn.Module) -> Seen:
    """Values equal to eager's where every expert, one expert, and all but one have tokens."""
    twin, seen = copy.deepcopy(model), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for bias in ([0.0] * E, [9.0, 0.0, 0.0, 0.0], [0.0, -9.0, 0.0, 0.0]):
        for m in (model, twin):
            m.router.bias.data = torch.tensor(bias)
        x = torch.randn(2, 5, H, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), twin(x), rtol=1e-5, atol=1e-5)
    return seen


def test_experts_whose_count_is_not_zero() -> None:
    torch.manual_seed(0)
    seen = check(Switch())
    assert (len(seen.graphs), [f.spec.num_experts for f in seen.report.fused]) == (1, [E])


def test_another_condition_is_not_that_one() -> None:
    torch.manual_seed(0)
    assert check(WithoutSingles()).report.fused == []
