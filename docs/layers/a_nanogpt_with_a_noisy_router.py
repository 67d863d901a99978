import torch
import torch.nn as nn
from torch.nn import functional as F


class Expert(nn.Module):
    def __init__(self, n_embd, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd), nn.Dropout(dropout))

    def forward(self, x):
        return self.net(x)


class NoisyTopkRouter(nn.Module):
    def __init__(self, n_embd, num_experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.topkroute_linear = nn.Linear(n_embd, num_experts)
        self.noise_linear = nn.Linear(n_embd, num_experts)

    def forward(self, mh_output, noise=None):
        logits = self.topkroute_linear(mh_output)
        noise_logits = self.noise_linear(mh_output)
        eps = torch.zeros_like(logits) if noise is None else noise
        noisy_logits = logits + eps * F.softplus(noise_logits)
        top_k_logits, indices = noisy_logits.topk(self.top_k, dim=-1)
        zeros = torch.full_like(noisy_logits, float("-inf"))
        sparse_logits = zeros.scatter(-1, indices, top_k_logits)
        return F.softmax(sparse_logits, dim=-1), indices


class SparseMoE(nn.Module):
    def __init__(self, n_embd, num_experts, top_k):
        super().__init__()
        self.router = NoisyTopkRouter(n_embd, num_experts, top_k)
        self.experts = nn.ModuleList([Expert(n_embd) for _ in range(num_experts)])
        self.top_k = top_k

    def forward(self, x, noise=None):
        gating_output, indices = self.router(x, noise)
        final_output = torch.zeros_like(x)
        flat_x = x.view(-1, x.size(-1))
        flat_gating_output = gating_output.view(-1, gating_output.size(-1))
        for i, expert in enumerate(self.experts):
            expert_mask = (indices == i).any(dim=-1)
            flat_mask = expert_mask.view(-1)
            if flat_mask.any():
                expert_input = flat_x[flat_mask]
                expert_output = expert(expert_input)
                gating_scores = flat_gating_output[flat_mask, i].unsqueeze(1)
                weighted_output = expert_output * gating_scores
                final_output[expert_mask] += weighted_output.squeeze(1)
        return final_output


def make():
    torch.manual_seed(2)
    return SparseMoE(16, 8, 2), (torch.randn(2, 8, 16), torch.randn(2, 8, 8))
