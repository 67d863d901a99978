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
class AsksTheNeighbour(Counted):
    """The branch asks about another expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            other = torch.where(ids == (e + 1) % E)[0]
            if other.numel() > 0:
                tok, slot = torch.where(ids == e)
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class ElseBranch(Counted):
    """An expert without tokens does something too."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
            else:
                out = out + self.expert(e, x) * 0.1
        return out


@near_miss
class FlagAfterwards(Counted):
    """A flag that the branch sets."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, last = torch.zeros_like(x), False
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                last = e == E - 1
        return out + 1 if last else out


@near_miss
class KeepsATensor(Counted):
    """A tensor from the branch is read behind it; without the branch it would be the one before."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, last = torch.zeros_like(x), x[:1]
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                last = self.expert(e, x[:1])
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + last


@near_miss
class RebindsAnOldTensor(Counted):
    """The same with a tensor that is older than the branch, so that no operation shows it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, scale, other = torch.zeros_like(x), x.mean(), x.std()
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
                scale = other
        return out * scale


@near_miss
class ReturnsWhenEmpty(Counted):
    """An expert without tokens ends the layer."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                return out
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class BreaksWhenEmpty(Counted):
    """An expert without tokens ends the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                break
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


@near_miss
class RandomInTheBranch(Counted):
    """Random numbers are drawn for experts with tokens only, and then thrown away."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                torch.rand(3)
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + torch.rand_like(x)


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
