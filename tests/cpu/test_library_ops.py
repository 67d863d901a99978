"""Experts whose rows are added by an operator of a library: values and gradients as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.null import library_ops
from tests.programs.check import Outcome, execute, light

T, H, I, E, K = 12, 16, 8, 4, 2  # noqa: E741


class Layer(nn.Module):
    def __init__(self, op: Any, *, by_expert: bool) -> None:
        super().__init__()
        self.op, self.by_expert, self.router = op, by_expert, nn.Linear(H, E)
        self.up, self.down = (nn.Parameter(torch.randn(*sizes) * 0.3) for sizes in ((E, I, H), (E, H, I)))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return (self.loop(x, weights, ids) if self.by_expert else self.in_order(x, weights, ids),)

    def loop(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            y = F.linear(F.silu(F.linear(x[token], self.up[e])), self.down[e]) * weights[token, slot, None]
            out = self.op(out, token[:, None].expand(-1, H), y)
        return out

    def in_order(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort(stable=True)
        token, chosen = order // K, ids.view(-1)[order]
        y = torch.bmm(self.down[chosen], F.silu(torch.bmm(self.up[chosen], x[token].unsqueeze(-1)))).squeeze(-1)
        return self.op(torch.zeros_like(x), token.view(-1, 1).expand(-1, H), y * weights.view(-1)[order][:, None])


@pytest.mark.every_value
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("by_expert", [True, False])
@pytest.mark.parametrize(("op", "fused"), [(library_ops.deterministic, True), (library_ops.ALIKE["a factor"], False)])
def test_rows_added_by_an_operator_of_a_library(op: Callable[..., Tensor], fused: bool, by_expert: bool, grad: bool) -> None:
    torch.manual_seed(0)
    model, x, outcome = Layer(op, by_expert=by_expert), torch.randn(T, H), Outcome()
    compiled = torch.compile(model, backend=light(outcome))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        got = execute(compiled, model, (x,), grad=grad)
    expected = execute(model, model, (x,), grad=grad)
    assert bool(outcome.fused) is fused
    torch.testing.assert_close(got.outputs, expected.outputs)
    assert got.grads.keys() == expected.grads.keys()
    for name, gradient in expected.grads.items():
        torch.testing.assert_close(got.grads[name], gradient, msg=name)
    if not fused:
        assert any(op._schema.name in s.message for s in outcome.skipped), str(outcome)  # type: ignore[attr-defined]
