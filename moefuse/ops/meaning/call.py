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
import torch.nn.functional as F
from torch import Tensor

from moefuse.ops.meaning.activations import ACTIVATIONS
from moefuse.ops.meaning.coded_weights import CodedWeights, Codes, codes_by
from moefuse.ops.meaning.reference import GATINGS, accumulation_dtype, count_experts, expert_vector, expert_weight, experts_by_projections
from moefuse.ops.meaning.token_codes import OF_ROWS, Rounding, as_rounded

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


Lists = Sequence[Tensor]


class Term(NamedTuple):
    """The low-rank term of one projection: ``s * B_e @ A_e`` beside ``W_e``.

    Attributes:
        a: one tensor [E, r, in], or E tensors [r, in]; empty without a term.
        b: one tensor [E, out, r], or E tensors [out, r].
    """

    a: Lists = ()
    b: Lists = ()
    scale: float = 0.0

    @property
    def rank(self) -> int:
        """r."""
        return self.a[0].shape[-2] if self.a else 0


class Stack(NamedTuple):
    """One projection of all experts; its weights are empty if there is no such projection.

    Attributes:
        weight: one tensor [E, out, in], or E tensors [out, in], of any strides; with codes the storage of these weights.
        bias: one tensor [E, out], or E tensors [out]; empty without biases.
        codes: what belongs to the storage of weights in few bits; None: they are in floating point.
        term: what is added to each product; None: nothing.
    """

    weight: Lists
    bias: Lists = ()
    codes: Codes | None = None
    term: Term | None = None

    @property
    def experts(self) -> int:
        """E."""
        return count_experts(self.weight)

    @property
    def features(self) -> int:
        """Output features of one expert."""
        return self._shape[-2]

    @property
    def inputs(self) -> int:
        """Input features of one expert."""
        return self._shape[-1]

    @property
    def _shape(self) -> tuple[int, ...]:
        shape = self.weight[0].shape
        return shape if self.codes is None else self.codes.encoding.logical(tuple(shape[-2:]))

    @property
    def rounding(self) -> Rounding | None:
        """How the projection rounds its rows; None: it does not."""
        return None if self.codes is None else self.codes.encoding.activation

    @property
    def rank(self) -> int:
        """Of the term; 0 without one."""
        return 0 if self.term is None else self.term.rank

    def weights(self, dtype: torch.dtype) -> Lists:
        """The weights; those in few bits in a dtype, each unpacked when it is asked for."""
        return self.weight if self.codes is None else CodedWeights(self.weight, self.codes, dtype)

    def expert(self, e: int) -> tuple[Tensor, Tensor | None]:
        """Views: weight [out, in] and bias [out], or None, of one expert in floating point."""
        return expert_weight(self.weight, e), expert_vector(self.bias, e)

    def computes_in(self, rows: torch.dtype) -> torch.dtype:
        """The dtype that rows of a dtype have, or had before they were rounded."""
        return rows if self.rounding is None or not self.rounding.came else OF_ROWS[self.rounding.came]

    def reference(self, rows: Tensor, e: int) -> Tensor:
        """What the projection means: rows [n, in] of one expert -> [n, out]."""
        dtype, bias = self.computes_in(rows.dtype), expert_vector(self.bias, e)
        wide = accumulation_dtype(dtype)
        inner = dtype if self.rounding is None else wide
        given = rows if self.rounding is None else as_rounded(self.rounding, rows).to(wide)
        out = F.linear(given, expert_weight(self.weights(inner), e).to(inner), None if bias is None else bias.to(dtype).to(inner)).to(dtype)
        if self.term is None:
            return out
        a, b, scale = self.term
        u = scale * F.linear(rows.to(wide), expert_weight(a, e).to(wide))
        return (out.to(wide) + F.linear(u, expert_weight(b, e).to(wide))).to(dtype)


Stacks = tuple[Stack, Stack, Stack]


def stacks(lists: Iterable[Lists]) -> Stacks:
    """Of w_in, w_up and w_out, given the lists w_in, w_up, w_out, b_in, b_up, b_out."""
    w_in, w_up, w_out, b_in, b_up, b_out = lists
    return Stack(w_in, b_in), Stack(w_up, b_up), Stack(w_out, b_out)


def lists_of(w_in: Stack, w_up: Stack, w_out: Stack) -> tuple[Lists, ...]:
    """What :func:`stacks` was given."""
    return w_in.weight, w_up.weight, w_out.weight, w_in.bias, w_up.bias, w_out.bias


def factors_of(of: Stacks) -> tuple[Lists, ...]:
    """a_in, l_in, a_up, l_up, a_out, l_out: A and B of each projection."""
    return tuple(part for stack in of for part in (stack.term or Term())[:2])


def with_terms(of: Stacks, factors: Sequence[Lists], scales: Sequence[float]) -> Stacks:
    """The projections with low-rank terms, given the lists of :func:`factors_of` and the scale of each.

    Raises:
        ValueError: there are more or fewer scales.
    """
    if len(scales) != len(of):
        raise ValueError(f"moefuse::experts_extended: argument `scales` has {len(scales)} numbers; legal: three, for w_in, w_up and w_out")
    made = zip(of, factors[::2], factors[1::2], scales, strict=True)
    w_in, w_up, w_out = (stack._replace(term=Term(a, b, scale) if a or b else None) for stack, a, b, scale in made)
    return w_in, w_up, w_out


def with_codes(of: Stacks, codes: Lists, encodings: Sequence[str]) -> Stacks:
    """The projections with weights in few bits, given all that belongs to their storage and how each is encoded ("": it is not)."""
    found = codes_by([stack.weight for stack in of], codes, encodings)
    w_in, w_up, w_out = (stack._replace(codes=c) for stack, c in zip(of, found, strict=True))
    return w_in, w_up, w_out


def extended(lists: Sequence[Lists], scales: Sequence[float], encodings: Sequence[str]) -> Stacks:
    """The projections with terms and codes: the lists of :func:`stacks` and :func:`factors_of`, then all that belongs to storage."""
    of = stacks(lists[:6])
    of = with_terms(of, lists[6:12], scales) if scales or any(lists[6:12]) else of
    return with_codes(of, lists[12], encodings) if encodings or lists[12] else of


def columns(of: Stacks) -> list[slice]:
    """The columns of u [S, r of all terms] that are of each projection."""
    ends = [sum(stack.rank for stack in of[: i + 1]) for i in range(len(of))]
    return [slice(end - stack.rank, end) for stack, end in zip(of, ends, strict=True)]


class ExpertsCall(NamedTuple):
    """Arguments of ``moefuse::experts``, checked by ``ops/meaning/checks.py``. (A named tuple, for a dataclass costs the host more.)

    Attributes:
        x: [T, H], or bytes of tokens that come rounded.
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
        x: Tensor, ids: Tensor, weights: Tensor, w_in: Lists, w_up: Lists, w_out: Lists,
        b_in: Lists, b_up: Lists, b_out: Lists, *, activation: str = "silu",
        activation_args: Sequence[float] = (), gating: str = "merged", up_first: bool = False, weight_on_input: bool = False,
        out_dtype: torch.dtype | None = None,
    ) -> ExpertsCall:  # fmt: skip
        """From the arguments of the op, in the order of its schema."""
        body = Body.of(activation, tuple(activation_args), gating, up_first, weight_on_input)
        return ExpertsCall(x, ids, weights, Stack(w_in, b_in), Stack(w_up, b_up), Stack(w_out, b_out), body, out_dtype or x.dtype)

    @staticmethod
    def unpack(tensors: Lists, counts: Sequence[int], *how: Any) -> ExpertsCall:
        """From the arguments of ``experts_infer`` and ``experts_forward``."""
        *body, out_dtype = how
        x, ids, weights = tensors[:3]
        return ExpertsCall(x, ids, weights, *stacks(cut(tensors, counts, 3)), Body.decode(*body), out_dtype)

    def pack(self) -> tuple[list[Tensor], list[int], int, float, float, torch.dtype]:
        """Arguments of ``experts_infer`` and ``experts_forward``."""
        return (*self.joined, *self.body.encode(), self.out_dtype)

    @staticmethod
    def of_extended(*data: Any, scales: Sequence[float] = (), encodings: Sequence[str] | None = None, **options: Any) -> ExpertsCall:
        """From the arguments of ``moefuse::experts_extended``, in the order of its schema."""
        call = ExpertsCall.of(*data[:9], **options).with_stacks(extended(data[3:], scales, encodings or ()))
        return call._replace(out_dtype=call.dtype) if call.came and options.get("out_dtype") is None else call

    @staticmethod
    def unpack_extended(tensors: Lists, counts: Sequence[int], scales: Sequence[float], encodings: Sequence[str], *how: Any) -> ExpertsCall:
        """From the arguments of ``experts_extended_forward``."""
        *body, out_dtype = how
        of = extended(cut(tensors, counts, 3), scales, encodings)
        return ExpertsCall(tensors[0], tensors[1], tensors[2], *of, Body.decode(*body), out_dtype)

    def pack_extended(self) -> tuple[list[Tensor], list[int], list[float], list[str], int, float, float, torch.dtype]:
        """Arguments of ``experts_extended_forward``; no scales and no encodings where no projection has a term or codes."""
        of = self.stacks
        codes = [t for stack in of if stack.codes is not None for part in stack.codes[1:] for t in part]
        scales = [(stack.term or Term()).scale for stack in of] if any(stack.term for stack in of) else []
        encodings = ["" if stack.codes is None else str(stack.codes.encoding) for stack in of] if any(stack.codes for stack in of) else []
        tensors, counts = join(self[:3], (*self.lists, *factors_of(of), codes))
        return tensors, counts, scales, encodings, *self.body.encode(), self.out_dtype

    @property
    def lists(self) -> tuple[Lists, ...]:
        """w_in, w_up, w_out, b_in, b_up, b_out."""
        return lists_of(self.w_in, self.w_up, self.w_out)

    @property
    def joined(self) -> tuple[list[Tensor], list[int]]:
        """All tensors, and how many each of :attr:`lists` has."""
        return join(self[:3], self.lists)

    @property
    def stacks(self) -> Stacks:
        """w_in, w_up and w_out."""
        return self.w_in, self.w_up, self.w_out

    def with_stacks(self, of: Stacks) -> ExpertsCall:
        """The call with other :attr:`stacks`."""
        w_in, w_up, w_out = of
        return self._replace(w_in=w_in, w_up=w_up, w_out=w_out)

    @property
    def ranks(self) -> int:
        """Columns of u."""
        return sum(stack.rank for stack in self.stacks)

    def reference(self) -> Tensor:
        """What the call means."""
        how, of = self.body, self.stacks

        def project(rows: Tensor, which: int, e: int) -> Tensor:
            return of[which].reference(rows, e)

        options = how.activation, how.args, how.gating, how.up_first, how.on_input, self.out_dtype
        count, hidden = self.w_in.experts, self.w_out.features
        return experts_by_projections(self.x, self.ids, self.weights, count, hidden, project, *options, self.dtype)

    def with_lists(self, lists: Iterable[Lists]) -> ExpertsCall:
        """The call with other :attr:`lists`."""
        return self.with_stacks(stacks(lists))

    def of_tokens(self, rows: slice) -> ExpertsCall:
        """The call for some of its tokens."""
        return self._replace(x=self.x[rows], ids=self.ids[rows], weights=self.weights[rows])

    @property
    def device(self) -> torch.device:
        """Of all tensors."""
        return self.x.device

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens, as they were before they were rounded, and of what is computed."""
        return self.x.dtype if self.w_in.codes is None else self.w_in.computes_in(self.x.dtype)

    @property
    def came(self) -> bool:
        """Whether tokens come rounded (``token_codes.packed``)."""
        return any(stack.rounding is not None and bool(stack.rounding.came) for stack in self.stacks)

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


def join(tensors: Lists, lists: Sequence[Lists]) -> tuple[list[Tensor], list[int]]:
    """(all tensors, how many each list has)."""
    return [*tensors, *chain.from_iterable(lists)], [*map(len, lists)]


def cut(tensors: Sequence[Any], counts: Sequence[int], start: int = 0) -> list[Sequence[Any]]:
    """The lists of :func:`join`, from the position ``start``."""
    lists = []
    for n in counts:
        lists.append(tensors[start : start + n])
        start += n
    return lists
