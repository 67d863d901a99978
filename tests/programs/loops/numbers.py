"""Loops over hits that read the number of their row: ``e = row.item()``."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import E, Layer, near_miss, positive


class _ByNumber(Layer):
    """``e`` is an index of tensors; subclasses do one thing more with it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.expert_of(row, x[tok], self.w_in[e], self.w_out[e]) * weights[tok, slot, None])
        return out

    def expert_of(self, row: Tensor, x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
        gate, up = (x @ w_in.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w_out.T


@positive
class IndexOfTensors(_ByNumber):
    """One trace for all experts."""


@positive
class IndexOfALayer(Layer):
    """The number is an index of modules: every expert is traced."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])  # type: ignore[index]
        return out


@positive
class WritesThroughANumber(Layer):
    """``seen[e]`` is a view by a number, and would be a copy by a tensor: every expert is traced."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, seen = torch.zeros_like(x), torch.zeros(E, 1)
        mask, hit = self.hits(ids)
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            seen[e].add_(1)
            out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])
        return out * seen.sum()


@near_miss
class ScaledWeight(Layer):
    """A copy of the expert's weights is scaled in place, and read behind the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, w = torch.zeros_like(x), self.w_out.clone()
        mask, hit = self.hits(ids)
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            with torch.no_grad():
                w[e].mul_(0.5)
            out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])
        return out + w.detach().sum()


@near_miss
class NumberAsFactor(_ByNumber):
    """The number scales what the expert gives."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, (e + 1) * self.expert(row, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class IndexOfAList(Layer):
    """The number is an index of a Python list of factors."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        factors = [1.0 + i for i in range(E)]
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None] * factors[e])  # type: ignore[index]
        return out


@near_miss
class LastNumber(Layer):
    """The last expert's number is an index behind the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        e: int | float = 0
        for row in hit.nonzero().squeeze(-1):
            e = row.item()
            slot, tok = torch.where(mask[e])
            out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])
        return out + self.w_out[e].sum()
