"""``torch.func`` around a layer inside a compiled function: that call is left as it is, for a reason, and nothing else is lost for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.cpu.beside_eager import H, MoE
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Layer(MoE):
    """All experts on all tokens: nothing here needs a loop to be captured."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


def gradient(layer: MoE, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: layer(z).square().sum())(x)


def mapped(layer: MoE, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda z: layer(z))(x.view(3, -1, H))


def tangent(layer: MoE, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda z: layer(z), (x,), (torch.ones_like(x),))[1]


@pytest.mark.parametrize("transformed", [gradient, mapped, tangent])
def test_a_call_under_a_transform_is_refused_alone(transformed: Callable[[MoE, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    layer, x, seen = Layer(), torch.randn(9, H), Seen()

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        return layer(x), transformed(layer, x)

    torch.testing.assert_close(torch.compile(both, backend=capturing(seen))(x), both(x))
    assert "internal-error" not in seen.codes, str(seen.report)
    assert len(seen.report.fused) == 1, str(seen.report)
    assert seen.report.skipped, "the call under the transform is a refusal of its own"
