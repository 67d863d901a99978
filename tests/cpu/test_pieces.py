"""Experts on every token, weighted afterwards: the parts of a projection's features, cut in every way that people write.

Each layer is one fused region without verification too, which would hide a part that was read from the wrong place by refusing it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse.config import Options
from tests.programs.check import check_exact

E, H, N = 3, 12, 6
Cut = Callable[[Tensor], tuple[Tensor, ...]]

CUTS: dict[str, Cut] = {
    "chunk": lambda h: h.chunk(2, -1),
    "chunk from behind": lambda h: (h.chunk(2, -1)[-2], h.chunk(2, -1)[-1]),
    "split": lambda h: h.split(N, dim=-1),
    "ranges": lambda h: (h[..., :N], h[..., N:]),
    "every second": lambda h: (h[..., ::2], h[..., 1::2]),
    "unflatten, unbind": lambda h: h.unflatten(-1, (2, N)).unbind(-2),
    "unflatten, unbind, interleaved": lambda h: h.unflatten(-1, (N, 2)).unbind(-1),
    "view, select": lambda h: (h.view(-1, 2, N).select(1, 0), h.view(-1, 2, N).select(1, -1)),
    "view, index": lambda h: (h.view(*h.shape[:-1], 2, N)[:, 0], h.view(*h.shape[:-1], 2, N)[..., 1, :]),
    "view, index, interleaved": lambda h: (h.reshape(-1, N, 2)[..., 0], h.reshape(-1, N, 2)[:, :, -1]),
}
UNEVEN: dict[str, Cut] = {
    "split": lambda h: h.split([8, 4], -1),
    "chunk": lambda h: h[..., :11].chunk(3, -1)[1:],  # 4, 4 and 3 of 11
    "three": lambda h: (h.split([2, 2, 8], -1)[2], h.split([2, 2, 8], -1)[1]),
}


class Masked(nn.Module):
    def __init__(self, cut: Cut, join: Callable[[Tensor, Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.cut, self.join = cut, join
        self.router = nn.Linear(H, E)
        self.first = nn.ModuleList(nn.Linear(H, 2 * N) for _ in range(E))
        self.last = nn.ModuleList(nn.Linear(width, H) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for e in range(E):
            weight = torch.where(ids == e, weights, 0.0).sum(-1, keepdim=True)
            out = out + weight * self.last[e](self.join(*self.cut(self.first[e](x))))
        return out


def gated(a: Tensor, b: Tensor) -> Tensor:
    return nn.functional.silu(a) * b


def narrow(a: Tensor, b: Tensor) -> Tensor:
    """Parts of different widths: what they have in common."""
    width = min(a.shape[-1], b.shape[-1])
    return nn.functional.silu(a[..., :width]) * b[..., -width:]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CUTS)
def test_halves(name: str) -> None:
    torch.manual_seed(0)
    outcome = check_exact(Masked(CUTS[name], gated, N), (torch.randn(5, H),), options=Options(verify="off"))
    assert [f.tier for f in outcome.fused] == ["fused"], outcome


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_parts(name: str) -> None:
    """They begin where the parts before them end, not at a multiple of their own width."""
    torch.manual_seed(0)
    width = min(part.shape[-1] for part in UNEVEN[name](torch.zeros(1, 2 * N)))
    outcome = check_exact(Masked(UNEVEN[name], narrow, width), (torch.randn(5, H),), options=Options(verify="off"))
    assert [f.tier for f in outcome.fused] == ["grouped"], outcome
