from dataclasses import dataclass
from typing import List

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class MoeArgs:
    num_experts: int = 8
    num_experts_per_tok: int = 2
    dim: int = 32
    hidden_dim: int = 48


class FeedForward(nn.Module):
    def __init__(self, args: MoeArgs):
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class MoeLayer(nn.Module):
    def __init__(self, experts: List[nn.Module], gate: nn.Module, moe_args: MoeArgs):
        super().__init__()
        assert len(experts) > 0
        self.experts = nn.ModuleList(experts)
        self.gate = gate
        self.args = moe_args

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shape = inputs.shape
        inputs = inputs.view(-1, shape[-1])
        gate_logits = self.gate(inputs)
        weights, selected = torch.topk(gate_logits, self.args.num_experts_per_tok)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(inputs.dtype)
        results = torch.zeros_like(inputs)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth, None] * expert(inputs[batch_idx])
        return results.view(shape)


def make():
    torch.manual_seed(1)
    args = MoeArgs()
    layer = MoeLayer([FeedForward(args) for _ in range(args.num_experts)], nn.Linear(args.dim, args.num_experts, bias=False), args)
    return layer, (torch.randn(2, 9, args.dim),)
