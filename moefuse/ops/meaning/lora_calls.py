"""A call of ``moefuse::experts_lora`` and of its backward pass: the experts, and the low-rank terms of their projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, cut, join, stacks

Lists = Sequence[Tensor]
PROJECTIONS = 3


class Term(NamedTuple):
    """One projection's low-rank term; empty lists where it has none.

    Attributes:
        a: one tensor [E, r, in], or E tensors [r, in].
        b: one tensor [E, out, r], or E tensors [out, r].
    """

    a: Lists
    b: Lists
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.a[0].shape[-2] if self.a else 0


class LoraCall(NamedTuple):
    """One call: the experts, and the terms of w_in, w_up and w_out."""

    base: ExpertsCall
    terms: tuple[Term, ...]

    @staticmethod
    def of(x: Tensor, ids: Tensor, weights: Tensor, *lists: Lists, scales: Sequence[float], **options: Any) -> LoraCall:
        """From the arguments of the op, in the order of its schema."""
        return LoraCall(ExpertsCall.of(x, ids, weights, *lists[:6], **options), terms_of(lists[6:], scales))

    @staticmethod
    def unpack(tensors: Lists, counts: Sequence[int], scales: Sequence[float], *how: Any) -> LoraCall:
        """From the arguments of the internal ops."""
        *body, out_dtype = how
        lists = cut(tensors, counts, 3)
        base = ExpertsCall(tensors[0], tensors[1], tensors[2], *stacks(lists[:6]), Body.decode(*body), out_dtype)
        return LoraCall(base, terms_of(lists[6:], scales))

    def pack(self) -> tuple[list[Tensor], list[int], list[float], int, float, float, torch.dtype]:
        """Arguments of the internal ops."""
        factors = [part for t in self.terms for part in (t.a, t.b)]
        return (
            *join(self.base[:3], (*self.base.lists, *factors)),
            [t.scale for t in self.terms],
            *self.base.body.encode(),
            self.base.out_dtype,
        )

    @property
    def ranks(self) -> int:
        """Columns of u."""
        return sum(t.rank for t in self.terms)


class LoraGradCall(NamedTuple):
    """Arguments of backward; ``needs``: of x, weights and the twelve lists."""

    grad: Tensor
    x: Tensor
    weights: Tensor
    h: Tensor
    order: Tensor
    offsets: Tensor
    u: Tensor
    w_in: Stack
    w_up: Stack
    w_out: Stack
    terms: tuple[Term, ...]
    needs: tuple[bool, ...]
    body: Body

    @staticmethod
    def unpack(tensors: Lists, counts: Sequence[int], scales: Sequence[float], needs: int, *body: Any) -> LoraGradCall:
        """From the arguments of the op."""
        lists = cut(tensors, counts, 7)
        flags = tuple(bool(needs >> i & 1) for i in range(2 + len(lists)))
        grad, x, weights, h, order, offsets, u = tensors[:7]
        found = terms_of(lists[6:], scales)
        return LoraGradCall(grad, x, weights, h, order, offsets, u, *stacks(lists[:6]), found, flags, Body.decode(*body))


def terms_of(lists: Sequence[Lists], scales: Sequence[float]) -> tuple[Term, ...]:
    """From a_in, l_in, a_up, l_up, a_out, l_out and their scales."""
    return tuple(Term(a, b, scale) for a, b, scale in zip(lists[::2], lists[1::2], scales, strict=True))
