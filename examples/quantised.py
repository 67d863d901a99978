"""Experts in eight bits, in a layer of one's own: the fused op multiplies what is stored, and unpacks nothing.

python examples/quantised.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse


class Int8(nn.Module):
    """A matrix [out, in] as int8, with a scale for each row."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale)


class Expert(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate, self.up = (Int8(torch.randn(width, hidden) * 0.1) for _ in range(2))
        self.down = Int8(torch.randn(hidden, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class MoE(nn.Module):
    def __init__(self, hidden: int = 64, width: int = 64, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(hidden, experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(hidden, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def main() -> None:
    torch.manual_seed(0)
    layer, x = MoE(), torch.randn(2, 64)  # as many tokens as a decode step has; a CPU unpacks in turn for many, and the report says so
    with torch.no_grad():
        wanted = layer(x)
        layer.compile(backend="moefuse", options={"expect": 1})
        print(f"differs by at most {(layer(x) - wanted).abs().max().item():.1e}")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
