"""Loops over sorted slots with one running offset, which is also raised where an expert has no tokens; and a table for each slot."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import E, K, Layer, near_miss, positive


class Offsets(Layer):
    """Sorted slots, counted from the sorted ids; subclasses change what is done for an expert without tokens."""

    def idle(self, offset: int, count: int, following: int) -> int:
        return offset + count

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        values, order = ids.reshape(-1).sort()
        token, weight = order // K, weights.reshape(-1)[order]
        counts = torch.bincount(values, minlength=E).tolist()
        out, offset = torch.zeros_like(x), 0
        for e, count in enumerate(counts):
            if count == 0:
                offset = self.idle(offset, count, counts[(e + 1) % E])
                continue
            part = slice(offset, offset + count)
            out.index_add_(0, token[part], self.expert(e, x[token[part]]) * weight[part].unsqueeze(-1))
            offset += count
        return out


@positive
class RaisedByNone(Offsets):
    """The offset is raised by the count of zero."""


@positive
class NotRaised(Offsets):
    """It is not."""

    def idle(self, offset: int, count: int, following: int) -> int:
        return offset


@near_miss
class RaisedByTheNext(Offsets):
    """The offset is raised by another expert's count."""

    def idle(self, offset: int, count: int, following: int) -> int:
        return offset + following - following // 2


class RaisedBehind(Layer):
    """The rows are sorted once, and the offset is raised behind each expert; subclasses say by what."""

    def more(self, counts: Tensor, e: int, rows: Tensor) -> int:
        return int(counts[e])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        order = ids.reshape(-1).argsort(stable=True)
        token = order // K
        rows, weight = x[token], weights.reshape(-1)[order]
        counts = torch.bincount(ids.reshape(-1), minlength=E)
        out, start = torch.zeros_like(x), 0
        for e in range(E):
            n = int(counts[e])
            if n == 0:
                continue
            y = self.expert(e, rows[start : start + n]) * weight[start : start + n, None]
            out.index_add_(0, token[start : start + n], y)
            start += self.more(counts, e, y)
        return out


@positive
class RaisedByNumber(RaisedBehind):
    """By the number that was read."""


@positive
class RaisedByRows(RaisedBehind):
    """By the number of rows that the expert gave."""

    def more(self, counts: Tensor, e: int, rows: Tensor) -> int:
        return rows.shape[0]


@near_miss
class RaisedByHalf(RaisedBehind):
    """By less than that."""

    def more(self, counts: Tensor, e: int, rows: Tensor) -> int:
        return (rows.shape[0] + 1) // 2


class Tables(Layer):
    """A table for each slot, weighted as a whole."""

    def weight(self, weights: Tensor, k: int) -> Tensor:
        return weights[:, k, None]

    def rows(self, hot: Tensor) -> Tensor:
        return hot > 0

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for k in range(K):
            table, hot = torch.zeros_like(x), F.one_hot(ids[:, k], E).to(x.dtype)
            for e in range(E):
                mask = self.rows(hot[:, e])
                if mask.any():
                    table[mask] = self.expert(e, x[mask])
            out = out + table * self.weight(weights, k)
        return out


@positive
class TableOfEachSlot(Tables):
    """Rows by a one-hot of the slot's ids."""


@near_miss
class TableOfTheOtherSlot(Tables):
    """The weight of another slot."""

    def weight(self, weights: Tensor, k: int) -> Tensor:
        return weights[:, K - 1 - k, None]


@near_miss
class TableOfTheOthers(Tables):
    """Rows of the tokens that did not choose the expert."""

    def rows(self, hot: Tensor) -> Tensor:
        return hot < 1


class Bounds(Layer):
    """The bounds of sorted slots are tensors without dimensions, the first one of zero; subclasses say how the next one comes about."""

    def start(self) -> Tensor:
        return torch.zeros((), dtype=torch.long)

    def skips(self, count: Tensor) -> Tensor | bool:
        return False

    def ends(self, begin: Tensor, count: Tensor) -> Tensor:
        return begin + count

    def raised(self, begin: Tensor, end: Tensor, counts: Tensor, e: int) -> Tensor:
        begin += counts[e]
        return begin

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        order = ids.reshape(-1).argsort(stable=True)
        token, weight, counts = order // K, weights.reshape(-1)[order], torch.bincount(ids.reshape(-1), minlength=E)
        rows, out, begin = x[token], torch.zeros_like(x), self.start()
        for e in range(E):
            if self.skips(counts[e]):
                continue
            end = self.ends(begin, counts[e])
            part = self.expert(e, rows[begin:end]) * weight[begin:end].unsqueeze(-1)
            out.index_add_(0, token[begin:end], part)
            begin = self.raised(begin, end, counts, e)
        return out


@positive
class BoundRaisedInPlace(Bounds):
    """The last one is raised behind the last expert, where nobody reads it."""


@positive
class BoundOfAConstant(Bounds):
    """The tensor is made of a number, and the next bound is the end."""

    def start(self) -> Tensor:
        return torch.tensor(0)

    def raised(self, begin: Tensor, end: Tensor, counts: Tensor, e: int) -> Tensor:
        return end


@positive
class BoundRaisedWhereTokensAre(Bounds):
    """Without tokens it stays, and would have been raised by zero."""

    def skips(self, count: Tensor) -> Tensor | bool:
        return count == 0


@near_miss
class BoundFromOne(Bounds):
    """The first slot is nobody's."""

    def start(self) -> Tensor:
        return torch.ones((), dtype=torch.long)


@near_miss
class BoundRaisedByTheNext(Bounds):
    """By another expert's count."""

    def raised(self, begin: Tensor, end: Tensor, counts: Tensor, e: int) -> Tensor:
        begin += counts[(e + 1) % E]
        return begin


@near_miss
class BoundRaisedBefore(Bounds):
    """In place in front of the rows that it begins."""

    def ends(self, begin: Tensor, count: Tensor) -> Tensor:
        end = begin + count
        begin += count // 2
        return end
