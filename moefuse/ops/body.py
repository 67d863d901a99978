"""The arguments of ``moefuse::experts`` as the one list and the few numbers that its internal ops take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.activations import ACTIVATIONS
from moefuse.ops.reference import GATINGS

_ACTIVATIONS = tuple(ACTIVATIONS)
_ACTIVATION_BITS = 8
_GATING_BITS = 8


def encode(
    activation: str, activation_args: Sequence[float], gating: str, up_first: bool, weight_on_input: bool
) -> tuple[int, float, float]:
    """(body, arg0, arg1); constants that the activation does not have are 0. The options have been checked."""
    flags = up_first | weight_on_input << 1
    body = _ACTIVATIONS.index(activation) | GATINGS.index(gating) << _ACTIVATION_BITS | flags << _ACTIVATION_BITS + _GATING_BITS
    arg0, arg1, *_ = (*activation_args, 0.0, 0.0)
    return body, arg0, arg1


def decode(body: int, arg0: float, arg1: float) -> dict[str, Any]:
    """The keyword arguments that :func:`encode` was given."""
    activation = _ACTIVATIONS[body & (1 << _ACTIVATION_BITS) - 1]
    flags = body >> _ACTIVATION_BITS + _GATING_BITS
    return {
        "activation": activation,
        "activation_args": [arg0, arg1][: ACTIVATIONS[activation].num_args],
        "gating": GATINGS[body >> _ACTIVATION_BITS & (1 << _GATING_BITS) - 1],
        "up_first": bool(flags & 1),
        "weight_on_input": bool(flags & 2),
    }


def pack(
    data: tuple[Any, ...],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """Arguments of ``moefuse::experts_infer`` and ``experts_forward`` for ``data`` (x, ids, weights, six lists) and checked options."""
    tensors, counts = join(data, 3)
    return (tensors, counts, *encode(activation, activation_args, gating, up_first, weight_on_input), out_dtype or data[0].dtype)


def join(data: Sequence[Any], single: int) -> tuple[list[Tensor], list[int]]:
    """(all tensors, length of each list) of data whose first ``single`` entries are tensors and the others lists."""
    tensors, counts = list(data[:single]), []
    for part in data[single:]:
        tensors += part
        counts.append(len(part))
    return tensors, counts


def unpack(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Any]:
    """What :func:`join` was given."""
    start = len(tensors) - sum(counts)
    data: list[Any] = list(tensors[:start])
    for n in counts:
        data.append(list(tensors[start : start + n]))
        start += n
    return data


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

    @classmethod
    def of(cls, flags: Sequence[bool], on_input: bool) -> Needs:
        """From the flags alone."""
        x, weights, *lists = flags
        w_in, w_up, w_out, b_in, b_up, b_out = lists
        return cls(x, weights, w_in, w_up, w_out, b_in, b_up, b_out, on_input)

    @property
    def tokens(self) -> bool:
        """The gradient of each slot's token."""
        return self.x or (self.weights and self.on_input)

    @property
    def h(self) -> bool:
        """The gradient of the pre-activation: the second part runs."""
        return self.tokens or self.w_in or self.w_up or self.b_in or self.b_up

    @property
    def products(self) -> bool:
        """The gradient of routing weights on the output."""
        return self.weights and not self.on_input

    @property
    def rows(self) -> bool:
        """The first part runs."""
        return self.h or self.w_out or self.products

    @property
    def out(self) -> bool:
        """The third part runs."""
        return self.w_out or self.b_out


def encode_needs(needs: Sequence[bool]) -> int:
    """Flags of the gradients that are wanted, as bits."""
    return sum(bool(need) << i for i, need in enumerate(needs))


def decode_needs(bits: int) -> list[bool]:
    """The first eight flags of :class:`Needs`."""
    return [bool(bits >> i & 1) for i in range(8)]
