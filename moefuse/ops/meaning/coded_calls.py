"""A call of ``moefuse::experts_coded`` and of its backward pass: the experts with their storage as weights, and what belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, cut, join, stacks
from moefuse.ops.meaning.coded_weights import CodedStack, CodedWeights, Codes, Lists
from moefuse.ops.meaning.encoding import parse
from moefuse.ops.meaning.grad_calls import GradCall, Needs
from moefuse.ops.meaning.reference import accumulation_dtype


class CodedCall(NamedTuple):
    """One call: the experts with their storage as weights, and what belongs to those of w_in, w_up and w_out (None: floating point)."""

    base: ExpertsCall
    codes: tuple[Codes | None, ...]

    @staticmethod
    def of(*data: Any, encodings: Sequence[str], **options: Any) -> CodedCall:
        """From the arguments of the op, in the order of its schema."""
        *lists, codes = data
        base = ExpertsCall.of(*lists, **options)
        return CodedCall(base, tuple(_codes((base.w_in, base.w_up, base.w_out), codes, encodings)))

    @staticmethod
    def unpack(tensors: Lists, counts: Sequence[int], encodings: Sequence[str], *how: Any) -> CodedCall:
        """From the arguments of the internal op of the forward pass."""
        *body, out_dtype = how
        *lists, codes = cut(tensors, counts, 3)
        base = ExpertsCall(tensors[0], tensors[1], tensors[2], *stacks(lists), Body.decode(*body), out_dtype)
        return CodedCall(base, tuple(_codes((base.w_in, base.w_up, base.w_out), codes, encodings)))

    def pack(self) -> tuple[list[Tensor], list[int], list[str], int, float, float, torch.dtype]:
        """Arguments of the internal op of the forward pass."""
        codes = [t for c in self.codes if c is not None for part in (c.scale, c.zero) for t in part]
        tensors, counts = join(self.base[:3], (*self.base.lists, codes))
        return tensors, counts, self.encodings, *self.base.body.encode(), self.base.out_dtype

    @property
    def encodings(self) -> list[str]:
        """Of w_in, w_up and w_out, as the op takes them."""
        return ["" if c is None else str(c.encoding) for c in self.codes]

    @property
    def x(self) -> Tensor:
        """[T, H]."""
        return self.base.x

    @property
    def stacks(self) -> tuple[Stack, Stack, Stack]:
        """w_in, w_up and w_out, as they are held."""
        return self.base.w_in, self.base.w_up, self.base.w_out

    def with_stacks(self, stacks: Sequence[Stack], codes: tuple[Codes | None, ...]) -> CodedCall:
        """The call with others."""
        w_in, w_up, w_out = stacks
        return CodedCall(self.base._replace(w_in=w_in, w_up=w_up, w_out=w_out), codes)

    @property
    def decoded(self) -> ExpertsCall:
        """The call of ``moefuse::experts`` that this one means; a weight exists while it is used."""
        wide = accumulation_dtype(self.x.dtype)
        dtypes = [wide if c is not None and c.encoding.activation is not None else self.x.dtype for c in self.codes]
        return self.with_stacks(_decoded(self.stacks, self.codes, dtypes), self.codes).base


class CodedGrads(NamedTuple):
    """One backward call: that of ``experts_backward`` with storage as weights, and what belongs to it. Weights have no gradients."""

    grads: GradCall
    codes: tuple[Codes | None, ...]

    @staticmethod
    def unpack(tensors: Lists, counts: Sequence[int], encodings: Sequence[str], needs: int, *body: Any) -> CodedGrads:
        """From the arguments of the internal op."""
        *lists, codes = cut(tensors, counts, 6)
        how, found = Body.decode(*body), stacks(lists)
        grad, x, weights, h, order, offsets = tensors[:6]
        call = GradCall(grad, x, weights, h, order, offsets, *found, Needs.decode(needs, how.on_input), how)
        return CodedGrads(call, tuple(_codes(found, codes, encodings)))

    @property
    def x(self) -> Tensor:
        """[T, H]."""
        return self.grads.x

    @property
    def stacks(self) -> tuple[Stack, Stack, Stack]:
        """w_in, w_up and w_out, as they are held."""
        return self.grads.w_in, self.grads.w_up, self.grads.w_out

    def with_stacks(self, stacks: Sequence[Stack], codes: tuple[Codes | None, ...]) -> CodedGrads:
        """The call with others."""
        w_in, w_up, w_out = stacks
        return CodedGrads(self.grads._replace(w_in=w_in, w_up=w_up, w_out=w_out), codes)

    @property
    def decoded(self) -> GradCall:
        """The backward call of ``moefuse::experts`` that this one means."""
        return self.with_stacks(_decoded(self.stacks, self.codes, [self.x.dtype] * len(self.codes)), self.codes).grads


def _decoded(stacks: Sequence[Stack], codes: Sequence[Codes | None], dtypes: Sequence[torch.dtype]) -> list[Stack]:
    """Projections with weights instead of codes, each in its dtype."""
    return [
        s if c is None else CodedStack(CodedWeights(s.weight, c, dtype), s.bias) for s, c, dtype in zip(stacks, codes, dtypes, strict=True)
    ]


def _codes(stacks: Sequence[Stack], codes: Lists, encodings: Sequence[str]) -> Iterator[Codes | None]:
    """What belongs to each projection, of all that is given.

    Raises:
        ValueError: there is more or less of it.
    """
    at = 0
    if len(encodings) != len(stacks):
        _wrong("encodings", f"has {len(encodings)} texts", "three, for w_in, w_up and w_out")
    for name, stack, text in zip(("w_in", "w_up", "w_out"), stacks, encodings, strict=True):
        if not text:
            yield None
            continue
        encoding, n = parse(text), len(stack.weight)
        if not n:
            _wrong(name, "is empty", f"a storage, which `encodings` says is held as {text!r}")
        scale, zero = (codes[at + n * i : at + n * (i + 1)] for i in range(2))
        at += n * len(encoding.parts)
        yield Codes(encoding, scale, zero if encoding.zero else ())
    if at < len(codes):
        _wrong("codes", f"has {len(codes)} tensors", f"{at}, the scales and zeros of what `encodings` names")


def _wrong(argument: str, given: str, legal: str) -> NoReturn:
    raise ValueError(f"moefuse::experts_coded: argument `{argument}` {given}; legal: {legal}")
