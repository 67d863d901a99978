"""Rows by their tokens and all their features: ``out[token[:, None], torch.arange(H)] += y`` is ``out[token] += y``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import check_read

E, K, H, WIDTH = 4, 2, 12, 16
Expert = Callable[[Tensor], Tensor]


def added(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    out[token[:, None], torch.arange(H)[None]] += expert(x[token])


def read_so(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    at = (token.unsqueeze(-1), torch.arange(H))
    out[at] += expert(x[at])


def put(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    out.index_put_((token[:, None], torch.arange(H).unsqueeze(0)), expert(x[token]), accumulate=True)


def turned(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    out[token[:, None], torch.arange(H).flip(0)] += expert(x[token])


def some(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    out[token[:, None], torch.arange(H // 2)] += expert(x[token])[:, : H // 2]


def shifted(out: Tensor, x: Tensor, token: Tensor, expert: Expert) -> None:
    out[token[:, None], (torch.arange(H) + 1) % H] += expert(x[token])


class Layer(nn.Module):
    def __init__(self, add: Callable[[Tensor, Tensor, Tensor, Expert], None]) -> None:
        super().__init__()
        self.router, self.add = nn.Linear(H, E), add
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            self.add(out, x, token, lambda rows, w=weights[token, slot, None], run=expert: run(rows) * w)  # type: ignore[misc]
        return out


class Sequences(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            b, t, k = torch.where(ids == e)
            out[b[:, None], t[:, None], torch.arange(H)[None]] += expert(x[b, t]) * weights[b, t, k, None]
        return out


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize("add", [added, read_so, put], ids=lambda f: f.__name__)
def test_all_features_of_a_row(add: Callable[[Tensor, Tensor, Tensor, Expert], None], verify: str) -> None:
    outcome = check_read(Layer(add), 11, H, verify=verify)
    assert ([s.message for s in outcome.skipped], len(outcome.fused)) == ([], 1)


def test_all_features_of_tokens_in_sequences() -> None:
    outcome = check_read(Sequences(added), 2, 6, H)
    assert ([s.message for s in outcome.skipped], len(outcome.fused)) == ([], 1)


@pytest.mark.parametrize("add", [turned, some, shifted], ids=lambda f: f.__name__)
def test_other_features(add: Callable[[Tensor, Tensor, Tensor, Expert], None]) -> None:
    outcome = check_read(Layer(add), 11, H)
    assert outcome.fused == []
    assert outcome.skipped
