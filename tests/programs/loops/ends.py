"""Loops over hits among more classes than there are experts: the last class is nobody's, or somebody's after all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, Hits, Layer, near_miss, positive


class _OneMore(Hits):
    """``E + 1`` classes, and no ``if row == E``."""

    def mask(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.greater(F.one_hot(ids, num_classes=E + 1).permute(2, 1, 0).sum(dim=(-1, -2)), 0)


@positive
class UnusedClass(_OneMore):
    """dbrx in transformers 5: no id is E, for ids are the best of E scores; the body could not even be run for row E."""


@positive
class UnusedClassByNumber(_OneMore):
    """nemotron_h in transformers 5: ``row.item()``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero().squeeze(-1):
            e = row.item()
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])  # type: ignore[arg-type]
        return out


@positive
class UnusedClassOfArgmax(_OneMore):
    """The best one only, by ``argmax``."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = logits.softmax(-1)
        ids = probabilities.argmax(dim=-1, keepdim=True)
        return ids, probabilities.gather(1, ids)


class _Fallback(_OneMore):
    """Row E has a body of its own, which no region describes: it does not ask for weights."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        if row == E:
            tok, _ = torch.where(ids == E)
            out.index_add_(0, tok, 3 * x[tok].tanh())
        else:
            super().body(row, out, x, ids, weights)


@near_miss
class DroppedInPlace(_Fallback):
    """Ids come from a top-k of E scores, and some are overwritten."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits)
        ids = ids.clone()
        ids[weights < 0.4] = E
        return ids, weights


@near_miss
class DroppedByWhere(_Fallback):
    """The same out of place."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits)
        return torch.where(weights < 0.4, E, ids), weights


@positive
class WeightedFallback(DroppedByWhere):
    """The same with a weight: row E is an expert without weights."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        if row == E:
            tok, slot = torch.where(ids == E)
            out.index_add_(0, tok, 3 * x[tok].tanh() * weights[tok, slot, None])
        else:
            super().body(row, out, x, ids, weights)


@near_miss
class WiderScores(_Fallback):
    """The best of E + 1 scores."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return super().route(torch.cat([logits, logits.mean(-1, keepdim=True) + 0.5], dim=-1))


@near_miss
class OneSlotMore(_Fallback):
    """Every token goes to row E as well."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = super().route(logits)
        return torch.cat([ids, torch.full_like(ids[:, :1], E)], dim=-1), torch.cat([weights, weights[:, :1]], dim=-1)


@near_miss
class MaskWrittenLater(Layer):
    """The mask is true for row E because of a write behind the top-k."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        hit = F.one_hot(ids, num_classes=E + 1).sum(dim=(0, 1)) > 0
        hit[E] = True
        for row in hit.nonzero():
            if row[0] == E:
                out += x
                continue
            tok, slot = torch.where(ids == row[0])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class CountsOfMore(_Fallback):
    """Counts are topped up before they are compared."""

    def mask(self, ids: Tensor) -> Tensor:
        counts = F.one_hot(ids, num_classes=E + 1).sum(dim=(0, 1))
        return torch.greater(counts + F.one_hot(torch.tensor(E), E + 1), 0)

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        if row == E:
            out += x
        else:
            super().body(row, out, x, ids, weights)


@near_miss
class ChosenAlongTokens(_Fallback):
    """Experts choose tokens: the indices of this top-k are tokens, and may be E."""

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(logits.softmax(-1)[: E + 1], 2, dim=0)
        return ids.t().contiguous(), weights.t().contiguous()

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return super().forward(x[:E], logits)
