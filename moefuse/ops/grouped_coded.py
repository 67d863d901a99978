"""``moefuse::grouped_linear_coded``: ``moefuse::grouped_linear`` with weights held in few bits, which are never unpacked as a whole.

``w`` is the storage of one projection, [E, N', K'] or E tensors, and ``codes`` its scales, then its zeros if it has some, one tensor or E
as the storage is. The op means ``grouped_linear`` with the weights that ``encoding.dequantise`` gives, in the dtype of xs [S, K]. Rows and
biases [E, N] have gradients, in any of the ways; storage, scales and zeros have none.

Rows [offsets[e], offsets[e + 1]) are of expert e: offsets ascend from 0 to at most S, and rows behind the last are zeros, with gradients of
zeros. Other values raise a ValueError on a CPU and are undefined behaviour on CUDA (``grouped.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import below_autograd, grads_for, keep, kept, once, ops, wants_grad
from moefuse.ops.check_values import check_offset_values
from moefuse.ops.meaning.checks import check_codes, check_grouped_linear, shown
from moefuse.ops.meaning.coded_weights import CodedWeights, codes_of
from moefuse.ops.meaning.composite import pulled_back
from moefuse.ops.meaning.encoding import parse
from moefuse.ops.meaning.reference_grouped import grouped_linear_reference
from moefuse.ops.schema import implement
from moefuse.runtime import providers

Lists = Sequence[Tensor]


def checked(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Any:
    """The output features; raises where xs [S, in], offsets [E + 1] and the lists do not fit."""
    held = codes_of(w, codes, encoding)
    if held.encoding.activation is not None:
        raise ValueError(f"moefuse::grouped_linear_coded: `encoding` rounds activations ({encoding}); here no encoding does")
    found = check_grouped_linear(xs, offsets, shown(w, held, xs), b, "grouped_linear_coded")
    check_codes("w", w, held.encoding, held.scale, held.zero, xs, op="grouped_linear_coded")
    return found


def _kernel(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    check_offset_values(offsets, xs.shape[0], "grouped_linear_coded")
    checked(xs, offsets, w, codes, b, encoding)
    found: Tensor = providers.run("grouped_linear_coded", xs, offsets, w, codes, b, encoding)
    return found


def _fake(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    return xs.new_empty((xs.shape[0], checked(xs, offsets, w, codes, b, encoding)))


def _backward(grad: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, needs: Sequence[bool]) -> list[Tensor]:
    check_offset_values(offsets, grad.shape[0], "grouped_linear_coded_backward", "grad")
    found: list[Tensor] = providers.run("grouped_linear_coded_backward", grad, offsets, w, codes, b, encoding, needs)
    return found


def _backward_fake(grad: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, needs: Sequence[bool]) -> list[Tensor]:
    inputs = parse(encoding).logical(tuple(w[0].shape))[-1]
    out = [grad.new_empty((grad.shape[0], inputs))] if needs[0] else []
    return out + ([torch.empty_like(t) for t in b] if needs[1] else [])


class _Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, int], encoding: str, xs: Tensor, offsets: Tensor, *flat: Tensor) -> Tensor:
        ctx.lengths, ctx.encoding = lengths, encoding
        keep(ctx, offsets, *flat)
        with below_autograd():
            return ops.grouped_linear_coded.default(xs, offsets, *_cut(flat, lengths), encoding)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, *flat = kept(ctx)
        _, _, need_xs, _, *need_flat = ctx.needs_input_grad
        first = sum(ctx.lengths)
        needs = [need_xs, any(need_flat[first:])]
        computed = ops.grouped_linear_coded_backward.default(grad, offsets, *_cut(flat, ctx.lengths), ctx.encoding, needs)
        d_xs, *d_b = grads_for(needs, (1, len(flat) - first), computed)
        return None, None, d_xs, None, *(None,) * first, *d_b


def _cut(flat: Lists, lengths: tuple[int, int]) -> tuple[Lists, Lists, Lists]:
    """w, codes and b."""
    first, last = lengths[0], sum(lengths)
    return flat[:first], flat[first:last], flat[last:]


def _autograd(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    if any(t.requires_grad for t in (*w, *codes)) and torch.is_grad_enabled():
        raise RuntimeError("moefuse::grouped_linear_coded has gradients of xs and of biases, and none of what weights are held in")
    if wants_grad((xs, *b)):
        return _Coded.apply((len(w), len(codes)), encoding, xs, offsets, *w, *codes, *b)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.grouped_linear_coded.default(xs, offsets, w, codes, b, encoding)  # type: ignore[no-any-return]


def _composite(xs: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str) -> Tensor:
    return grouped_linear_reference(xs, offsets, CodedWeights(w, codes_of(w, codes, encoding), xs.dtype), b)


def _again(grad: Tensor, offsets: Tensor, w: Lists, codes: Lists, b: Lists, encoding: str, needs: Sequence[bool]) -> list[Tensor]:
    inputs = parse(encoding).logical(tuple(w[0].shape))[-1]

    def function(xs: Tensor, *b: Tensor) -> Tensor:
        return _composite(xs, offsets, w, codes, b, encoding)

    # Linear in the rows, so any do.
    rows = torch.zeros((grad.shape[0], inputs), dtype=grad.dtype, device=grad.device)
    return pulled_back(function, [rows, *b], [needs[0], *(needs[1] for _ in b)], grad)


implement("grouped_linear_coded", kernel=_kernel, fake=_fake, autograd=_autograd, composite=_composite)
implement(
    "grouped_linear_coded_backward",
    kernel=_backward,
    fake=_backward_fake,
    autograd=once("grouped_linear_coded_backward", _again),
    composite=_again,
)
