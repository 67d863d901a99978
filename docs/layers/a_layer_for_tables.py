import torch
import torch.nn as nn
import torch.nn.functional as F


class TopKGate(nn.Module):
    def __init__(self, in_features, n_experts, k):
        super().__init__()
        self.fc = nn.Linear(in_features, n_experts)
        self.k = k

    def forward(self, x):
        p = F.softmax(self.fc(x), dim=1)
        vals, idx = torch.topk(p, self.k, dim=1)
        mask = torch.zeros_like(p).scatter_(1, idx, 1.0)
        p = p * mask
        return p / (p.sum(dim=1, keepdim=True) + 1e-8)


class TabularMoE(nn.Module):
    def __init__(self, in_features=24, hidden=32, out_features=24, n_experts=6, k=2):
        super().__init__()
        self.gate = TopKGate(in_features, n_experts, k)
        self.experts = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(in_features, hidden), nn.LayerNorm(hidden), nn.GELU(), nn.Linear(hidden, out_features))
                for _ in range(n_experts)
            ]
        )

    def forward(self, x):
        w = self.gate(x)
        outs = torch.stack([e(x) for e in self.experts], dim=1)
        return (w.unsqueeze(-1) * outs).sum(dim=1)


def make():
    torch.manual_seed(4)
    return TabularMoE(), (torch.randn(20, 24),)
