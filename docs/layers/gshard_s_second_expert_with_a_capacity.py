import torch
from torch import nn, einsum
import torch.nn.functional as F


def top1(t):
    values, index = t.topk(k=1, dim=-1)
    return values.squeeze(-1), index.squeeze(-1)


def cumsum_exclusive(t, dim=-2):
    return t.cumsum(dim=dim) - t


class Experts(nn.Module):
    def __init__(self, dim, num_experts=4, hidden_dim=48):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) * 0.2)
        self.w2 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) * 0.2)
        self.act = nn.GELU()

    def forward(self, x):
        hidden = self.act(einsum("...nd,...dh->...nh", x, self.w1))
        return einsum("...nh,...hd->...nd", hidden, self.w2)


class MoE(nn.Module):
    def __init__(self, dim=24, num_experts=4, threshold=0.2, capacity_factor=1.25, loss_coef=1e-2):
        super().__init__()
        self.num_gates, self.threshold, self.capacity_factor, self.loss_coef = num_experts, threshold, capacity_factor, loss_coef
        self.w_gating = nn.Parameter(torch.randn(dim, num_experts) * 0.3)
        self.experts = Experts(dim, num_experts)

    def gate(self, x):
        b, n, _ = x.shape
        E = self.num_gates
        raw = einsum("bnd,de->bne", x, self.w_gating).softmax(dim=-1)
        gate_1, index_1 = top1(raw)
        mask_1 = F.one_hot(index_1, E).float()
        without = raw * (1.0 - mask_1)
        gate_2, index_2 = top1(without)
        mask_2 = F.one_hot(index_2, E).float()
        denom = gate_1 + gate_2 + 1e-9
        gate_1, gate_2 = gate_1 / denom, gate_2 / denom
        loss = (raw.mean(-2) * mask_1.mean(-2)).mean() * float(E**2)
        mask_2 = mask_2 * (gate_2 > self.threshold).unsqueeze(-1).float()
        C = max(int(n * self.capacity_factor / E), 4)
        pos_1 = cumsum_exclusive(mask_1) * mask_1
        mask_1 = mask_1 * (pos_1 < C).float()
        count_1 = mask_1.sum(dim=-2, keepdim=True)
        flat_1 = mask_1.sum(-1)
        pos_1 = pos_1.sum(-1)
        gate_1 = gate_1 * flat_1
        pos_2 = (cumsum_exclusive(mask_2) + count_1) * mask_2
        mask_2 = mask_2 * (pos_2 < C).float()
        flat_2 = mask_2.sum(-1)
        pos_2 = pos_2.sum(-1)
        gate_2 = gate_2 * flat_2

        def part(g, f, i, p):
            return g[..., None, None] * f[..., None, None] * F.one_hot(i, E)[..., None] * F.one_hot(p.long(), n)[..., None, :C]

        combine = part(gate_1, flat_1, index_1, pos_1) + part(gate_2, flat_2, index_2, pos_2)
        return combine.bool().to(combine), combine, loss

    def forward(self, x):
        dispatch, combine, loss = self.gate(x)
        inputs = einsum("bnd,bnec->becd", x, dispatch)
        out = self.experts(inputs)
        return einsum("becd,bnec->bnd", out, combine), loss * self.loss_coef


def make():
    torch.manual_seed(13)
    return MoE(), (torch.randn(2, 12, 24),)
