"""Branches that look like "has this expert tokens" and are not, or do more than run an expert."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import Counted, E, Layer, near_miss, positive


@near_miss
class MoreThanOne(Counted):
    """Not none from some, but one from many."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 1:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class OnlyPython(Layer):
    """Nothing but Python depends on the branch, so that there may be no graph at all."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        if torch.where(ids == 0)[0].numel() > 0:
            return x
        return -x


@near_miss
class Ternary(Layer):
    """The value of a conditional expression."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok, _slot = torch.where(ids == 0)
        factor = 2.0 if tok.numel() > 0 else 3.0
        return x * factor


@near_miss
class OrDefault(Layer):
    """``a or b`` as a value."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok = torch.where(ids == 0)[0]
        some = tok.numel() > 0 or None
        return x if some else -x


@near_miss
class WhileSome(Layer):
    """A loop that the branch itself keeps going."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        tok = torch.where(ids == 0)[0]
        while tok.numel() > 0:
            x = x + 1
            tok = tok[1:]
        return x


@positive
class CachesSizes(Counted):
    """Sizes are summed up, and scale a tensor: nothing more than that stays of them."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), 0
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                total += tok.numel()
        return out * total
