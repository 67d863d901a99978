"""What the models are made of, and the two lists that they are in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, H, I, E, K = 12, 16, 24, 4, 2  # noqa: E741  (the letters of moefuse.spec)

Make = Callable[[], nn.Module]
HAVE: list[Make] = []
"""Models with experts: a warning, and an error under ``strict``."""
HAVE_NOT: list[Make] = []
"""Models without: not a word."""


def have(make: Make) -> Make:
    HAVE.append(make)
    return make


def have_not(make: Make) -> Make:
    HAVE_NOT.append(make)
    return make


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Layer(nn.Module):
    """A router that is a matrix, and a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.load = [0] * E

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        return weights, ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out
