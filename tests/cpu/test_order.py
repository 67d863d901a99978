"""Sums whose tokens are not their first dimension: refused. With as many tokens as features only the order of the axes tells them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse import Options
from tests.cpu.beside_eager import E, H, K
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Form = Callable[[list[Tensor], Tensor, Tensor], Tensor]


def masked(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return sum(y.t() * table[:, e] for e, y in enumerate(ys))  # type: ignore[return-value]


def turned_back(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return masked(ys, table, x).t()


def beside_tokens(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return x.t() + masked(ys, table, x)


def collected(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(H, len(x))
    for e, y in enumerate(ys):
        out += y.t() * table[:, e]
    return out


def stacked(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return torch.stack([y.mT * table[:, e] for e, y in enumerate(ys)]).sum(0)


def einsum(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("teh,te->ht", torch.stack(ys, 1), table)


def each_turned_back(ys: list[Tensor], table: Tensor, x: Tensor) -> Tensor:
    return sum((y.t() * table[:, e]).t() for e, y in enumerate(ys))  # type: ignore[return-value]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, 4, H)), nn.Parameter(torch.randn(E, H, 4))


class Turned(Experts):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        return self.form([(x @ self.up[e].t()).relu() @ self.down[e].t() for e in range(E)], table, x)


class BySlot(Experts):
    """``einsum("tkh,tk->ht")`` of gathered experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K, -1)
        h = torch.einsum("th,tkih->tki", x, self.up[ids]).relu()
        return torch.einsum("tkh,tk->ht", torch.einsum("tki,tkhi->tkh", h, self.down[ids]), weights)


TURNED = [masked, turned_back, beside_tokens, collected, stacked, einsum]


@pytest.mark.every_value
@pytest.mark.parametrize("tokens", [H, 6], ids=["as many tokens as features", "fewer"])
@pytest.mark.parametrize("make", [*TURNED, each_turned_back, BySlot], ids=lambda f: f.__name__)
def test_tokens_come_first(make: Form | type[nn.Module], tokens: int) -> None:
    """Without the proof, which sees it."""
    torch.manual_seed(0)
    model = make() if isinstance(make, type) else Turned(make)
    seen, x = Seen(), torch.randn(tokens, H)
    compiled = torch.compile(model, backend=capturing(seen, Options(verify="off")), dynamic=False)
    torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(seen.report.fused) == (make is each_turned_back)
    if make in TURNED:
        assert "does not have its tokens first and its features last" in str(seen.report)
