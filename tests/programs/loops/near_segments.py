"""Loops over pieces of sorted slots, or over the ids that occur, that are no mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, K, Layer, near_miss
from tests.programs.loops.segments import Ordered


class Cut(Ordered):
    """Pieces in a list, put together again; subclasses change one thing."""

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        perm = ids.flatten().argsort(stable=True)
        return perm, perm // K

    def whole(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs, dim=0)

    def piece(self, e: int, h: Tensor, n: int) -> Tensor:
        return self.expert(e, h)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, outs, start = x[token], [], 0
        for e, n in enumerate(self.counts(ids).tolist()):
            if n == 0:
                continue
            end = start + n
            outs.append(self.piece(e, rows[start:end], n))
            start = end
        return self.unsorted(self.whole(outs), perm, weights)


@near_miss
class CutByOtherCounts(Cut):
    """The counts of the experts in another order."""

    def counts(self, ids: Tensor) -> Tensor:
        return super().counts(ids).flip(0)


@near_miss
class CutByChangedCounts(Cut):
    """Counts that were moved from one expert to another."""

    def counts(self, ids: Tensor) -> Tensor:
        counts = super().counts(ids)
        counts[0] += counts[1]
        counts[1] = 0
        return counts


@near_miss
class CutUnsorted(Cut):
    """Slots that are not sorted."""

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        perm = torch.arange(ids.numel())
        return perm, perm // K


@near_miss
class CutDescending(Cut):
    """Slots sorted the other way."""

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        perm = ids.flatten().argsort(descending=True)
        return perm, perm // K


@near_miss
class CutAndReversed(Cut):
    """The pieces are put together from the last to the first."""

    def whole(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs[::-1])


@near_miss
class CountsItsPieces(Cut):
    """How many experts had tokens."""

    def whole(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs) * len(outs)


@near_miss
class LooksAtAPiece(Cut):
    """The first expert that had tokens."""

    def whole(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs) + outs[0].mean()


@near_miss
class PopsAPiece(Cut):
    """The last expert that had tokens, and the others before it."""

    def whole(self, outs: list[Tensor]) -> Tensor:
        last = outs.pop()
        return torch.cat([*outs, last * 2])


@near_miss
class DividesByCount(Cut):
    """The number of tokens of an expert."""

    def piece(self, e: int, h: Tensor, n: int) -> Tensor:
        return self.expert(e, h) / n


@near_miss
class StatisticsOfAPiece(Cut):
    """The mean over the tokens of an expert."""

    def piece(self, e: int, h: Tensor, n: int) -> Tensor:
        return self.expert(e, h - h.mean(dim=0, keepdim=True))


@near_miss
class NumberOfThePiece(Cut):
    """What an expert computes depends on its number."""

    def piece(self, e: int, h: Tensor, n: int) -> Tensor:
        return self.expert(e, h) * (e + 1)


@near_miss
class CutByOtherRouting(Ordered):
    """The counts of another choice of experts."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        sizes = F.one_hot((-logits).topk(K)[1].flatten(), num_classes=E).sum(0).tolist()
        rows = torch.cat([expert(piece) for expert, piece in zip(self.experts, x[token].split(sizes), strict=True)])
        return self.unsorted(rows, perm, weights)


@near_miss
class SkipsFew(Ordered):
    """An expert with one token is left out, and its slots stay zero."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, out, start = x[token], torch.zeros(token.shape[0], x.shape[1]), 0
        for e, n in enumerate(self.counts(ids).tolist()):
            if n > 1:
                out[start : start + n] = self.expert(e, rows[start : start + n])
            start += n
        return self.unsorted(out, perm, weights)


@near_miss
class MissesTheLastPiece(Ordered):
    """The slots of the last expert stay zero."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, out, start = x[token], torch.zeros(token.shape[0], x.shape[1]), 0
        for e, n in enumerate(self.counts(ids).tolist()[:-1]):
            out[start : start + n] = self.experts[e](rows[start : start + n])
            start = start + n
        return self.unsorted(out, perm, weights)


@near_miss
class UniqueOfOtherIds(Layer):
    """The ids that occur, each one further."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in ((ids + 1) % E).unique():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class UniqueOfOneSlot(Layer):
    """The ids that occur in the first slot."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in ids[:, 0].unique():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class CountsUnique(Layer):
    """How many experts have tokens."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, turns = torch.zeros_like(x), 0
        for e in ids.unique():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
            turns += 1
        return out / turns


@near_miss
class AsksForNumpysType(Cut):
    """A number out of a NumPy array is no Python integer."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, outs, start = x[token], [], 0
        for e, n in enumerate(self.counts(ids).cpu().numpy()):
            factor = 3.0 if isinstance(n, int) else 2.0
            end = start + n
            outs.append(self.expert(e, rows[start:end]) * factor)
            start = end
        return self.unsorted(self.whole(outs), perm, weights)


@near_miss
class BranchesOnNumpysType(Cut):
    """The same by ``type``."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        perm, token = self.order(ids)
        rows, outs, start = x[token], [], 0
        for e, n in enumerate(self.counts(ids).cpu().numpy()):
            end = start + n
            outs.append(self.expert(e + (type(n) is int) * 0, rows[start:end]) * (1.0 + (type(n) is int)))
            start = end
        return self.unsorted(self.whole(outs), perm, weights)
