import torch
import torch.nn.functional as F
from torch import nn


class SigmaMoE(nn.Module):
    def __init__(self, d=24, size=16, E=8, k=3):
        super().__init__()
        self.keys = nn.Parameter(torch.randn(E, d, size) * d**-0.5)
        self.values = nn.Parameter(torch.randn(E, size, d) * size**-0.5)
        self.expert_sel = nn.Parameter(torch.randn(E, d) * d**-0.5)
        self.norm = nn.LayerNorm(d)
        self.E, self.k = E, k

    def once(self, x):
        sel = torch.sigmoid(F.linear(x, self.expert_sel))
        val, index = sel.topk(self.k, dim=-1, sorted=False)
        hot = F.one_hot(index, self.E).to(x.dtype)
        gate = (hot * val.unsqueeze(-1)).sum(-2)
        out = torch.zeros_like(x)
        for e in range(self.E):
            act = F.relu(x @ self.keys[e]) * gate[..., e : e + 1]
            out = out + act @ self.values[e]
        return out

    def forward(self, x):
        for _ in range(2):
            x = x + self.once(self.norm(x))
        return x


def make():
    torch.manual_seed(38)
    return SigmaMoE(), (torch.randn(2, 4, 24),)
