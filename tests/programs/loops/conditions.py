"""Loops over all experts, with a branch on the number of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, H, Layer, positive


@positive
class IfNumel(Layer):
    """DeepSeek-V3 in transformers 4."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x, dtype=weights.dtype)
        mask = F.one_hot(ids, num_classes=E).permute(2, 0, 1)
        for e in range(len(self.experts)):
            tok, slot = torch.where(mask[e])
            if tok.numel() > 0:
                weighted = self.experts[e](x[tok]) * weights[tok, slot].unsqueeze(-1)
                out.index_add_(0, tok, weighted)
        return out.type(x.dtype)


@positive
class ContinueWhenEmpty(Layer):
    """``if len(idx) == 0: continue``, then ``out[tok] +=``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if len(tok) == 0:
                continue
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


@positive
class NotAny(Layer):
    """A boolean mask, skipped when it is all false."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = (ids == e).any(dim=-1)
            if not mask.any():
                continue
            w = (weights * (ids == e)).sum(-1)
            out[mask] += self.expert(e, x[mask]) * w[mask].unsqueeze(-1)
        return out


@positive
class IfMaskSum(Layer):
    """``if mask.sum() > 0``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            mask = ids == e
            if mask.sum() > 0:
                tok, slot = mask.nonzero(as_tuple=True)
                out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@positive
class IfCount(Layer):
    """``if counts[e] == 0: continue``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        counts = F.one_hot(ids, num_classes=E).sum(dim=(0, 1))
        for e in range(E):
            if counts[e] == 0:
                continue
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@positive
class NestedConditions(Layer):
    """A loop over hits, and a branch in it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            if tok.numel() > 0 and self.calls == 0:
                out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@positive
class InAFunction(Layer):
    """The loop is in a function that the layer calls, with a residual around it."""

    def combine(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return x + self.combine(x, *self.route(logits)) * 0.5


@positive
class ViewInTheLoop(Layer):
    """Each iteration takes the same view of the input again."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                rows = x.view(-1, H)[tok]
                out.index_add_(0, tok, self.expert(e, rows) * weights[tok, slot, None])
        return out


@positive
class LoopsInTheBody(Layer):
    """Iterators that the body makes for itself are its own business."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row[0]])
            y = x[tok]
            for _ in range(2):
                y = F.silu(y)
            for scale in (s * 2.0 for s in (0.25, 0.5)):
                y = y * scale
            out.index_add_(0, tok, self.expert(row[0], y) * weights[tok, slot, None])
        return out
