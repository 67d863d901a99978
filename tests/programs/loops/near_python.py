"""Loops over hits that leave something in Python's state: numbers, lists, iterators, an early end."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.programs.loops.base import Hits, near_miss, positive


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
class Prints(Hits):
    """Output for every expert that was hit."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights)
        print("expert", int(row))  # noqa: T201
