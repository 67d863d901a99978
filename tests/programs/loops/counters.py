"""Loops that count, beside the experts, how many tokens each of them has: for a loss, or for statistics that a module keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import E, H, Layer, near_miss, positive


class Counted(Layer):
    """Adds the numbers of tokens; subclasses count otherwise. The result shows the counters."""

    skips = True

    def start(self, x: Tensor) -> Tensor:
        return torch.zeros(E)

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts[e] += token.numel()

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, counts = torch.zeros_like(x), self.start(x)
        for e in range(E):
            hit = ids == e
            token, slot = torch.where(hit)
            if self.skips and token.numel() == 0:
                continue
            self.count(counts, e, token, hit)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out + 0.01 * counts.float().repeat(H // E)


@positive
class AddsNumbers(Counted):
    """``counts[e] += n`` adds nothing for an expert without tokens."""


@positive
class AddsToIntegers(Counted):
    """The same in integers of 32 bits, which start at one."""

    def start(self, x: Tensor) -> Tensor:
        return torch.ones(E, dtype=torch.int32)


@positive
class AddsForEveryExpert(Counted):
    """Nothing is skipped."""

    skips = False


@positive
class SetsNumbers(Counted):
    """``counts[e] = n`` sets nothing for an expert without tokens: what was there is seven."""

    def start(self, x: Tensor) -> Tensor:
        return torch.full((E,), 7)

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts[e] = len(token)


@positive
class CountsCalls(Counted):
    """How often an expert had tokens."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts[e] += 1


@positive
class AddsMasks(Counted):
    """A tensor is added, and a share of it."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts[e] += hit.sum()
        counts[e] += hit.sum() / hit.numel()


@positive
class AddsToTheWhole(Counted):
    """More than the expert's own element changes."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts += 2 * token.shape[0] + 1
        counts[0] -= token.shape[0]


@positive
class CountsForNobody(Counted):
    """Nobody reads the counters."""

    skips = False

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts = counts.clone()
        counts[e] = token.numel()


@positive
class KeepsStatistics(Counted):
    """A buffer of the module counts on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(E))

    def start(self, x: Tensor) -> Tensor:
        return self.usage  # type: ignore[return-value]


class BoundAgain(Layer):
    """A sum is a new tensor for each expert."""

    def more(self, total: Tensor, hit: Tensor, token: Tensor) -> Tensor:
        return total + hit.sum()

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(())
        for e in range(E):
            hit = ids == e
            token, slot = torch.where(hit)
            if token.numel() == 0:
                continue
            total = self.more(total, hit, token)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out * (1 + 0.01 * total)


@positive
class BoundToSums(BoundAgain):
    """What is added is zero without tokens."""


@positive
class BoundToCalls(BoundAgain):
    """What is added is masked."""

    def more(self, total: Tensor, hit: Tensor, token: Tensor) -> Tensor:
        return total + 1


@near_miss
class BoundAndWritten(BoundToSums):
    """Without tokens the sum is the tensor that it was, which somebody holds, and is written to."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, first = torch.zeros_like(x), torch.zeros(())
        for e in range(E):
            hit, total = ids == e, first
            token, slot = torch.where(hit)
            if token.numel() > 0:
                total = total + hit.sum()
                out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
            total.add_(1)
        return out * (1 + 0.01 * first)


@near_miss
class BoundToProducts(BoundAgain):
    """No sum."""

    def more(self, total: Tensor, hit: Tensor, token: Tensor) -> Tensor:
        return total * 2 + 1


class Weighed(Layer):
    """Adds up routing weights where an expert has tokens, with their gradients; subclasses say what of them."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        total[e] += weights[token, slot].sum()
        return total

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(E)
        for e in range(E):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            total = self.more(total, e, weights, ids, token, slot)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out + 0.01 * total.repeat(H // E)


@positive
class WeighsByMeans(Weighed):
    """The mean of no weights is no number, in a sum and in its gradients: without tokens it is not added."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        total[e] += weights[token, slot].mean() ** 2
        total[e] += weights[ids == e].sum() / len(token)
        total[e] += torch.where(ids == e, weights, 0.0).sum() / len(token)
        return total


@positive
class WeighsAnew(Weighed):
    """What was there stays without tokens, and so do its gradients."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        total[0] += weights[token, slot].sum()
        total[e] = weights[token, slot].sum()
        return total


@positive
class WeighsInSums(Weighed):
    """A new tensor for each expert."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return total + weights[token, slot].mean()


@positive
class WeighsWithoutGradients(Weighed):
    """The same numbers under ``no_grad``."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        with torch.no_grad():
            total[e] += weights[token, slot].sum()
        return total


@near_miss
class WeighsOthers(Weighed):
    """The weights of all tokens over a number that is zero without tokens: they would have gradients that are no numbers."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        total[e] += weights.sum() / len(token)
        return total


@near_miss
class WeighsTheNext(Weighed):
    """Those of another expert, which has tokens where this one has none."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        total[e] += torch.where(ids == (e + 1) % E, weights, 0.0).sum() / len(token)
        return total


@near_miss
class WeighsInProducts(Weighed):
    """A share of everyone's weights, which is no number without tokens: nor are their gradients then."""

    def more(self, total: Tensor, e: int, weights: Tensor, ids: Tensor, token: Tensor, slot: Tensor) -> Tensor:
        return total + weights[token, slot].mean() * weights.mean()


@positive
class ListsNumbers(Layer):
    """The lengths of lists of tokens become a tensor."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        found, out = [torch.where(ids == e) for e in range(E)], torch.zeros_like(x)
        counts = x.new_tensor([len(token) for token, _ in found])
        for e, (token, slot) in enumerate(found):
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out + 0.01 * counts.repeat(H // E)


@near_miss
class Scales(Counted):
    """Another change of the counters, which an expert without tokens must not make."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts.mul_(0.5)


@near_miss
class CountsBehind(Counted):
    """The next expert's tokens, where this one has some."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        counts[token.numel() % E] += 1


@near_miss
class CountsInPython(Counted):
    """A Python number is read behind the loop."""

    def count(self, counts: Tensor, e: int, token: Tensor, hit: Tensor) -> None:
        self.calls += 1


class Binned(Layer):
    """Numbers of tokens as floats decide who runs; subclasses count them."""

    def counts(self, ids: Tensor) -> Tensor:
        return torch.histc(ids.float(), bins=E, min=0, max=E - 1)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, counts = torch.zeros_like(x), self.counts(ids)
        for e in range(E):
            if counts[e] == 0:
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out + 0.01 * counts.repeat(H // E)


@positive
class BinnedByHistogram(Binned):
    """A histogram; it is read behind the loop, too."""


@positive
class BinnedByScatter(Binned):
    """Ones added where the ids say."""

    def counts(self, ids: Tensor) -> Tensor:
        return torch.zeros(E).scatter_add_(0, ids.flatten(), torch.ones(ids.numel()))


@positive
class BinnedByLength(Binned):
    """``bincount``: as long as it says, since no id is higher."""

    def counts(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids.flatten(), minlength=E)


@near_miss
class BinnedByOthers(Binned):
    """A histogram of other ids."""

    def counts(self, ids: Tensor) -> Tensor:
        return torch.histc((E - 1 - ids).float(), bins=E, min=0, max=E - 1)


class ByRow(Layer):
    """A loop over the experts with tokens counts in a buffer of the module; subclasses count otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(E))

    def count(self, row: Tensor, token: Tensor) -> None:
        self.usage[row] += token.numel()

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        mask, hit = self.hits(ids)
        out = torch.zeros_like(x)
        for row in hit.nonzero():
            slot, token = torch.where(mask[row].squeeze(0))
            self.count(row, token)
            out.index_add_(0, token, self.expert(row[0], x[token]) * weights[token, slot, None])
        return out + 0.01 * self.usage.repeat(H // E)


@positive
class RowByTensor(ByRow):
    """The row is a tensor: ``usage[row]`` is a copy that goes back."""


@positive
class RowWithoutGradients(ByRow):
    """Gradients are switched off for the counter."""

    def count(self, row: Tensor, token: Tensor) -> None:
        with torch.no_grad():
            self.usage[row.item()] += token.numel()  # type: ignore[index]


@positive
class RowAverages(ByRow):
    """A running average, of shares: an expert without tokens keeps its own."""

    def count(self, row: Tensor, token: Tensor) -> None:
        self.usage[row[0]] = 0.9 * self.usage[row[0]] + 0.1 * (token.numel() / 10)


@near_miss
class RowReadsOthers(ByRow):
    """What an expert before left decides about a later one."""

    def count(self, row: Tensor, token: Tensor) -> None:
        if self.usage.max() > token.numel():
            self.usage[row[0]] += 1
