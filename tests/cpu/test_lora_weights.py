"""Low-rank terms in stacked weights, in the spellings there are: the sum is not made, and everything is as if it were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from moefuse.passes.match.lowrank import MOST_ROWS
from tests.cpu.test_lora_rows import close, numbers

E, K, H, INNER, R = 4, 2, 4 * 8, 24, 4
S = 1.5

Spelling = Callable[[Tensor, Tensor, Tensor], Tensor]


def baddbmm(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
    return torch.baddbmm(w, b.to(w.dtype), a.to(w.dtype), alpha=S)


class Layer(nn.Module):
    """Merged gate and up, sorted rows, grouped products on weights with terms."""

    def __init__(self, spelling: Spelling, dtype: torch.dtype = torch.float32, of: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.spelling = spelling
        self.router = nn.Linear(H, E, bias=False, dtype=dtype)

        def weight(*shape: int, of: torch.dtype = dtype) -> nn.Parameter:
            return nn.Parameter(torch.randn(E, *shape).mul(0.3).to(of))

        self.w_in, self.w_out = weight(2 * INNER, H).requires_grad_(False), weight(H, INNER).requires_grad_(False)
        self.a_in, self.b_in = weight(R, H, of=of), weight(2 * INNER, R, of=of)
        self.a_out, self.b_out = weight(R, INNER, of=of), weight(H, R, of=of)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        first, last = self.spelling(self.w_in, self.b_in, self.a_in), self.spelling(self.w_out, self.b_out, self.a_out)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], first[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, last[e]) * weights[token, slot, None])
        return out

    def factors(self) -> list[nn.Parameter]:
        return [self.a_in, self.b_in, self.a_out, self.b_out]


def products(model: nn.Module, x: Tensor, train: bool) -> list[str]:
    """Names of the graph's operations behind the rewrite."""
    seen: list[str] = []

    def spy(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        from moefuse.config import Options
        from moefuse.passes.driver import fuse

        fuse(gm, inputs, Options())
        seen.extend(str(n.target) for n in gm.graph.nodes if n.op == "call_function" or n.op == "call_method")
        return gm.forward

    with torch.set_grad_enabled(train):
        torch.compile(model, backend=spy, fullgraph=True)(x)
    return seen


@pytest.mark.usefixtures("fresh_dynamo")
def test_through_inductor() -> None:
    """Values and gradients in float32; other spellings are in test_lora_sums.py."""
    torch.manual_seed(0)
    layer, x = Layer(baddbmm), torch.randn(40, H)
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    close(numbers(compiled, x, layer.factors()), numbers(layer, x, layer.factors()), 4e-6)
    (fused,) = moefuse.last_report().fused
    assert (fused.tier, fused.spec.lora, fused.spec.gating) == ("fused", (R,), "merged")


@pytest.mark.usefixtures("fresh_dynamo")
def test_bfloat16_base_and_float32_factors() -> None:
    """The truth is W + s B A in float64: the op is not further from it than the program, which rounds the sum to bfloat16."""
    torch.manual_seed(0)
    layer = Layer(baddbmm, torch.bfloat16)
    x = torch.randn(40, H, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    found, program = numbers(compiled, x, layer.factors()), numbers(layer, x, layer.factors())
    assert moefuse.last_report().fused[0].spec.lora == (R,)
    close(found, program, 0.05)
    assert [g.dtype for g in found[2:]] == [torch.float32] * 4


@pytest.mark.usefixtures("fresh_dynamo")
def test_factors_are_read_live_and_start_at_zero() -> None:
    """B = 0 hides the terms, and the first step brings them."""
    torch.manual_seed(0)
    layer, x = Layer(baddbmm), torch.randn(40, H)
    with torch.no_grad():
        layer.b_in.zero_(), layer.b_out.zero_()
    compiled = torch.compile(layer, backend="moefuse", fullgraph=True)
    for _ in range(2):
        close(numbers(compiled, x, layer.factors())[:2], numbers(layer, x, layer.factors())[:2], 4e-6)
        with torch.no_grad():
            layer.b_in.normal_(), layer.b_out.normal_()
    assert moefuse.last_report().fused[0].spec.lora == (R,)


@pytest.mark.code_once
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("tokens", "count"), [(MOST_ROWS["cpu"] * E // K, 1), (MOST_ROWS["cpu"] * E // K + 1, 0)])
def test_many_rows_of_an_expert(tokens: int, count: int) -> None:
    """With these the sum of weights costs less than products of their own, and is what the program asked for."""
    names = products(Layer(baddbmm), torch.randn(tokens, H), train=False)
    assert sum("experts_extended" in name for name in names) == count
    assert sum("moefuse.experts" in name for name in names) == 1


def test_factors_that_the_graph_computes() -> None:
    """As PEFT keeps them: A's experts below each other, B's experts as the fastest dimension; both are reshaped in front of the product."""

    def flat(w: Tensor, b: Tensor, a: Tensor) -> Tensor:
        left = b.reshape(b.shape[1], R, E).permute(2, 0, 1)
        return torch.baddbmm(w, left.to(w.dtype), a.reshape(E, R, -1).to(w.dtype), alpha=S)

    class Flat(Layer):
        def __init__(self) -> None:
            super().__init__(flat)
            for name in ("b_in", "b_out"):
                setattr(self, name, nn.Parameter(getattr(self, name).detach().permute(1, 2, 0).reshape(E, -1, R)))

    torch.manual_seed(0)
    layer, x = Flat(), torch.randn(9, H)
    expected = layer(x)
    wanted = torch.autograd.grad(expected.square().sum(), layer.factors())
    compiled = torch.compile(layer, backend="moefuse", options={"expect": 1})
    found = compiled(x)
    grads = torch.autograd.grad(found.square().sum(), layer.factors())
    assert f"LoRA r={R}" in str(moefuse.last_report())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(grads, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_router_in_front_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its top-k is ours where that has a kernel, as in front of experts without."""
    from moefuse.passes.block import router_topk

    monkeypatch.setattr(router_topk, "DEVICES", {"cpu"})
    seen = products(Layer(baddbmm), torch.randn(40, H), False)
    assert "moefuse.topk.default" in seen
