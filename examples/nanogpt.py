"""Train a small GPT of one's own, with experts in the place of its MLPs, on the text of this file.

python examples/nanogpt.py --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse

WIDTH, HEADS, CONTEXT = 64, 4, 64


class Experts(nn.Module):
    def __init__(self, experts: int = 8, top_k: int = 2) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(WIDTH, experts, bias=False), top_k
        mlps = (nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(experts))
        self.experts = nn.ModuleList(mlps)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.proj, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x).flatten(0, 1)).view(x.shape)


class GPT(nn.Module):
    def __init__(self, letters: int, layers: int = 2) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(layers))), nn.Linear(WIDTH, letters)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.letters(ids) + self.places.weight[: ids.shape[1]]))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = GPT(256)
    model.compile(backend="moefuse", options={"expect": 2})  # an error if not both layers are fused
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        at = torch.randint(len(text) - CONTEXT - 1, (16, 1)) + torch.arange(CONTEXT + 1)
        loss = F.cross_entropy(model(text[at[:, :-1]]).flatten(0, 1), text[at[:, 1:]].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.2f}")
    print(moefuse.last_report())


if __name__ == "__main__":
    main()
