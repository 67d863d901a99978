"""One call of ``moefuse::experts`` from the op to the kernel: what it is given, and what an expert computes.

The internal ops (``moefuse/ops/schema.py``) take one list for all tensors and a few numbers for the rest, for few arguments make a call
cheap: :meth:`ExpertsCall.pack` and :meth:`ExpertsCall.unpack`. Everything below them takes an :class:`ExpertsCall`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.reference import GATINGS, count_experts, expert_vector, expert_weight, experts_reference
from moefuse.ops.meaning.token_codes import Rounding

_NAMES = tuple(ACTIVATIONS)
_BITS = 8


@dataclass(frozen=True)
class Body:
    """What an expert computes between its projections; the arguments of ``moefuse::experts`` of these names.

    Attributes:
        activation: a key of :data:`~moefuse.ops.meaning.activations.ACTIVATIONS`.
        args: its constants.
        gating: one of :data:`~moefuse.ops.meaning.reference.GATINGS`.
        up_first: the up half (or the even features) comes first.
        on_input: routing weights multiply the token instead of the expert's output.
    """

    activation: str = "silu"
    args: tuple[float, ...] = ()
    gating: str = "merged"
    up_first: bool = False
    on_input: bool = False

    @property
    def split(self) -> bool:
        """Gate and up are projections of their own."""
        return self.gating == "separate"

    @property
    def pair(self) -> tuple[float, float]:
        """The constants as the kernels take them; those that the activation does not have are 0."""
        arg0, arg1, *_ = (*self.args, 0.0, 0.0)
        return arg0, arg1

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(activation: str, args: tuple[float, ...], gating: str, up_first: bool, on_input: bool) -> Body:
        """The one that was made for an earlier call, if there is one, and so its code."""
        return Body(activation, args, gating, up_first, on_input)

    def encode(self) -> tuple[int, float, float]:
        """(body, arg0, arg1) of the internal ops. The options have been checked."""
        return self._code

    @functools.cached_property
    def _code(self) -> tuple[int, float, float]:
        flags = self.up_first | self.on_input << 1
        return _NAMES.index(self.activation) | GATINGS.index(self.gating) << _BITS | flags << 2 * _BITS, *self.pair

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def decode(body: int, arg0: float, arg1: float) -> Body:
        """What was encoded."""
        activation, flags, mask = _NAMES[body & (1 << _BITS) - 1], body >> 2 * _BITS, (1 << _BITS) - 1
        args = (arg0, arg1)[: ACTIVATIONS[activation].num_args]
        return Body(activation, args, GATINGS[body >> _BITS & mask], bool(flags & 1), bool(flags & 2))


class Stack(NamedTuple):
    """The weights of one projection of all experts; empty if there is no such projection.

    Attributes:
        weight: one tensor [E, out, in], or E tensors [out, in], of any strides.
        bias: one tensor [E, out], or E tensors [out]; empty without biases.
    """

    weight: Sequence[Tensor]
    bias: Sequence[Tensor] = ()

    @property
    def experts(self) -> int:
        """E."""
        return count_experts(self.weight)

    @property
    def features(self) -> int:
        """Output features of one expert."""
        return self.weight[0].shape[-2]

    @property
    def inputs(self) -> int:
        """Input features of one expert."""
        return self.weight[0].shape[-1]

    @property
    def rounding(self) -> Rounding | None:
        """How the projection rounds its rows; None: it does not."""
        return None

    def expert(self, e: int) -> tuple[Tensor, Tensor | None]:
        """Views: weight [out, in] and bias [out], or None, of one expert."""
        return expert_weight(self.weight, e), expert_vector(self.bias, e)


def stacks(lists: Iterable[Sequence[Tensor]]) -> tuple[Stack, Stack, Stack]:
    """Of w_in, w_up and w_out, given the lists w_in, w_up, w_out, b_in, b_up, b_out."""
    w_in, w_up, w_out, b_in, b_up, b_out = lists
    return Stack(w_in, b_in), Stack(w_up, b_up), Stack(w_out, b_out)


def lists_of(w_in: Stack, w_up: Stack, w_out: Stack) -> tuple[Sequence[Tensor], ...]:
    """What :func:`stacks` was given."""
    return w_in.weight, w_up.weight, w_out.weight, w_in.bias, w_up.bias, w_out.bias


class ExpertsCall(NamedTuple):
    """Arguments of ``moefuse::experts``, checked by ``ops/meaning/checks.py``. (A named tuple, for a dataclass costs the host more.)

    Attributes:
        x: [T, H].
        ids: [T, K], integers.
        weights: [T, K], floating.
        w_in: first projection: of the gate with gating "separate", else of all there is.
        w_up: of up with gating "separate", else empty.
        w_out: second projection.
        out_dtype: of the result [T, Hout].
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    w_in: Stack
    w_up: Stack
    w_out: Stack
    body: Body
    out_dtype: torch.dtype

    @staticmethod
    def of(
        x: Tensor, ids: Tensor, weights: Tensor, w_in: Sequence[Tensor], w_up: Sequence[Tensor], w_out: Sequence[Tensor],
        b_in: Sequence[Tensor], b_up: Sequence[Tensor], b_out: Sequence[Tensor], *, activation: str = "silu",
        activation_args: Sequence[float] = (), gating: str = "merged", up_first: bool = False, weight_on_input: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> ExpertsCall:  # fmt: skip
        """From the arguments of the op, in the order of its schema."""
        body = Body.of(activation, tuple(activation_args), gating, up_first, weight_on_input)
        return ExpertsCall(x, ids, weights, Stack(w_in, b_in), Stack(w_up, b_up), Stack(w_out, b_out), body, out_dtype or x.dtype)

    @staticmethod
    def unpack(tensors: Sequence[Tensor], counts: Sequence[int], *how: Any) -> ExpertsCall:
        """From the arguments of ``experts_infer`` and ``experts_forward``."""
        *body, out_dtype = how
        x, ids, weights = tensors[:3]
        return ExpertsCall(x, ids, weights, *stacks(cut(tensors, counts, 3)), Body.decode(*body), out_dtype)

    def pack(self) -> tuple[list[Tensor], list[int], int, float, float, torch.dtype]:
        """Arguments of ``experts_infer`` and ``experts_forward``."""
        return (*self.joined, *self.body.encode(), self.out_dtype)

    @property
    def lists(self) -> tuple[Sequence[Tensor], ...]:
        """w_in, w_up, w_out, b_in, b_up, b_out."""
        return lists_of(self.w_in, self.w_up, self.w_out)

    @property
    def joined(self) -> tuple[list[Tensor], list[int]]:
        """All tensors, and how many each of :attr:`lists` has."""
        return join(self[:3], self.lists)

    def reference(self) -> Tensor:
        """What the call means."""
        how = self.body
        return experts_reference(
            *self[:3], *self.lists, activation=how.activation, activation_args=how.args, gating=how.gating, up_first=how.up_first,
            weight_on_input=how.on_input, out_dtype=self.out_dtype,
        )  # fmt: skip

    def with_lists(self, lists: Iterable[Sequence[Tensor]]) -> ExpertsCall:
        """The call with other :attr:`lists`."""
        w_in, w_up, w_out = stacks(lists)
        return self._replace(w_in=w_in, w_up=w_up, w_out=w_out)

    def of_tokens(self, rows: slice) -> ExpertsCall:
        """The call for some of its tokens."""
        return self._replace(x=self.x[rows], ids=self.ids[rows], weights=self.weights[rows])

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens, and of what is computed."""
        return self.x.dtype

    @property
    def held(self) -> torch.dtype:
        """Of weights and biases: :attr:`dtype`, or float32 where that has 16 bits."""
        return self.w_in.weight[0].dtype

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[1]

    @property
    def width(self) -> int:
        """Features of the pre-activation."""
        return 2 * self.w_in.features if self.body.split else self.w_in.features


def first_tensor(argument: Any) -> Tensor:
    """A tensor that is the argument of an op, or the first one of a list or of a call."""
    while not isinstance(argument, Tensor):
        argument = argument[0]
    return argument


def join(tensors: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> tuple[list[Tensor], list[int]]:
    """(all tensors, how many each list has)."""
    return [*tensors, *chain.from_iterable(lists)], [*map(len, lists)]


def cut(tensors: Sequence[Any], counts: Sequence[int], start: int = 0) -> list[Sequence[Any]]:
    """The lists of :func:`join`, from the position ``start``."""
    lists = []
    for n in counts:
        lists.append(tensors[start : start + n])
        start += n
    return lists
