"""Rows of an expert whose weight or score is above a number, and ids in another dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, K, Layer, near_miss, positive


class Bounded(Layer):
    """One slot after the other; subclasses say which tokens an expert takes."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (weights[:, k] > 0.4)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for k in range(K):
            for e in range(E):
                mask = self.mask(ids, weights, k, e)
                if mask.any():
                    out[mask] += self.experts[e](x[mask]) * weights[mask, k, None]
        return out


@positive
class SlotAbove(Bounded):
    """The weight of that slot."""


@positive
class SlotNotBelow(Bounded):
    """The number itself is enough, and the condition comes first."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (weights[:, k] >= 0.4) & (ids[:, k] == e)


@positive
class SlotOfFloats(Bounded):
    """Ids as floats."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return ids.float()[:, k] == e


@positive
class SlotOfTable(Bounded):
    """One entry for each token, slot and expert."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return F.one_hot(ids, E).float()[:, k, e] > 0.5


@positive
class SlotOfTransposedTable(Bounded):
    """Experts first, then slots."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return F.one_hot(ids, E).permute(2, 1, 0)[e, k].bool()


@positive
class SlotOfWeightedTable(Bounded):
    """Such a table of weights, and those that are above a number."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (F.one_hot(ids, E) * weights[..., None])[:, k, e] > 0.4


@near_miss
class OtherSlotOfTable(Bounded):
    """The entry of another slot than that of the weight."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return F.one_hot(ids, E)[:, 1 - k, e] > 0


@near_miss
class OtherSlotAbove(Bounded):
    """The weight of the other slot."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (weights[:, 1 - k] > 0.4)


@near_miss
class SlotBelow(Bounded):
    """Weights below a number, as zero is."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (weights[:, k] < 0.4)


@near_miss
class SlotAboveItsOwn(Bounded):
    """Another number for each slot."""

    def mask(self, ids: Tensor, weights: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (weights[:, k] > 0.6 - 0.4 * k)


class Entered(Layer):
    """Rows and weights by a table [T, K, E], one slot after the other; subclasses say which."""

    def rows(self, table: Tensor, scores: Tensor, ids: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (scores[:, e] > 0.3)

    def weight(self, table: Tensor, mask: Tensor, k: int, e: int) -> Tensor:
        return table[mask, k, e].unsqueeze(-1)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(K, dim=-1)
        table, out = F.one_hot(ids, E) * weights.unsqueeze(-1), torch.zeros_like(x)
        for k in range(K):
            for e in range(E):
                mask = self.rows(table, scores, ids, k, e)
                if mask.any():
                    out[mask] += self.expert(e, x[mask]) * self.weight(table, mask, k, e)
        return out


@positive
class EntryByScore(Entered):
    """Where the score of all experts is above a number."""


@positive
class EntryByItself(Entered):
    """Where the entry is not zero, and taken in two steps."""

    def rows(self, table: Tensor, scores: Tensor, ids: Tensor, k: int, e: int) -> Tensor:
        return table[:, k, e] > 0

    def weight(self, table: Tensor, mask: Tensor, k: int, e: int) -> Tensor:
        return table[:, k, e, None][mask]


@near_miss
class EntryOfTheOtherSlot(Entered):
    """The weight is zero there."""

    def weight(self, table: Tensor, mask: Tensor, k: int, e: int) -> Tensor:
        return table[mask, 1 - k, e].unsqueeze(-1)


@near_miss
class EntryOfTheNextExpert(Entered):
    """The score of another expert."""

    def rows(self, table: Tensor, scores: Tensor, ids: Tensor, k: int, e: int) -> Tensor:
        return (ids[:, k] == e) & (scores[:, (e + 1) % E] > 0.1)


class Scored(Layer):
    """All slots of a token together; subclasses say which tokens an expert takes."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return (ids == e).any(-1) & (scores[:, e] > 0.3)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        scores = logits.softmax(-1)
        weights, ids = scores.topk(K, dim=-1)
        gates, out = torch.zeros_like(scores).scatter(1, ids, weights), torch.zeros_like(x)
        for e in range(E):
            token = torch.where(self.mask(ids, scores, gates, e))[0]
            out.index_add_(0, token, self.expert(e, x[token]) * gates[token, e, None])
        return out


@positive
class ScoreAbove(Scored):
    """The score of all experts, beside the chosen ones."""


@positive
class GateNotBelow(Scored):
    """The gate is zero for who was not chosen."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return gates[:, e] >= 0.3


@positive
class IdsAsBytes(Scored):
    """Ids of a few experts fit into a byte."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return (ids.to(torch.uint8) == e).any(-1)


@positive
class ScoreBesideSlots(Scored):
    """Slot by slot of the mask, and one score for all of them."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return ((ids == e) & (scores[:, e, None] > 0.3)).any(-1)


@near_miss
class ScoreOfTheNext(Scored):
    """The score of another expert."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return (ids == e).any(-1) & (scores[:, (e + 1) % E] > 0.1)


@near_miss
class ScoreAboveItsOwn(Scored):
    """Another number for each expert."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return (ids == e).any(-1) & (scores[:, e] > 0.2 + 0.1 * e)


@near_miss
class GateNotBelowZero(Scored):
    """A gate of zero is enough, and everybody has one."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return gates[:, e] >= 0.0


@near_miss
class IdsThatWrap(Scored):
    """Some of the numbers do not fit into a byte, and come out as others."""

    def mask(self, ids: Tensor, scores: Tensor, gates: Tensor, e: int) -> Tensor:
        return ((ids * 128 + ids).to(torch.uint8) == e).any(-1)
