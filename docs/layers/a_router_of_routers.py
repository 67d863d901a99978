import torch
from torch import nn


class LeafMoE(nn.Module):
    def __init__(self, d, h, E, k):
        super().__init__()
        self.router = nn.Linear(d, E, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, d)) for _ in range(E)])
        self.k = k

    def forward(self, x):
        w, idx = self.router(x).softmax(-1).topk(self.k, -1)
        y = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            r, c = torch.where(idx == i)
            y = y.index_add(0, r, e(x[r]) * w[r, c].unsqueeze(-1))
        return y


class TreeMoE(nn.Module):
    def __init__(self, d=16, h=32, groups=2, E=4, k=2):
        super().__init__()
        self.root = nn.Linear(d, groups)
        self.children_ = nn.ModuleList([LeafMoE(d, h, E, k) for _ in range(groups)])

    def forward(self, x):
        p = self.root(x).softmax(-1)
        best, g = p.max(-1)
        out = torch.zeros_like(x)
        for i, child in enumerate(self.children_):
            sel = (g == i).nonzero().flatten()
            out[sel] = child(x[sel]) * best[sel, None]
        return out


def make():
    torch.manual_seed(31)
    return TreeMoE(), (torch.randn(18, 16),)
