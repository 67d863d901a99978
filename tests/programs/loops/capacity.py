"""Experts that take no more than so many tokens: the mask of the chosen experts, with what is above the capacity taken out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, Layer, near_miss, positive


class _Capacity(Layer):
    """Top-1, at most two tokens for each expert; subclasses write the condition."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        chosen = F.one_hot(logits.argmax(-1), num_classes=E)
        mask = self.kept(chosen, logits)
        weights = logits.softmax(-1).max(-1).values[:, None]
        return self.loop(x, mask, weights)

    def loop(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = mask[:, None].permute(2, 1, 0)
        for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, tok = torch.where(mask[row].squeeze(0))
            out.index_add_(0, tok, self.experts[row](x[tok]) * weights[tok, slot, None])  # type: ignore[index]
        return out

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return chosen * (chosen.cumsum(0) <= 2)


@positive
class FirstTwoTokens(_Capacity):
    """A token behind two others of its expert has none."""


@positive
class NoTokenAtAll(_Capacity):
    """No expert has room."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return chosen * (chosen.cumsum(0) <= 0)


@positive
class CastCondition(_Capacity):
    """The condition as numbers, in front."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return (chosen.cumsum(0) <= 2).to(chosen.dtype) * chosen


@positive
class OfTokens(_Capacity):
    """A condition on tokens alone: padding."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return chosen * (logits[:, :1] > 0)


@positive
class Twice(_Capacity):
    """Two conditions, one after another."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return super().kept(chosen * (logits[:, :1] > 0), logits)


@positive
class WeightsFromATable(_Capacity):
    """Weights [T, E], of which each expert takes its column."""

    def loop(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out, table = torch.zeros_like(x), mask * weights
        for e in range(E):
            tok = mask[:, e].nonzero().squeeze(-1)
            out.index_add_(0, tok, self.experts[e](x[tok]) * table[tok, e, None])
        return out


@positive
class EachSlot(_Capacity):
    """Top-2: each slot on its own."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        mask = F.one_hot(ids, num_classes=E)
        mask = mask * (mask.cumsum(0) <= 2)
        out, mask = torch.zeros_like(x), mask.permute(2, 1, 0)
        for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, tok = torch.where(mask[row].squeeze(0))
            out.index_add_(0, tok, self.experts[row](x[tok]) * weights[tok, slot, None])  # type: ignore[index]
        return out


@positive
class MaskAsIds(_Capacity):
    """The mask taken for ids: E slots for each token, whose expert is 0 or 1, with the weights of a table. (transformers 5's nllb_moe.)"""

    def loop(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out, table = torch.zeros_like(x), mask * weights + weights
        again = F.one_hot(mask, num_classes=E).permute(2, 1, 0)
        for row in torch.greater(again.sum(dim=(-1, -2)), 0).nonzero():
            slot, tok = torch.where(again[row].squeeze(0))
            out.index_add_(0, tok, self.experts[row](x[tok]) * table[tok, slot, None])  # type: ignore[index]
        return out


@near_miss
class OtherMaskForHits(_Capacity):
    """The loop asks who was chosen, the body who has room: an iteration may run with no token, and one is left out for nothing."""

    def loop(self, x: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        mask = mask[:, None].permute(2, 1, 0)
        full = torch.greater(mask.sum(dim=(-1, -2)), 1)
        for row in full.nonzero():
            slot, tok = torch.where(mask[row].squeeze(0))
            out.index_add_(0, tok, self.experts[row](x[tok]) * weights[tok, slot, None])  # type: ignore[index]
        return out


@near_miss
class Numbers(_Capacity):
    """Places in the queue, not zeros and ones: an entry that is two is true as well, and a negative one is chosen by no argmax."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return chosen * (2 - chosen.cumsum(0))


@near_miss
class Added(_Capacity):
    """A condition that adds experts takes none away."""

    def kept(self, chosen: Tensor, logits: Tensor) -> Tensor:
        return chosen + (logits > 1)
