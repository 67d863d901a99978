"""Operators of the user's own that write to their arguments: only their schema says so, and what is fused must see tensors as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.code_once]
E, K, H = 4, 2, 8


@torch.library.custom_op("moefuse_tests::double", mutates_args=("x",))
def double(x: Tensor) -> None:
    x.mul_(2)


@torch.library.custom_op("moefuse_tests::copy_twice", mutates_args=("first", "second"))
def copy_twice(source: Tensor, first: Tensor, second: Tensor) -> None:
    first.copy_(source)
    second.copy_(2 * source)


@torch.library.custom_op("moefuse_tests::look", mutates_args=())
def look(x: Tensor) -> Tensor:
    return x + 0


for _op in (double, copy_twice):
    _op.register_fake(lambda *args: None)
look.register_fake(torch.empty_like)


class Layer(nn.Module):
    """Every expert on every token; ``between`` runs behind the second of them."""

    def __init__(self, between: Callable[[Tensor, Tensor], Any], before: Callable[[Tensor], Tensor] = lambda x: x + 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 12), nn.SiLU(), nn.Linear(12, H)) for _ in range(E))
        self.between, self.before = between, before

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.before(x)
        other = torch.zeros_like(x)
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
            if e == 1:
                self.between(x, other)
        return out, other


def check(model: nn.Module) -> moefuse.FusionReport:
    x = torch.randn(10, H, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for got, wanted in zip(torch.compile(model, backend="moefuse", fullgraph=True)(x.clone()), model(x.clone()), strict=True):
            torch.testing.assert_close(got, wanted)
    report = moefuse.last_report()
    assert report is not None
    return report


@pytest.mark.parametrize(
    "between",
    [
        lambda x, other: torch.ops.moefuse_tests.double(x),
        lambda x, other: torch.ops.moefuse_tests.copy_twice(other + 1, other, second=x),
        lambda x, other: torch.ops.moefuse_tests.copy_twice(source=other + 3, first=x, second=other),
    ],
)
def test_tokens_that_change_meanwhile(between: Callable[[Tensor, Tensor], Any]) -> None:
    report = check(Layer(between))
    assert [s.code for s in report.skipped] == ["mutation"]


@pytest.mark.parametrize(
    "between",
    [
        lambda x, other: torch.ops.moefuse_tests.look(x),
        lambda x, other: torch.ops.moefuse_tests.double(other),
        lambda x, other: torch.ops.moefuse_tests.copy_twice(x, other.clone(), other),
    ],
)
def test_what_leaves_the_tokens_alone(between: Callable[[Tensor, Tensor], Any]) -> None:
    """Such an operator is no reason to leave experts alone, and what it writes is there afterwards."""
    assert len(check(Layer(between)).fused) == 1


def test_tokens_that_were_written_before() -> None:
    def before(x: Tensor) -> Tensor:
        x, rest = x + 1, torch.empty_like(x)
        torch.ops.moefuse_tests.copy_twice(x * 3, x, rest)
        return x - 0.5 * rest + x

    assert len(check(Layer(lambda x, other: None, before)).fused) == 1
