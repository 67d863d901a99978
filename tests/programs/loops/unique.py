"""Loops over the expert ids that occur."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import Layer, near_miss, positive


@positive
class UniqueIds(Layer):
    """``for e in torch.unique(ids)``: 0-d tensors."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in torch.unique(ids):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class UniqueNumbers(Layer):
    """``e.item()`` in the loop, of the flattened ids."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in ids.view(-1).unique(sorted=True):
            number = e.item()
            mask = (ids == number).any(dim=-1)
            scale = (weights * (ids == number)).sum(-1)
            out[mask] += self.experts[number](x[mask]) * scale[mask].unsqueeze(-1)
        return out


class Numbered(Layer):
    """``ids.unique(return_counts=True)``; subclasses say what is done with the numbers."""

    def weight(self, counts: Tensor, e: int) -> float | Tensor:
        return 1.0

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        hit, counts = ids.unique(return_counts=True)
        for e in hit.tolist():
            tok, slot = torch.where(ids == e)
            share = weights[tok, slot, None] * self.weight(counts, e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * share)
        return out


@positive
class UniqueWithCounts(Numbered):
    """Nothing."""


@near_miss
class UniqueByFrequency(Numbered):
    """The first number scales every expert, whoever it belongs to."""

    def weight(self, counts: Tensor, e: int) -> float | Tensor:
        return counts[0] / counts.sum()
