"""Layers of experts that keep, log or compare how many tokens an expert has."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.parts import E, Expert, H, I, K, Layer, have

log = logging.getLogger(__name__)


@have
class Counting(Layer):
    """A router [H, E], and Python counts the tokens of each expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            self.load[e] = tok.numel()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class Logging(Layer):
    """The count is only logged."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            log.info("expert %d: %d", e, tok.numel())
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class Listed(nn.Module):
    """Experts as lists of matrices, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.w1 = nn.ParameterList(nn.Parameter(torch.randn(H, I)) for _ in range(E))
        self.w2 = nn.ParameterList(nn.Parameter(torch.randn(I, H)) for _ in range(E))
        self.load: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load.append(tok.numel())
            out.index_add_(0, tok, F.relu(x[tok] @ self.w1[e]) @ self.w2[e] * weights[tok, slot, None])
        return out


@have
class Stacked(nn.Module):
    """Stacked experts, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.w1, self.w2 = nn.Parameter(torch.randn(E, H, I)), nn.Parameter(torch.randn(E, I, H))
        self.load: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load.append(len(tok))
            out.index_add_(0, tok, F.relu(x[tok] @ self.w1[e]) @ self.w2[e] * weights[tok, slot, None])
        return out


@have
class SecondLost(nn.Module):
    """One layer is fused, and the one behind it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


@have
class Mixed(Layer):
    """Experts of two kinds, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList((Expert(), nn.Linear(H, H), Expert(), nn.Linear(H, H)))

    forward = Counting.forward


@have
class Generating(Layer):
    """The tokens of each expert come from a generator that stops at empty ones."""

    def hits(self, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if len(tok) == 0:
                return
            yield e, tok, slot

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, tok, slot in self.hits(ids):
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@have
class Stack(nn.Module):
    """Counting layers in a decoder with a head of as many classes as it has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(H), "mlp": Counting()}) for _ in range(3))
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))  # type: ignore[index]
        return self.head(x)  # type: ignore[no-any-return]


@have
class Hashed(Layer):
    """No router: the tokens say by themselves where they go, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        del self.w_gate

    def forward(self, x: Tensor) -> Tensor:
        ids, out = (x[:, 0] * 100).long() % E, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = torch.where(ids == e)[0]
            self.load[e] += len(tok)
            out.index_add_(0, tok, expert(x[tok]))
        return out


@have
class DeepRouter(Layer):
    """Scores of two layers with noise, as in Shazeer 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, E))
        self.w_noise = nn.Parameter(torch.zeros(H, E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        best, ids = (logits + torch.zeros_like(logits) * F.softplus(x @ self.w_noise)).topk(K)
        return best.softmax(-1), ids

    forward = Counting.forward
