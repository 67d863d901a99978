"""``moefuse::experts_coded``: routed experts whose weights are held in few bits (``encoding.py``), and are never unpacked as a whole.

The arguments are those of ``moefuse::experts``, where a weight list may be a *storage*; ``encodings`` says of w_in, w_up and w_out how they
are held ("" for a projection in floating point). ``codes`` has what goes with them: for each encoded projection its scales, then its zeros
if it has some, each as one stacked tensor [E, ...] if the storage is one, else E tensors.

The op means ``moefuse::experts`` with the weights that ``encoding.dequantise`` gives, in the dtype of x. Nobody differentiates storage,
scales and zeros: tokens, routing weights and biases have gradients. What forward saves for backward is what ``moefuse::experts`` saves.

Where an encoding rounds activations, a projection means

    out[t, n] = round( sum over k of as_rounded(x)[t, k] * W[n, k] + bias[n] )

with ``token_codes.as_rounded``, W in float32, the sum in float32 in whatever order, and one rounding to the dtype of x: what the
activation function gets, and what it gives, which the next projection rounds again by itself. In float64 the sum is, too, over the same
codes. Gradients pass a rounding as if it was not there (straight through): a step function has none that is of use. What they are
multiplied with is what forward had: the gradient of a routing weight on the output is <gradient of the output, y>, with the y that the
expert's rounded activation gave. On the input a routing weight is in front of the rounding, and its gradient sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import below_autograd, grads_for, keep, kept, not_differentiable, once, ops, wants_grad
from moefuse.ops.meaning.call import Stack, cut
from moefuse.ops.meaning.checks import check_codes, check_experts
from moefuse.ops.meaning.coded_calls import CodedCall, CodedGrads
from moefuse.ops.meaning.coded_weights import Codes, Lists
from moefuse.ops.meaning.composite import flatten
from moefuse.ops.schema import implement
from moefuse.runtime import providers


def checked(call: CodedCall) -> tuple[Any, Any, Any]:
    """E, the width of h, and the features of the result; raises where the arguments do not fit."""
    base = call.base
    weights = []
    for name, stack, codes in zip(("w_in", "w_up", "w_out"), call.stacks, call.codes, strict=True):
        weights.append(stack if codes is None else Stack(shown(stack.weight, codes, base.x), stack.bias))
        if codes is not None:
            check_codes(name, stack.weight, codes.encoding, codes.scale, codes.zero, base.x)
    w_in, w_up, w_out = weights
    return check_experts(base._replace(w_in=w_in, w_up=w_up, w_out=w_out), "experts_coded")


def shown(storage: Lists, codes: Codes, x: Tensor) -> list[Tensor]:
    """Tensors of the shapes and the dtype of the weights, without memory of their own."""
    return [x.new_empty(()).expand(codes.encoding.logical(tuple(t.shape))) for t in storage]


def kernel(*data: Any, **options: Any) -> Tensor:
    """``experts_coded`` below autograd."""
    found: Tensor = providers.run_by_kind("experts_coded", _legal, _run, data, options)
    return found


def _legal(*data: Any, **options: Any) -> CodedCall:
    """The call that arguments are; raises where they do not fit."""
    call = CodedCall.of(*data, **options)
    checked(call)
    return call


def _run(call: CodedCall) -> Tensor:
    found: Tensor = providers.run("experts_coded", call)
    return found


def fake(*data: Any, **options: Any) -> Tensor:
    """Its result in shape and dtype."""
    call = CodedCall.of(*data, **options)
    _, _, hidden = checked(call)
    return call.base.x.new_empty((call.base.x.shape[0], hidden), dtype=call.base.out_dtype)


def _forward(*packed: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = providers.run("experts_coded_forward", CodedCall.unpack(*packed))
    return found


def _forward_fake(*packed: Any) -> tuple[Tensor, ...]:
    call = CodedCall.unpack(*packed)
    experts, width, hidden = checked(call)
    x, slots = call.base.x, call.base.x.shape[0] * call.base.top_k
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    return x.new_empty((x.shape[0], hidden), dtype=call.base.out_dtype), x.new_empty((slots, width)), order, offsets


def _backward(*packed: Any) -> list[Tensor]:
    found: list[Tensor] = providers.run("experts_coded_backward", CodedGrads.unpack(*packed))
    return found


def _backward_fake(tensors: Lists, counts: Sequence[int], encodings: Sequence[str], needs: int, *body: Any) -> list[Tensor]:
    dense = [t.new_empty(t.shape) for i, t in enumerate(tensors[1:3]) if needs >> i & 1]
    return dense + [torch.empty_like(t) for i, group in enumerate(cut(tensors, counts, 6)[:6], 2) if needs >> i & 1 for t in group]


class _Coded(torch.autograd.Function):
    """One call of ``moefuse::experts_coded`` that is differentiated."""

    @staticmethod
    def forward(ctx: Any, counts: list[int], encodings: list[str], body: tuple[Any, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        with below_autograd():
            out, h, order, offsets = ops.experts_coded_forward.default(tensors, counts, encodings, *body, dtype)
        x, _, weights, *flat = tensors
        ctx.counts, ctx.encodings, ctx.body = counts, encodings, body
        keep(ctx, x, weights, h, order, offsets, *flat)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        need_x, _, need_weights, *need_flat = ctx.needs_input_grad[4:]
        flags = [need_x, need_weights, *(any(part) for part in cut(need_flat, ctx.counts)[:6])]
        code = sum(flag << i for i, flag in enumerate(flags))
        computed = ops.experts_coded_backward.default([grad, *kept(ctx)], ctx.counts, ctx.encodings, code, *ctx.body)
        d_x, d_weights, *d_lists = grads_for(flags, (1, 1, *ctx.counts[:6]), computed)
        return None, None, None, None, d_x, None, d_weights, *d_lists, *(None for _ in range(ctx.counts[6]))


def _autograd(*data: Any, **options: Any) -> Tensor:
    if not torch.is_grad_enabled() or not wants_grad(flatten(data)):
        with below_autograd():
            return ops.experts_coded.default(*data, **options)  # type: ignore[no-any-return]
    call = _legal(*data, **options)
    tensors, counts, encodings, *body, dtype = call.pack()
    _refuse_gradients(call)
    return _Coded.apply(counts, encodings, tuple(body), dtype, *tensors)  # type: ignore[no-untyped-call, no-any-return]


def _refuse_gradients(call: CodedCall) -> None:
    """Scales and zeros are constants here, and weights beside them too.

    Raises:
        RuntimeError: one of them needs a gradient.
    """
    base = call.base
    coded = [t for c in call.codes if c is not None for t in (*c.scale, *c.zero)]
    if any(t.requires_grad for t in (*coded, *base.w_in.weight, *base.w_up.weight, *base.w_out.weight)):
        raise RuntimeError("moefuse::experts_coded has gradients of x, of weights and of biases, and none of what weights are held in")


def _composite(*data: Any, **options: Any) -> Tensor:
    call = _legal(*data, **options)
    _refuse_roundings(call.codes)
    return call.decoded.reference()


def _again(*packed: Any) -> list[Tensor]:
    call = CodedGrads.unpack(*packed)
    _refuse_roundings(call.codes)
    return call.decoded.reference()


def _refuse_roundings(codes: Sequence[Codes | None]) -> None:
    """A gradient that passes a rounding as if it was not there is a rule of its own, of which nobody has said what comes twice.

    Raises:
        RuntimeError: an encoding rounds activations.
    """
    if any(c is not None and c.encoding.activation is not None for c in codes):
        raise RuntimeError(
            "moefuse::experts_coded with activations in few bits has gradients, "
            "and no rules for forward-mode AD, torch.func or a second derivative"
        )


implement("experts_coded", kernel=kernel, fake=fake, autograd=_autograd, composite=_composite)
implement("experts_coded_forward", kernel=_forward, fake=_forward_fake, autograd=not_differentiable("experts_coded_forward"))
implement(
    "experts_coded_backward",
    kernel=_backward,
    fake=_backward_fake,
    autograd=once("experts_coded_backward", _again),
    composite=_again,
)
