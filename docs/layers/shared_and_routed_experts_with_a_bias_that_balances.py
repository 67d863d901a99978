import torch
import torch.nn.functional as F
from torch import nn


class Gate(nn.Module):
    def __init__(self, dim, n_experts, topk, n_groups, topk_groups, route_scale=2.5):
        super().__init__()
        self.topk, self.n_groups, self.topk_groups, self.route_scale = topk, n_groups, topk_groups, route_scale
        self.weight = nn.Parameter(torch.randn(n_experts, dim) * dim**-0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(n_experts))

    def forward(self, x):
        scores = F.linear(x, self.weight).sigmoid()
        original_scores = scores
        scores = scores + self.bias
        scores = scores.view(x.size(0), self.n_groups, -1)
        group_scores = scores.topk(2, dim=-1)[0].sum(dim=-1)
        indices = group_scores.topk(self.topk_groups, dim=-1)[1]
        mask = scores.new_ones(x.size(0), self.n_groups, dtype=bool).scatter_(1, indices, False)
        scores = scores.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = torch.topk(scores, self.topk, dim=-1)[1]
        weights = original_scores.gather(1, indices)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.type_as(x) * self.route_scale, indices


class Expert(nn.Module):
    def __init__(self, dim, inter_dim):
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(dim, inter_dim, bias=False),
            nn.Linear(inter_dim, dim, bias=False),
            nn.Linear(dim, inter_dim, bias=False),
        )

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MoE(nn.Module):
    def __init__(self, dim=32, inter=24, n_experts=8, topk=2):
        super().__init__()
        self.dim, self.n_routed_experts = dim, n_experts
        self.gate = Gate(dim, n_experts, topk, 4, 2)
        self.experts = nn.ModuleList([Expert(dim, inter) for _ in range(n_experts)])
        self.shared_experts = Expert(dim, 2 * inter)

    def forward(self, x):
        shape = x.size()
        x = x.view(-1, self.dim)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.n_routed_experts).tolist()
        for i in range(self.n_routed_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        z = self.shared_experts(x)
        return (y + z).view(shape)


def make():
    torch.manual_seed(7)
    return MoE(), (torch.randn(2, 8, 32),)
