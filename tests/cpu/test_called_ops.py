"""Programs that call moefuse's ops themselves are read as layers; what no rule reads is left as it is, without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import Outcome, light

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

T, H, I, E, K = 6, 8, 4, 3, 2  # noqa: E741  (the letters of moefuse.spec)


class Called(nn.Module):
    """``moefuse::experts`` with some options, or the grouped ops with a gate of the program's own between them."""

    def __init__(self, grouped: bool = False, bias: bool = False, gated: bool = True, **options: Any) -> None:
        super().__init__()
        self.grouped, self.options, self.gate = grouped, options, nn.Linear(H, E)
        self.up, self.down = nn.Parameter(torch.randn(E, 2 * I if gated else I, H)), nn.Parameter(torch.randn(E, H, I))
        self.up_bias = [nn.Parameter(torch.randn(E, 2 * I if gated else I))] if bias else []
        self.down_bias = [nn.Parameter(torch.randn(E, H))] if bias else []

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(K)
        ids = chosen if ids is None else ids
        ops: Any = torch.ops.moefuse
        if not self.grouped:
            return ops.experts(x, ids, weights, [self.up], [], [self.down], self.up_bias, [], self.down_bias, **self.options)
        rows, order, offsets = ops.permute(x, ids, E)
        gate, up = ops.grouped_linear(rows, offsets, [self.up], self.up_bias).chunk(2, -1)
        rows = ops.grouped_linear(gate.sigmoid() * up.tanh(), offsets, [self.down], self.down_bias)
        return ops.combine(rows, weights, order, offsets, K, torch.float32)


def run(model: nn.Module) -> Outcome:
    """What a compilation reports; its results are those of the program as it is."""
    torch.manual_seed(0)
    outcome, x = Outcome(), torch.randn(T, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=light(outcome), fullgraph=True)(x), model(x), rtol=1e-5, atol=1e-5)
    return outcome


@pytest.mark.every_value
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "identity"])
@pytest.mark.parametrize("gated", [True, False])
def test_what_the_op_computes_is_verified(activation: str, gated: bool) -> None:
    """By the proof, in float64: each activation, with a gate and biases and without."""
    found = run(Called(bias=gated, gated=gated, activation=activation, gating="merged" if gated else "plain"))
    assert ([(f.tier, f.spec.activation) for f in found.fused], found.skipped) == ([("fused", activation)], [])


def test_a_gate_between_grouped_ops() -> None:
    found = run(Called(grouped=True, bias=True))
    assert ([f.tier for f in found.fused], found.skipped) == (["grouped"], [])


@pytest.mark.parametrize("grouped", [False, True])
def test_ids_of_no_expert_are_left_out(grouped: bool) -> None:
    """As the ops do it: nothing raises, and no row is shifted. Expert parallelism of transformers gives such ids."""
    torch.manual_seed(0)
    model, x, outcome = Called(grouped), torch.randn(T, H), Outcome()
    compiled = torch.compile(model, backend=light(outcome), fullgraph=True)
    with torch.no_grad():
        for ids in (torch.randint(0, E, (T, K)), torch.randint(-2, E + 2, (T, K)), torch.full((T, K), E)):
            torch.testing.assert_close(compiled(x, ids), model(x, ids), rtol=1e-5, atol=1e-5)
    assert (len(outcome.fused), outcome.skipped) == (1, [])


@pytest.mark.parametrize(
    "options",
    [{"up_first": True}, {"gating": "interleaved"}, {"weight_on_input": True}, {"activation": "swiglu_oai", "activation_args": [1.7, 7.0]}],
)
def test_options_that_no_rule_reads(options: dict[str, Any]) -> None:
    found = run(Called(**options))
    assert (found.fused, found.skipped) == ([], [])


def test_parts_that_do_not_belong_together() -> None:
    """Rows that are put back by another order than the one they are in."""

    class Crossed(Called):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = self.gate(x).softmax(-1).topk(K)
            ops: Any = torch.ops.moefuse
            rows, _, offsets = ops.permute(x, ids, E)
            other = ops.permute(x, (ids + 1) % E, E)
            rows = ops.grouped_linear(rows, offsets, [self.up], [])
            return ops.combine(ops.grouped_linear(rows, offsets, [self.down], []), weights, other[1], offsets, K, torch.float32)

    found = run(Crossed(gated=False))
    assert found.fused == []
