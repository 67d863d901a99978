"""Casts inside an expert that do more than round: a fused op would leave them out, and in 16 bits its tolerance would hide that."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import moefuse

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

CASTS = {
    "weights truncated": ("w", lambda w: (w * 4).int()),
    "weights of a byte": ("w", lambda w: w.mul(8).to(torch.uint8).to(w.dtype) / 8),
    "weights in 8 bits": ("w", lambda w: w.to(torch.float8_e5m2).to(w.dtype)),
    "weights or not": ("w", lambda w: (w * 4).int().bool()),
    "tokens truncated": ("x", lambda x: x.int().to(x.dtype)),
    "tokens in 8 bits": ("x", lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)),
    "outputs truncated": ("y", lambda y: (y * 8).int().to(y.dtype) / 8),
    "outputs in 8 bits": ("y", lambda y: y.to(torch.float8_e5m2).to(y.dtype)),
}


class Layer(nn.Module):
    """Every expert on its own rows, or ``masked`` on all of them."""

    def __init__(self, where: str, cast: object, masked: bool = False) -> None:
        super().__init__()
        self.where, self.cast, self.masked = where, cast, masked
        self.gate = nn.Linear(16, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = (None, None) if self.masked else torch.where(ids == e)
            rows, w = (x, (scores * (ids == e)).sum(-1, keepdim=True)) if self.masked else (x[token], scores[token, slot, None])
            rows = self.cast(rows) if self.where == "x" else rows  # type: ignore[operator]
            w = self.cast(w) if self.where == "w" else w  # type: ignore[operator]
            y = expert(rows)
            y = self.cast(y) if self.where == "y" else y  # type: ignore[operator]
            if self.masked:
                out = out + (y * w).to(out.dtype)
            else:
                out.index_add_(0, token, (y * w).to(out.dtype))
        return out


@pytest.mark.every_value
@pytest.mark.parametrize("masked", [False, True], ids=["selected", "masked"])
@pytest.mark.parametrize("name", CASTS)
def test_they_stay(name: str, masked: bool) -> None:
    torch.manual_seed(0)
    layer = Layer(*CASTS[name], masked).bfloat16()
    for p in layer.parameters():
        p.data.mul_(3)
    x = torch.randn(64, 16).bfloat16()
    with torch.no_grad():
        report = moefuse.explain(layer, x)
        assert not report.fused
        assert report.skipped


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cast_that_rounds_is_fused(dtype: torch.dtype) -> None:
    """As people write it around a router or an activation."""
    layer = Layer("x", lambda x: x.to(dtype).to(torch.bfloat16)).bfloat16()
    with torch.no_grad():
        assert moefuse.explain(layer, torch.randn(64, 16).bfloat16()).fused
