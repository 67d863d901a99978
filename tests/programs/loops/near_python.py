"""Loops over hits that leave something in Python's state: numbers, lists, iterators, an early end."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import E, Hits, near_miss, positive


@near_miss
class CountsIterations(Hits):
    """A Python number that is used afterwards."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, count = torch.zeros_like(x), 0
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            count += 1
        return out / count


@positive
class CountsOnTensor(Hits):
    """A tensor that counts the experts with tokens: what is added is masked."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(())
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            total = total + 1
        return out + total


@positive
class CountsInPlace(Hits):
    """The same in place: what is added is masked."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, total = torch.zeros_like(x), torch.zeros(1)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            total += 1
        return out + total


@near_miss
class CountsOnModule(Hits):
    """An attribute of the module."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        self.calls += 1


@near_miss
class AppendsToList(Hits):
    """A list whose length is read."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, done = torch.zeros_like(x), []
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            done.append(1)
        return out * len(done)


@near_miss
class FillsDict(Hits):
    """A dict of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.stats: dict[str, int] = {"n": 0}

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        self.stats["n"] += 1


@near_miss
class NonlocalCounter(Hits):
    """A cell that a nested function writes to."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, count = torch.zeros_like(x), 0

        def note() -> None:
            nonlocal count
            count += 1

        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            note()
        return out * count


@near_miss
class BreaksEarly(Hits):
    """Only the first expert that was hit."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            break
        return out


@near_miss
class ReturnsEarly(Hits):
    """The first expert that was hit decides."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        for row in self.mask(ids).nonzero():
            tok, slot = torch.where(ids == row[0])
            return torch.zeros_like(x).index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return x


@near_miss
class BreaksInAnOuterLoop(Hits):
    """The same statement is reached again by a loop around it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for _ in range(2):
            for row in self.mask(ids).nonzero():
                self.body(row[0], out, x, ids, weights)
                break
        return out


@near_miss
class Enumerates(Hits):
    """The number of the iteration, not of the expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for i, row in enumerate(self.mask(ids).nonzero()):
            tok, slot = torch.where(ids == row[0])
            out.index_add_(0, tok, self.expert(i, x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class Comprehension(Hits):
    """A list of results, one for each hit."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, _ = self.route(logits)
        parts = [self.expert(row[0], x).mean() for row in self.mask(ids).nonzero()]
        return x * len(parts) + sum(parts)


@near_miss
class ReadsTheLastRow(Hits):
    """The loop variable after the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        row = torch.zeros(1, dtype=torch.int64)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out + row


@near_miss
class ReadsTheLastList(Hits):
    """A Python number from the list, after the loop."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, e = torch.zeros_like(x), 0
        for e in self.mask(ids).nonzero().flatten().tolist():
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out + e


@near_miss
class ListReadTwice(Hits):
    """The list of hits has a length."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        hits = self.mask(ids).nonzero().flatten().tolist()
        for e in hits:
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out * len(hits)


@near_miss
class Prints(Hits):
    """Output for every expert that was hit."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        print("expert", int(row))  # noqa: T201


@near_miss
class NextFromAnIterator(Hits):
    """The scale of an expert depends on how many came before."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = iter(range(1, E + 1))
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out


@near_miss
class NextFromAGenerator(Hits):
    """The same with a generator, which is started by the first expert."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = (float(i) for i in range(1, E + 1))
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out


@near_miss
class NextFromADict(Hits):
    """The same with the keys of a dict."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        scales = iter(dict.fromkeys(range(1, E + 1)).keys())
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x * next(scales), ids, weights)
        return out


@near_miss
class OneRowMutates(Hits):
    """One expert changes what those behind it read; the expert that is traced in their place stands before it."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        x = x.clone()
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
            if row[0] == 1:
                x.mul_(0.5)
        return out
