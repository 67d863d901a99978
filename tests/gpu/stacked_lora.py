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

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """A [E, r, in] and B [E, out, r] of a weight."""
        a, b = getattr(self, f"{name}_a"), getattr(self, f"{name}_b")
        return a.reshape(self.experts, self.rank, -1), b.reshape(-1, self.rank, self.experts).permute(2, 0, 1)

    def weight(self, name: str) -> Tensor:
        w, (a, b) = getattr(self, name), self.factors(name)
        return torch.baddbmm(w, b.to(w.dtype), a.to(w.dtype), alpha=0.5)

    def product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        """Sorted rows [S, in] through their experts' weights; ``ends`` [E]: where each expert's rows end."""
        return F.grouped_mm(rows, self.weight(name).transpose(1, 2), offs=ends)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1, dtype=torch.float32).topk(self.top_k)
        flat = ids.flatten()
        order = flat.argsort()
        ends = torch.histc(flat.float(), bins=self.experts, min=0, max=self.experts - 1).cumsum(0).int()
        gate, up = self.product(x[order // self.top_k], "gate_up", ends).chunk(2, -1)
        out = self.product(F.silu(gate) * up, "down", ends) * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=x.device)
        return out[back].view(x.shape[0], self.top_k, -1).sum(1).to(x.dtype)


class Split(Stacked):
    """The same with the terms beside the products, by hand, as Unsloth's split LoRA does it; the code is our own.

    B [E, out, r] is stored so: Inductor hands a copy of PEFT's to ``grouped_mm`` with strides that it does not take.
    """

    def __init__(self, *args: int, **sizes: int) -> None:
        super().__init__(*args, **sizes)
        for name in ("gate_up", "down"):
            b = getattr(self, f"{name}_b")
            setattr(self, f"{name}_b", nn.Parameter(b.data.reshape(-1, self.rank, self.experts).permute(2, 0, 1).contiguous()))

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        return getattr(self, f"{name}_a").reshape(self.experts, self.rank, -1), getattr(self, f"{name}_b")

    def product(self, rows: Tensor, name: str, ends: Tensor) -> Tensor:
        a, b = (f.to(rows.dtype).transpose(1, 2) for f in self.factors(name))
        term = F.grouped_mm(F.grouped_mm(rows, a, offs=ends), b, offs=ends)
        return F.grouped_mm(rows, getattr(self, name).transpose(1, 2), offs=ends) + 0.5 * term
