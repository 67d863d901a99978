"""Backward of one call of ``moefuse::experts``, whole (:class:`GradCall`) or in its three parts, and the gradients that are wanted.

What the parts compute is in ``moefuse/runtime/backward.py``. Common fields: weights [T, K]; order [S] and offsets [E + 1], int64, as in
``moefuse/runtime/routing.py``; h [S, width], the pre-activation in sorted rows; ``grad`` [T, Hout], the gradient of the output.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, Stacks, Term, cut, extended, factors_of, join, lists_of, stacks, with_terms
from moefuse.ops.meaning.composite import pulled_back
from moefuse.ops.meaning.reference_grouped import ids_of_rows


@dataclass(frozen=True)
class Needs:
    """The gradients of ``experts`` that are wanted, in the order in which its backward returns them, and what they ask for.

    A weight list has one flag, and one gradient per tensor.
    """

    x: bool
    weights: bool
    w_in: bool
    w_up: bool
    w_out: bool
    b_in: bool
    b_up: bool
    b_out: bool
    on_input: bool
    """Whether routing weights multiply the token: no gradient, but it says which part makes theirs."""
    factors: tuple[bool, ...] = ()
    """Of A and B of w_in, w_up and w_out, if any projection has a low-rank term."""

    @classmethod
    def of(cls, flags: Sequence[bool], on_input: bool) -> Needs:
        """From the flags alone."""
        x, weights, w_in, w_up, w_out, b_in, b_up, b_out, *factors = flags
        return cls(x, weights, w_in, w_up, w_out, b_in, b_up, b_out, on_input, tuple(factors))

    @staticmethod
    @functools.cache
    def decode(bits: int, on_input: bool, factors: int = 0) -> Needs:
        """From the bits of :meth:`encode`; ``factors``: how many flags are of low-rank terms."""
        return Needs.of([bool(bits >> i & 1) for i in range(8 + factors)], on_input)

    @property
    def flags(self) -> tuple[bool, ...]:
        """What :meth:`of` is given."""
        return self.x, self.weights, self.w_in, self.w_up, self.w_out, self.b_in, self.b_up, self.b_out, *self.factors

    def encode(self) -> int:
        """The flags as bits."""
        return sum(flag << i for i, flag in enumerate(self.flags))

    @property
    def tokens(self) -> bool:
        """The gradient of each slot's token."""
        return self.x or (self.weights and self.on_input)

    @property
    def h(self) -> bool:
        """The gradient of the pre-activation: the second part runs."""
        return self.tokens or self.w_in or self.w_up or self.b_in or self.b_up or any(self.factors[:4])

    def of_term(self, which: int) -> tuple[bool, bool]:
        """Of A and B of a projection."""
        a, b = self.factors[2 * which : 2 * which + 2] or (False, False)
        return a, b

    @property
    def activation(self) -> bool:
        """What the last projection multiplies, times routing weights."""
        return self.w_out or self.of_term(2)[0]

    @property
    def of_tokens(self) -> Needs:
        """Of the second part, the gradients of tokens and of routing weights on them."""
        return replace(self, w_in=False, w_up=False, b_in=False, b_up=False)

    @property
    def of_lists(self) -> Needs:
        """Of the second part, the gradients of w_in and w_up."""
        return replace(self, x=False, weights=False)

    @property
    def products(self) -> bool:
        """The gradient of routing weights on the output."""
        return self.weights and not self.on_input

    @property
    def rows(self) -> bool:
        """The first part runs."""
        return self.h or self.activation or self.products

    @property
    def out(self) -> bool:
        """The third part runs."""
        return self.w_out or self.b_out


Packed = tuple[list[Tensor], list[int], int, int, float, float]
"""Arguments of the backward ops: all tensors, how many each list has, the needs, and the body."""


class GradCall(NamedTuple):
    """Arguments of ``experts_backward``. ``u`` [S, r of all terms]: each term's rows times s * A, where there are low-rank terms."""

    grad: Tensor
    x: Tensor
    weights: Tensor
    h: Tensor
    order: Tensor
    offsets: Tensor
    w_in: Stack
    w_up: Stack
    w_out: Stack
    need: Needs
    body: Body
    u: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens, and of what is computed."""
        return self.x.dtype

    @staticmethod
    def unpack(tensors: Sequence[Tensor], counts: Sequence[int], needs: int, *body: Any) -> GradCall:
        """From the arguments of the op."""
        grad, x, weights, h, order, offsets = tensors[:6]
        return GradCall(grad, x, weights, h, order, offsets, *stacks(cut(tensors, counts, 6)), *_how(needs, *body))

    @staticmethod
    def unpack_extended(tensors: Sequence[Tensor], counts: Sequence[int], scales: Any, encodings: Any, needs: int, *body: Any) -> GradCall:
        """From the arguments of ``experts_extended_backward``."""
        grad, x, weights, h, order, offsets, u = tensors[:7]
        how, of = Body.decode(*body), extended(cut(tensors, counts, 7), scales, encodings)
        need = Needs.decode(needs, how.on_input, 2 * len(of))
        return GradCall(grad, x, weights, h, order, offsets, *of, need, how, u)

    def pack(self) -> Packed:
        """Arguments of the op."""
        return _packed(self[:6], lists_of(self.w_in, self.w_up, self.w_out), self.need, self.body)

    @property
    def stacks(self) -> Stacks:
        """w_in, w_up and w_out."""
        return self.w_in, self.w_up, self.w_out

    def with_stacks(self, of: Stacks) -> GradCall:
        """The call with other :attr:`stacks`."""
        w_in, w_up, w_out = of
        return self._replace(w_in=w_in, w_up=w_up, w_out=w_out)

    @property
    def lists(self) -> tuple[Sequence[Tensor], ...]:
        """Those that may have gradients, in the order of these: weights, biases, and factors if there are any."""
        return *lists_of(*self.stacks), *(factors_of(self.stacks) if self.need.factors else ())

    def reference(self) -> list[Tensor]:
        """The gradients by their definition, which have gradients; h and u are not read."""
        lists, (need_x, need_weights, *need) = self.lists, self.need.flags
        counts, ids = [*map(len, lists)], ids_of_rows(self.order, self.offsets, self.weights.shape[1])
        # A list of which no gradient is wanted may be one that unpacks what is asked for.
        chosen = [i for i, wanted in enumerate(need) if wanted]

        def function(x: Tensor, weights: Tensor, *flat: Tensor) -> Tensor:
            given = dict(zip(chosen, cut(flat, [counts[i] for i in chosen]), strict=True))
            w, w_up, w_out, b, b_up, b_out, *factors = (given.get(i, some) for i, some in enumerate(lists))
            pairs = zip(self.stacks, (w, w_up, w_out), (b, b_up, b_out), strict=True)
            first, second, last = (stack._replace(weight=weight, bias=bias) for stack, weight, bias in pairs)
            found = first, second, last
            if factors:
                found = with_terms(found, factors, [(stack.term or Term()).scale for stack in found])
            return ExpertsCall(x, ids, weights, *found, self.body, self.grad.dtype).reference()

        flat = [t for i in chosen for t in lists[i]]
        return pulled_back(function, [self.x, self.weights, *flat], [need_x, need_weights, *(True for _ in flat)], self.grad)


class RowsCall(NamedTuple):
    """The first part, ``experts_backward_rows``: of d_h [S, width], the weighted activation a [S, I] and the weights' gradient [T, K]."""

    grad: Tensor
    weights: Tensor
    h: Tensor
    order: Tensor
    offsets: Tensor
    w_out: Stack
    need: Needs
    body: Body

    @staticmethod
    def unpack(tensors: Sequence[Tensor], counts: Sequence[int], needs: int, *body: Any) -> RowsCall:
        """From the arguments of the op."""
        w_out, b_out = cut(tensors, counts, 5)
        grad, weights, h, order, offsets = tensors[:5]
        return RowsCall(grad, weights, h, order, offsets, Stack(w_out, b_out), *_how(needs, *body))

    def pack(self) -> Packed:
        """Arguments of the op."""
        return _packed(self[:5], self.w_out[:2], self.need, self.body)


class InCall(NamedTuple):
    """The second part, ``experts_backward_in``: of the gradients of x, of weights on the input, of w_in and w_up; from d_h [S, width]."""

    x: Tensor
    weights: Tensor
    d_h: Tensor
    order: Tensor
    offsets: Tensor
    w_in: Stack
    w_up: Stack
    need: Needs
    body: Body

    @staticmethod
    def unpack(tensors: Sequence[Tensor], counts: Sequence[int], needs: int, *body: Any) -> InCall:
        """From the arguments of the op."""
        w_in, w_up, b_in, b_up = cut(tensors, counts, 5)
        x, weights, d_h, order, offsets = tensors[:5]
        return InCall(x, weights, d_h, order, offsets, Stack(w_in, b_in), Stack(w_up, b_up), *_how(needs, *body))

    def pack(self) -> Packed:
        """Arguments of the op."""
        a, b = self.w_in, self.w_up
        return _packed(self[:5], (a.weight, b.weight, a.bias, b.bias), self.need, self.body)


class OutCall(NamedTuple):
    """The third part, ``experts_backward_out``: the gradients of w_out. ``a`` [S, I] is None where only its biases' is wanted."""

    grad: Tensor
    weights: Tensor
    order: Tensor
    offsets: Tensor
    a: Tensor | None
    w_out: Stack
    need: Needs
    body: Body

    @staticmethod
    def unpack(tensors: Sequence[Tensor], counts: Sequence[int], needs: int, *body: Any) -> OutCall:
        """From the arguments of the op."""
        a, w_out, b_out = cut(tensors, counts, 4)
        grad, weights, order, offsets = tensors[:4]
        return OutCall(grad, weights, order, offsets, a[0] if a else None, Stack(w_out, b_out), *_how(needs, *body))

    def pack(self) -> Packed:
        """Arguments of the op."""
        return _packed(self[:4], ([] if self.a is None else [self.a], *self.w_out[:2]), self.need, self.body)


def _how(needs: int, *body: Any) -> tuple[Needs, Body]:
    expert = Body.decode(*body)
    return Needs.decode(needs, expert.on_input), expert


def _packed(tensors: Sequence[Any], lists: Sequence[Sequence[Tensor]], need: Needs, body: Body) -> Packed:
    return (*join(tensors, lists), need.encode(), *body.encode())
