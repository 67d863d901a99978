import torch
import torch.nn.functional as F
from torch import nn


class GatherMoE(nn.Module):
    def __init__(self, d=32, h=24, E=8, k=3):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(E, d) * d**-0.5)
        self.w13 = nn.Parameter(torch.randn(E, 2 * h, d) * d**-0.5)
        self.w2 = nn.Parameter(torch.randn(E, d, h) * h**-0.5)
        self.k = k

    def forward(self, x):
        lead = x.shape[:-1]
        x = x.flatten(0, -2)
        s = torch.sigmoid(x @ self.gate.T)
        w, i = s.topk(self.k)
        w = w / w.sum(-1, True)
        n = x.shape[0]
        xs = x[:, None].expand(-1, self.k, -1).reshape(n * self.k, -1, 1)
        gu = torch.bmm(self.w13[i.reshape(-1)], xs).squeeze(-1)
        g, u = gu.tensor_split(2, dim=-1)
        o = torch.bmm(self.w2[i.reshape(-1)], (F.gelu(g) * u).unsqueeze(-1)).view(n, self.k, -1)
        return torch.einsum("nk,nkd->nd", w, o).view(*lead, -1)


def make():
    torch.manual_seed(29)
    return GatherMoE(), (torch.randn(2, 5, 32),)
