from typing import Optional, Tuple

import torch
from torch import nn, Tensor


def route_top1(logits: Tensor) -> Tuple[Tensor, Tensor]:
    probs = torch.softmax(logits.float(), dim=-1).type_as(logits)
    return probs.max(dim=-1)


class FeedForwardModule(nn.Module):
    def __init__(self, embed_dim: int, hidden: int):
        super().__init__()
        self.layer_norm = nn.LayerNorm(embed_dim)
        self.linear1 = nn.Linear(embed_dim, hidden)
        self.activation = nn.SiLU()
        self.linear2 = nn.Linear(hidden, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(self.layer_norm(x))))


class MoEFeedForwardModule(nn.Module):
    def __init__(self, embed_dim: int = 32, hidden: int = 64, num_experts: int = 4):
        super().__init__()
        self.router = nn.Linear(embed_dim, num_experts)
        self.ffn = nn.ModuleList([FeedForwardModule(embed_dim, hidden) for _ in range(num_experts)])

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        T, B, C = x.size()
        frames = x.reshape(T * B, C)
        gate, which = route_top1(self.router(frames))
        if padding_mask is not None:
            valid = ~padding_mask.transpose(0, 1).reshape(T * B)
        else:
            valid = torch.ones(T * B, dtype=torch.bool)
        output = torch.zeros_like(frames)
        for index, ffn in enumerate(self.ffn):
            pos = torch.nonzero((which == index) & valid, as_tuple=True)[0]
            output = output.index_copy(0, pos, ffn(frames[pos]))
        output = output * gate.unsqueeze(-1)
        return x + 0.5 * output.view(T, B, C)


def make():
    torch.manual_seed(11)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[1, 6:] = True
    return MoEFeedForwardModule(), (torch.randn(9, 2, 32), mask)
