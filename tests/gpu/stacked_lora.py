"""A layer of stacked experts as PEFT adapts it (``target_parameters``), in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stacked(nn.Module):
    """Sorted rows through ``grouped_mm``, with weights that PEFT adds terms to: float32 factors, B with the expert last."""

    def __init__(self, experts: int = 16, hidden: int = 256, inner: int = 128, rank: int = 8, top_k: int = 4) -> None:
        super().__init__()
        self.top_k, self.rank, self.experts = top_k, rank, experts
        self.router = nn.Linear(hidden, experts, bias=False)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * inner, hidden) * hidden**-0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(experts, hidden, inner) * inner**-0.5, requires_grad=False)
        for name, (out, given) in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
            setattr(self, f"{name}_a", nn.Parameter(torch.randn(experts * rank, given) * given**-0.5))
            setattr(self, f"{name}_b", nn.Parameter(torch.randn(out, rank * experts) * rank**-0.5))

    def weight(self, name: str) -> Tensor:
        w, a, b = (getattr(self, name + end) for end in ("", "_a", "_b"))
        left = b.reshape(-1, self.rank, self.experts).permute(2, 0, 1)
        return torch.baddbmm(w, left.to(w.dtype), a.reshape(self.experts, self.rank, -1).to(w.dtype), alpha=0.5)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(self.top_k)
        flat = ids.flatten()
        order = flat.argsort()
        ends = torch.histc(flat.float(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // self.top_k], self.weight("gate_up").transpose(1, 2), offs=ends).chunk(2, -1)
        out = F.grouped_mm(F.silu(gate) * up, self.weight("down").transpose(1, 2), offs=ends) * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        return out[back].view(x.shape[0], self.top_k, -1).sum(1).to(x.dtype)
