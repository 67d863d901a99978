"""Experts without tokens that run for nobody, as data parallel training wants it: zero times their output is added. And what is more."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.loops.base import H, Layer, near_miss, positive


class Dummy(Layer):
    """A loop over experts with an ``else``; subclasses fill it in."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            else:
                out = self.nobody(expert, x, out)
        return out

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        raise NotImplementedError


@positive
class DummyRow(Dummy):
    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out + 0.0 * expert(x[:1]).sum()


@positive
class DummyZeros(Dummy):
    """As it is for experts of any dtype."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        y = expert(torch.zeros_like(x[:1])).sum() * 0
        return out + y.to(out.dtype)


@positive
class DummyParameters(Dummy):
    def nobody(self, expert: nn.Module, x: Tensor, out: Tensor) -> Tensor:  # type: ignore[override]
        return sum(p.sum() for p in expert.parameters()) * 0.0 + out  # type: ignore[no-any-return]


@positive
class DummyInPlace(Layer):
    """The pass comes first, and in place."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = ids == e
            if not mask.any():
                y = expert(x[:1] * 0)
                out += y.sum() * 0.0
                continue
            tok, slot = torch.where(mask)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@positive
class DummyPlace(Dummy):
    """Zero is added to one number of the sum."""

    def nobody(self, expert: nn.Module, x: Tensor, out: Tensor) -> Tensor:  # type: ignore[override]
        out[0, 0] += 0 * sum(p.sum() for p in expert.parameters())
        return out


@positive
class DummyRowPutBack(Dummy):
    """A row is put where it was taken from."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        out[:1] = out[:1] + expert(x[:1]) * 0
        return out


@positive
class DummyIndexed(Dummy):
    """As rows of tokens are added."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out.index_add_(0, torch.zeros(1, dtype=torch.long), expert(x[:1]) * 0)


@positive
class DummySubtracted(Dummy):
    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out - 0 * expert(x[:1]).sum()


@near_miss
class DummyElsewhere(Dummy):
    """A row is put where another one was."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        out[0] = out[1] + 0 * expert(x[:1]).sum()
        return out


@near_miss
class DummyClears(Dummy):
    """What the row was is lost."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        out[0] = 0 * expert(x[0])
        return out


@near_miss
class DummyTakesAway(Dummy):
    """Zero minus the sum is not the sum minus zero."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return 0 * expert(x[:1]).sum() - out


@near_miss
class DummySmall(Dummy):
    """A small number is not zero."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out + 1e-3 * expert(x[:1]).sum()


@near_miss
class DummyDivides(Dummy):
    """Zero divided by something is not zero where that is."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out + 0.0 / expert(x[:1]).sum()


@near_miss
class DummyScales(Dummy):
    """What others have added changes with it."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return (out + 0.0 * expert(x[:1]).sum()) * 0.5


@near_miss
class DummyCounts(Dummy):
    """Python's state says how often it ran."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        self.calls += 1
        return out + 0.0 * expert(x[:1]).sum()


@near_miss
class DummyLists(Dummy):
    """A list says for how many."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        self.seen.append(1)
        return out + 0.0 * expert(x[:1]).sum()


@near_miss
class DummyDraws(Dummy):
    """The numbers that it draws are missing later."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out + 0.0 * expert(F.dropout(x[:1], 0.5)).sum()


@near_miss
class DummyBranches(Dummy):
    """Only some of its ways add zero."""

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        if x.sum() > 0:
            return out + 0.0 * expert(x[:1]).sum()
        return out + 1


@near_miss
class DummyOther(Dummy):
    """Another layer has gradients of zeros from it, and none without."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(H, H)

    def nobody(self, expert: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
        return out + 0.0 * self.other(x[:1]).sum()


@near_miss
class DummyKept(Layer):
    """What it computes is read behind the branch."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out, last = torch.zeros_like(x), x
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() > 0:
                out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
            else:
                last = last + 1
                out = out + 0.0 * expert(x[:1]).sum()
        return out + last


@near_miss
class DummyFallsThrough(Layer):
    """No other way is left that shows what the branch is about."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                out = out + 0.0 * expert(x[:1]).sum()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out
