"""Loops over the expert ids that occur, beside how often each of them does: ``zip(found.tolist(), counts.tolist())``."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import E, K, Layer, near_miss, positive


class Occurring(Layer):
    """Slots sorted by expert; subclasses go through them."""

    def through(self, x: Tensor, ids: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        sorted_ids, order = ids.flatten().sort(stable=True)
        return self.through(x, sorted_ids, order // K, weights.flatten()[order, None])

    def put(self, out: Tensor, x: Tensor, e: int, token: Tensor, weight: Tensor) -> None:
        out.index_add_(0, token, self.experts[e](x[token]) * weight)


@positive
class OccurringWithOffset(Occurring):
    """One running offset."""

    def unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unique(ids, return_counts=True)

    def through(self, x: Tensor, ids: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        found, counts = self.unique(ids)
        out, start = torch.zeros_like(x), 0
        for e, n in zip(found.tolist(), counts.tolist(), strict=True):
            self.put(out, x, e, token[start : start + n], weight[start : start + n])
            start += n
        return out


@positive
class OccurringAsTensors(Occurring):
    """Elements of tensors."""

    def through(self, x: Tensor, ids: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        found, counts = torch.unique(ids, return_counts=True)
        out, start = torch.zeros_like(x), 0
        for e, n in zip(found, counts):
            end = start + int(n.item())
            self.put(out, x, e, token[start:end], weight[start:end])  # type: ignore[arg-type]
            start = end
        return out


@positive
class OccurringInNumpy(Occurring):
    """Numbers of NumPy's."""

    def through(self, x: Tensor, ids: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        found, counts = torch.unique(ids, return_counts=True)
        out, start = torch.zeros_like(x), 0
        for e, n in zip(found.cpu().numpy(), counts.cpu().numpy()):
            self.put(out, x, e, token[start : start + n], weight[start : start + n])
            start += n
        return out


@positive
class OccurringPieces(Occurring):
    """Tensors that are split by the numbers, and outputs that are joined."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        sorted_ids, order = ids.flatten().sort()
        found, counts = torch.unique_consecutive(sorted_ids, return_counts=True)
        done = []
        for e, piece in zip(found.tolist(), x[order // K].split(counts.tolist())):
            done.append(self.experts[e](piece))
        y = torch.empty(len(order), x.shape[1])
        y[order] = torch.cat(done)
        return (y.view(len(x), K, -1) * weights[..., None]).sum(1)


@positive
class OccurringInAComprehension(Occurring):
    """Outputs in a list that is written at once."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        sorted_ids, order = ids.flatten().sort()
        found, counts = sorted_ids.unique_consecutive(return_counts=True)
        pieces = x[order // K].split(counts.tolist())
        y = torch.empty(len(order), x.shape[1])
        y[order] = torch.cat([self.experts[e](piece) for e, piece in zip(found.tolist(), pieces)], dim=0)
        return (y.view(len(x), K, -1) * weights[..., None]).sum(1)


@positive
class OccurringSplitTwice(Occurring):
    """Two tensors in pieces that have a name, and a function instead of a method."""

    def through(self, x: Tensor, ids: Tensor, token: Tensor, weight: Tensor) -> Tensor:
        found, counts = torch.unique(ids, return_counts=True)
        tokens = torch.split(token, counts.tolist(), dim=0)
        out = torch.zeros_like(x)
        for e, at, w in zip(found.tolist(), tokens, weight.split(counts.tolist())):
            self.put(out, x, e, at, w)
        return out


class Masked(Layer):
    """Rows by mask, numbers for something else: subclasses say for what."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        return self.through(torch.zeros_like(x), x, *self.route(logits))

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        raise NotImplementedError

    def put(self, out: Tensor, x: Tensor, e: int, ids: Tensor, weights: Tensor) -> None:
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])


@positive
class OccurringUnused(Masked):
    """The numbers are not used at all, and ids have two dimensions."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        for e, _ in zip(found.tolist(), counts.tolist(), strict=True):
            self.put(out, x, e, ids, weights)
        return out


@near_miss
class OccurringByRank(Masked):
    """The place among the experts that occur scales an expert: it depends on the others."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        for e, _, rank in zip(found.tolist(), counts.tolist(), range(1, E + 1)):
            self.put(out, x, e, ids, weights * rank)
        return out


@near_miss
class OccurringOfAnother(Masked):
    """The numbers are those of one slot, whose experts may be fewer."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, _ = ids.unique(return_counts=True)
        _, counts = ids[:, 0].unique(return_counts=True)
        total = 0
        for e, n in zip(found.tolist(), counts.tolist()):
            self.put(out, x, e, ids, weights)
            total += n
        return out * total


@near_miss
class OccurringInAnyOrder(OccurringWithOffset):
    """Nobody promises that the first number of slots is that of the first expert."""

    def unique(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return torch.unique(ids, sorted=False, return_counts=True)


@near_miss
class OccurringWhoseLastStays(Masked):
    """The last number is read behind the loop."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        n = 0
        for e, n in zip(found.tolist(), counts.tolist()):
            self.put(out, x, e, ids, weights)
        return out * n


@near_miss
class OccurringInAListThatIsCounted(Occurring):
    """How many experts occur is asked of a list with an item for each."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        sorted_ids, order = ids.flatten().sort()
        found, counts = sorted_ids.unique_consecutive(return_counts=True)
        pieces = x[order // K].split(counts.tolist())
        done = [self.experts[e](piece) for e, piece in zip(found.tolist(), pieces)]
        y = torch.empty(len(order), x.shape[1])
        y[order] = torch.cat(done)
        return (y.view(len(x), K, -1) * weights[..., None]).sum(1) * len(done)


@near_miss
class OccurringAsAWeight(Masked):
    """The number scales the expert's output."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        for e, n in zip(found.tolist(), counts.tolist()):
            self.put(out, x, e, ids, weights * (n / ids.numel()))
        return out


class _Sizes:
    """Something that has a ``split``, and is no tensor."""

    def __init__(self) -> None:
        self.count = 0

    def split(self, sizes: list[int]) -> list[int]:
        self.count = len(sizes)
        return sizes


@near_miss
class OccurringInAnotherSplit(Masked):
    """What splits is the program's own, and remembers how many experts occur."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        sizes = _Sizes()
        for e, _ in zip(found.tolist(), sizes.split(counts.tolist())):
            self.put(out, x, e, ids, weights)
        return out * sizes.count


@near_miss
class OccurringCounted(Masked):
    """The list has another reader."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        found, counts = ids.unique(return_counts=True)
        experts = found.tolist()
        for e, _ in zip(experts, counts.tolist()):
            self.put(out, x, e, ids, weights)
        return out * len(experts)


@near_miss
class OccurringBeforeAWrite(Masked):
    """Ids that are written to behind ``unique``, which no score of the router bounds any more."""

    def through(self, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ids = ids.clone()
        found, counts = ids.unique(return_counts=True)
        ids[0] = 0
        for e, _ in zip(found.tolist(), counts.tolist()):
            self.put(out, x, e, ids, weights)
        return out


@near_miss
class OccurringInNoOrder(Layer):
    """``unique_consecutive`` of ids as they stand: an expert may be there more than once."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        found, counts = ids.flatten().unique_consecutive(return_counts=True)
        out = torch.zeros_like(x)
        for e, _ in zip(found.tolist(), counts.tolist()):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out
