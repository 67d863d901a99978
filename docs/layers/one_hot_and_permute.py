import torch
import torch.nn.functional as F
from torch import nn


class BlockSparseMLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.w1 = nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)
        self.w3 = nn.Linear(hidden, ffn, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


def load_balancing_loss(gate_logits, num_experts, top_k):
    routing_weights = F.softmax(gate_logits, dim=-1)
    _, selected = torch.topk(routing_weights, top_k, dim=-1)
    expert_mask = F.one_hot(selected, num_experts)
    tokens_per_expert = expert_mask.float().mean(0)
    router_prob = routing_weights.mean(0)
    return torch.sum(tokens_per_expert * router_prob.unsqueeze(0)) * num_experts


class SparseMoeBlock(nn.Module):
    def __init__(self, hidden=32, ffn=40, num_experts=8, top_k=2, jitter=0.0):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.ModuleList([BlockSparseMLP(hidden, ffn) for _ in range(num_experts)])
        self.aux_loss = None

    def forward(self, hidden_states):
        b, s, h = hidden_states.shape
        hidden_states = hidden_states.view(-1, h)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final = torch.zeros((b * s, h), dtype=hidden_states.dtype, device=hidden_states.device)
        expert_mask = F.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, h)
            current = self.experts[expert_idx](current_state) * routing_weights[top_x, idx, None]
            final.index_add_(0, top_x, current.to(hidden_states.dtype))
        self.aux_loss = load_balancing_loss(router_logits, self.num_experts, self.top_k)
        return final.reshape(b, s, h), router_logits, self.aux_loss


def make():
    torch.manual_seed(8)
    return SparseMoeBlock(), (torch.randn(2, 7, 32),)
