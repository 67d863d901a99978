"""Loops over hits whose tensors are not what they look like: other masks, other rows, tensors that an iteration leaves for the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, Hits, Layer, near_miss, positive


@near_miss
class ReadsTokenCount(Hits):
    """Each expert's rows are divided by how many there are: the same for each row, but not a function of the row."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None] / tok.shape[0])


@near_miss
class BatchStatistics(Hits):
    """Rows minus the mean over the expert's rows."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        y = self.expert(row, x[tok])
        out.index_add_(0, tok, (y - y.mean(0)) * weights[tok, slot, None])


@near_miss
class MutatesInput(Hits):
    """The next expert sees what this one changed."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            x.mul_(0.5)
        return out


@near_miss
class DropsSmallExperts(Hits):
    """Experts with one token are left out: the loop does not ask whether there is any."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) > 1


@near_miss
class OtherMask(Hits):
    """The mask comes from other data."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in (logits.sum(0) > 0).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out


@near_miss
class OtherRouting(Hits):
    """The mask speaks of the best expert only, the body of both."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids[:, :1].contiguous(), num_classes=E).sum(dim=(0, 1)) > 0


@near_miss
class ShiftedRow(Hits):
    """Expert ``e + 1`` runs when expert ``e`` was hit."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body((row + 1) % E, out, x, ids, weights)


@near_miss
class Misses(Hits):
    """A loop over the experts that nobody chose."""

    def mask(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, num_classes=E).sum(dim=(0, 1)) == 0

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        out += self.expert(row, x)


@positive
class FirstExpertsWeight(Hits):
    """The second projection is that of expert 0 for all, as the representative shows that is not expert 0."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[0])


@near_miss
class ScalesByItsNumber(Hits):
    """The number of the expert is a factor."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None] * row)


@near_miss
class ColumnOfExpertZero(Hits):
    """Weighted by what the router gives expert 0."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        table = torch.zeros_like(logits).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            tok, _ = torch.where(ids == row[0])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * table[tok, 0, None])
        return out


@near_miss
class TokensOfExpertZero(Hits):
    """Every expert works on the tokens of expert 0."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == 0)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])


@near_miss
class OneOddRow(Hits):
    """A condition on the number: two ways through the body, and they differ."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        y = self.expert(row, x[tok]) * weights[tok, slot, None]
        if row == 2:
            y = y * 3
        out.index_add_(0, tok, y)


@near_miss
class OddExpert(Layer):
    """One expert of the list differs in one attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [1.0, 1.0, 2.0, 1.0]

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in self.hits(ids)[1].nonzero().flatten().tolist():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None] * self.scale[e])
        return out


@near_miss
class AccumulatesIntoItsInput(Hits):
    """The next expert reads what this one added."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        for row in self.mask(ids).nonzero():
            self.body(row[0], x, x, ids, weights)
        return x


@near_miss
class ReadsTheAccumulator(Hits):
    """The next expert reads the sum so far, which is zero for the first."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok] + out[tok]) * weights[tok, slot, None])


@near_miss
class OverwritesTheWeights(Hits):
    """The next expert finds other routing weights."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        weights.mul_(2.0)


@near_miss
class ScalesTheSum(Hits):
    """Every further expert scales what is there."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        out.mul_(0.5)


@near_miss
class CarriesTheInput(Hits):
    """A local, and not a tensor that is written to, goes from one expert to the next."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            x = x * 0.5
        return out


@near_miss
class OneRowAccumulatesElsewhere(Hits):
    """The same, with a sum that others read."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], x if row[0] == 1 else out, x, ids, weights)
        return out + x


@near_miss
class WeightOfAnotherRow(Hits):
    """The weights are those of the next expert, by a row of one element beside the tokens."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        table = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
        tok, _ = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * table[tok, (row[None] + 1) % E, None])
