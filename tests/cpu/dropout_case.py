"""Layers with a dropout in their experts, and calls that start from the same state of the generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefuse import Options
from tests.cpu.capture_case import Seen, capturing

H, E, P = 24, 4, 0.5


class Expert(nn.Module):
    """``where``: behind the last product, between the two, in front of the first, or in front of a gate and an up projection."""

    def __init__(self, where: str, p: float = P, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(H, H, bias=False) for _ in range(2))
        self.gate = nn.Linear(H, H, bias=False) if where == "gated" else None
        self.drop, self.where = nn.Dropout(p, inplace=inplace), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where in ("first", "gated"):
            x = self.drop(x)
        h = F.relu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        out: Tensor = self.down(self.drop(h) if self.where == "between" else h)
        return self.drop(out) if self.where == "last" else out


class Layer(nn.Module):
    def __init__(self, where: str = "last", top_k: int = 1, **how: Any) -> None:
        super().__init__()
        self.router, self.top_k = nn.Linear(H, E, bias=False), top_k
        self.experts = nn.ModuleList(Expert(where, **how) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k, -1)
        return self.run(x, weights, ids)

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Loop(Layer):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Hit(Layer):
    """Only experts that have tokens: one body, and so one dropout, stands for all of them."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[hit[0]])
            out.index_add_(0, token, self.experts[hit[0]](x[token]) * weights[token, slot, None])
        return out


class Masked(Layer):
    """Every expert on every token."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Sorted(Layer):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort()
        counts = ids.view(-1).bincount(minlength=E).tolist()
        parts = x[order // self.top_k].split(counts)
        rows = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        return torch.zeros_like(x).index_add(0, order // self.top_k, rows * weights.view(-1)[order, None])


class Stacked(Layer):
    """Weights of all experts in one tensor, gathered for each token."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        up, down = (torch.stack([getattr(expert, name).weight for expert in self.experts]) for name in ("up", "down"))
        h = F.relu(torch.einsum("tki,tkhi->tkh", x[:, None].expand(-1, self.top_k, -1), up[ids]))
        out = F.dropout(torch.einsum("tki,tkhi->tkh", h, down[ids]), P, self.training)
        return (out * weights[..., None]).sum(1)


class Weightless(Loop):
    """Two more experts behind those with weights, which drop out the token itself."""

    def __init__(self, last: Callable[[], nn.Module]) -> None:
        super().__init__(top_k=2)
        self.router = nn.Linear(H, E + 2, bias=False)
        self.experts.extend(last() for _ in range(2))


KINDS = [Loop, Hit, Masked, Sorted]


def compiled(layer: nn.Module, options: Options | None = None) -> tuple[Callable[[Tensor], Tensor], Seen]:
    torch._dynamo.reset()
    seen = Seen()
    return torch.compile(layer, backend=capturing(seen, options, behind="aot_eager")), seen


def drawn_at(run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    torch.manual_seed(5)
    with torch.enable_grad():  # one graph for all
        return run(x)
