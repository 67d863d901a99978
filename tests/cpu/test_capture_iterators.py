"""Iterators from before a scope: what an expert takes from one depends on how many experts before it have tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H = 3, 8


def _each(count: int) -> Iterator[int]:
    yield from range(1, count)


OLD: dict[str, Callable[[], Any]] = {
    "a list": lambda: iter([1, 2, 3, 4, 5, 6, 7, 8, 9]),
    "a range": lambda: iter(range(1, 10)),
    "a dictionary": lambda: iter({n: n for n in range(1, 10)}),
    "items": lambda: iter({n: n for n in range(1, 10)}.items()),
    "zip": lambda: zip(range(1, 10), range(1, 10), strict=True),
    "map": lambda: map(float, range(1, 10)),
    "enumerate": lambda: enumerate(range(1, 10)),
    "a generator": lambda: _each(10),
}


def _first(value: Any) -> Any:
    return value[-1] if isinstance(value, tuple) else value


def _loop(it: Any) -> Any:
    for item in it:
        return _first(item)
    return 0


TAKES: dict[str, Callable[[Any], Any]] = {
    "next": lambda it: _first(next(it)),
    "for": _loop,
    "zip": lambda it: sum(_first(item) for item, _ in zip(it, (1, 2), strict=False)),
    "in": lambda it: 2 + (3 in it),
    "call": lambda it: max(*map(_first, it), -1, -2),
    "a list": lambda it: len([*it]) + 1,
}

NEW: dict[str, Callable[[Any], Any]] = {
    "range": lambda _: sum(n for n in range(3)),
    "a loop": lambda _: [2 * n for n in range(1, 3)][-1],
    "next": lambda _: next(iter(range(2, 4))),
    "enumerate": lambda _: [i + n for i, n in enumerate(range(3))][-1],
    "zip": lambda _: [a * b for a, b in zip(range(1, 3), (2, 3), strict=True)][-1],
    "a dictionary": lambda _: sum(b for _, b in {1: 2, 2: 3}.items()),
    "a generator": lambda _: sum(_each(3)),
    "unpacked": lambda _: sum([*range(3), *iter(range(2))]),
}


class Layer(nn.Module):
    def __init__(self, make: Callable[[], Any], take: Callable[[Any], Any]) -> None:
        super().__init__()
        self.make, self.take = make, take
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Linear(6, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(1)
        out, it = torch.zeros_like(x), self.make()
        for e, expert in enumerate(self.experts):
            rows, slot = torch.where(ids == e)
            if rows.numel() == 0:
                continue
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, slot, None] * self.take(it))
        return out


def _run(make: Callable[[], Any], take: Callable[[Any], Any]) -> Seen:
    torch.manual_seed(0)
    layer, x, seen = Layer(make, take), torch.randn(12, H), Seen()
    layer.gate.bias.data[1] = -100.0  # an expert without tokens, in front of others that have some
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=capturing(seen))(x), layer(x), rtol=1e-4, atol=1e-5)
    return seen


@pytest.mark.sampled(12)
@pytest.mark.parametrize("take", TAKES)
@pytest.mark.parametrize("old", OLD)
def test_taken_from_before(old: str, take: str) -> None:
    assert not _run(OLD[old], TAKES[take]).report.fused


@pytest.mark.sampled(1)
@pytest.mark.parametrize("new", NEW)
def test_made_in_the_iteration(new: str) -> None:
    seen = _run(lambda: None, NEW[new])
    assert seen.report.fused
    assert len(seen.graphs) == 1
