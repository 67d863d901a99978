"""Experts of a ModuleDict: ``self.experts[f"expert_{row}"]``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.programs.loops.base import E, Expert, Layer, near_miss, positive


class Named(Layer):
    """A loop over hits whose body chooses its expert by a name that it writes; subclasses do so in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({f"expert_{e}": Expert() for e in range(E)})

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        mask, hit = self.hits(ids)
        for row in hit.nonzero():
            slot, tok = torch.where(mask[row].squeeze(0))
            out.index_add_(0, tok, self.rows(row, x[tok]) * weights[tok, slot, None])
        return out

    def rows(self, row: Tensor, x: Tensor) -> Tensor:
        return self.named[f"expert_{row[0]}"](x)  # type: ignore[no-any-return]


@positive
class ByName(Named):
    """The number of the row is part of a key."""


@positive
class ByPaddedName(Named):
    """With a width."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict({f"{e:03d}": Expert() for e in range(E)})

    def rows(self, row: Tensor, x: Tensor) -> Tensor:
        return self.named[f"{row[0]:03d}"](x)  # type: ignore[no-any-return]


@positive
class NameOfTheOther(Named):
    """The expert behind the one whose number it is: the same weights in another order."""

    def rows(self, row: Tensor, x: Tensor) -> Tensor:
        return self.named[f"expert_{(row[0] + 1) % E}"](x)  # type: ignore[no-any-return]


@near_miss
class NameAsFactor(Named):
    """The name is read for its length: expert 0 gives something else than the others."""

    def rows(self, row: Tensor, x: Tensor) -> Tensor:
        return super().rows(row, x) * len(f"{row[0] * 10}")


@near_miss
class TextOfTheTensor(Named):
    """``!s`` is the text of the tensor, not of its number: no expert has such a name."""

    def rows(self, row: Tensor, x: Tensor) -> Tensor:
        name = f"expert_{row[0]!s}"
        return (self.named[name] if name in self.named else self.named["expert_0"])(x)  # type: ignore[no-any-return]
