import torch
import torch.nn as nn
import torch.nn.functional as F


class TemporalBlock(nn.Module):
    def __init__(self, d, inner):
        super().__init__()
        self.gate_proj = nn.Linear(d, inner, bias=False)
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, h):
        return h + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class TimeMoeLayer(nn.Module):
    def __init__(self, d=24, inner=32, num_experts=6, k=2):
        super().__init__()
        self.k, self.num_experts = k, num_experts
        self.router = nn.Linear(d, num_experts, bias=False)
        self.pool = nn.ModuleList(TemporalBlock(d, inner) for _ in range(num_experts))
        self.shared_expert = TemporalBlock(d, inner)
        self.shared_gate = nn.Linear(d, 1, bias=False)
        self.out_norm = nn.LayerNorm(d)

    def forward(self, series):
        bsz, length, d = series.shape
        flat = series.reshape(-1, d)
        logits = self.router(flat)
        prob = F.softmax(logits, dim=-1)
        w, chosen = prob.topk(self.k, dim=-1)
        acc = torch.zeros_like(flat)
        for n in range(self.num_experts):
            for slot in range(self.k):
                rows = torch.nonzero(chosen[:, slot] == n).squeeze(-1)
                if rows.numel() == 0:
                    continue
                acc[rows] = acc[rows] + w[rows, slot].unsqueeze(-1) * self.pool[n](flat[rows])
        acc = acc + torch.sigmoid(self.shared_gate(flat)) * self.shared_expert(flat)
        return self.out_norm(acc).reshape(bsz, length, d), logits


def make():
    torch.manual_seed(9)
    return TimeMoeLayer(), (torch.randn(3, 6, 24),)
