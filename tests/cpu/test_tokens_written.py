"""Tokens that are written in place in front of the experts (jitter, as routers add it), and read by any of their names afterwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import moefuse
from tests.programs.refused.plain import E, H, Layer, T

NAMES = ("result", "target", "base")


class Written(Layer):
    """``x *= noise`` on a view of the tokens; experts read the result of the write, what was written to, or what that is a view of."""

    def __init__(self, read: str, other: str, writes: int) -> None:
        super().__init__()
        self.read, self.other, self.writes = read, other, writes
        self.noise = torch.linspace(0.5, 1.5, T * H).view(T, H)

    def forward(self, x: Tensor) -> Tensor:
        base = (x + 1.0).view(T // 2, 2, H)
        base *= 0.9
        target = result = base.reshape(-1, H)
        for _ in range(self.writes):
            result = target.mul_(torch.empty_like(target).fill_(0.9))
        names = {"result": result, "target": target, "base": base.view(T, H)}
        ids, weights = self.route(result)
        out = torch.zeros_like(x)
        for e in range(E):
            tokens = names[self.other if e == 1 else self.read]
            tok, slot = torch.where(ids == e)
            gate, up = F.linear(tokens[tok], self.w_in[e]).chunk(2, dim=-1)
            out.index_add_(0, tok, F.linear(F.silu(gate) * up, self.w_out[e]) * weights[tok, slot, None])
        return out + base.view(T, H)


def _step(call: object, model: Layer, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    out = call(x)  # type: ignore[operator]
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.code_once
@pytest.mark.every_value
@pytest.mark.parametrize("writes", [1, 2])
@pytest.mark.parametrize(("read", "other"), [*((n, n) for n in NAMES), ("target", "result"), ("result", "base")], ids=lambda n: n)
def test_any_name(read: str, other: str, writes: int) -> None:
    """Fused where all experts read one name, as in eager with any."""
    torch.manual_seed(0)
    model = Written(read, other, writes)
    x = torch.randn(T, H)
    compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    for got, want in zip(_step(compiled, model, x), _step(model, model, x), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    report = moefuse.last_report()
    assert read != other or len(report.fused) == 1, report


class Before(Written):
    """The first expert's tokens are taken before the write: no op reads both."""

    def forward(self, x: Tensor) -> Tensor:
        target = x + 1.0
        ids, weights = self.route(target)
        out = torch.zeros_like(x)
        for e in range(E):
            if e == 1:
                target.mul_(self.noise)
            tok, slot = torch.where(ids == e)
            gate, up = F.linear(target[tok], self.w_in[e]).chunk(2, dim=-1)
            out.index_add_(0, tok, F.linear(F.silu(gate) * up, self.w_out[e]) * weights[tok, slot, None])
        return out


@pytest.mark.usefixtures("fresh_dynamo", "no_code")
def test_between_experts() -> None:
    """Refused, with the write as its reason."""
    torch.manual_seed(0)
    model = Before("target", "target", 1)
    x = torch.randn(T, H)
    compiled = torch.compile(model, backend="moefuse", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    report = moefuse.last_report()
    assert not report.fused
    assert [s.code for s in report.skipped] == ["mutation"], report
