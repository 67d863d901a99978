"""``moefuse::experts_extended``: experts whose projections are more than weights. They may have weights in few bits, which are never
unpacked as a whole, and low-rank terms ``W_e + s * B_e @ A_e``, which are never formed. What belongs to a projection is in its
:class:`~moefuse.ops.meaning.call.Stack`. It is an op of its own beside ``moefuse::experts``, for each argument that an op may have costs
the host time in every call, and those of ``experts`` are the C++ kernels'.

**Codes.** A weight list may be a *storage*; ``encodings`` says of w_in, w_up and w_out how they are held ("" for a projection in floating
point). ``codes`` has what goes with them: for each encoded projection its scales, then its zeros if it has some, each as one stacked tensor
[E, ...] if the storage is one, else E tensors. The op means ``moefuse::experts`` with the weights that ``encoding.dequantise`` gives, in
the dtype of x. Nobody differentiates storage, scales and zeros; all else has gradients, weights in floating point beside them too.

Where an encoding rounds activations, a projection means

    out[t, n] = round( sum over k of as_rounded(x)[t, k] * W[n, k] + bias[n] )

with ``token_codes.as_rounded``, W in float32, the sum in float32 in whatever order, and one rounding to the dtype of x: what the
activation function gets, and what it gives, which the next projection rounds again by itself. In float64 the sum is, too, over the same
codes. Tokens may come rounded (``Rounding.came``): x [T, bytes] then has codes and scales, and nothing is differentiated. Gradients pass a
rounding as if it was not there (straight through): a step function has none that is of use. What they are
multiplied with is what forward had: the gradient of a routing weight on the output is <gradient of the output, y>, with the y that the
expert's rounded activation gave. On the input a routing weight is in front of the rounding, and its gradient sees nothing of it.

**Terms.** Of each projection A [E, r, in] and B [E, out, r] (or E tensors of two dimensions; both empty without a term) with one scale. A
and B may have another dtype than the experts: float32 beside bfloat16 is the usual case. Terms are computed and differentiated in the
accumulation dtype, from the rows as they are, and weights that need no gradient get none. What multiplies 16-bit rows on tensor cores
(factors, u and its gradient) is rounded to their dtype as it is read.

What forward saves for backward is what ``moefuse::experts`` saves, and u [S, r of all terms]: each term's rows times s * A, in the
accumulation dtype. With ``recompute`` h is computed again in backward, as ``recomputed.py`` does, and ids are saved instead of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import again, below_autograd, grads_for, keep, kept, not_differentiable, once, ops, wants_grad
from moefuse.ops.meaning.call import ExpertsCall, cut
from moefuse.ops.meaning.checks import check_call
from moefuse.ops.meaning.grad_calls import GradCall
from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.ops.schema import implement
from moefuse.runtime import providers


def _legal(*data: Any, recompute: bool = False, **options: Any) -> ExpertsCall:
    """The call that arguments are; raises where they do not fit."""
    call = ExpertsCall.of_extended(*data, **options)
    check_call(call, "experts_extended")
    return call


def _kernel(*data: Any, **options: Any) -> Tensor:
    """Where nothing is differentiated."""
    found: Tensor = ops.experts_extended_infer.default(*_legal(*data, **options).pack_extended())
    return found


def _fake(*data: Any, **options: Any) -> Tensor:
    return _result(_legal(*data, **options))


def _result(call: ExpertsCall) -> Tensor:
    return call.x.new_empty((call.x.shape[0], call.w_out.features), dtype=call.out_dtype)


def _infer(*packed: Any) -> Tensor:
    found: Tensor = providers.run("experts_extended", ExpertsCall.unpack_extended(*packed))
    return found


def _infer_fake(*packed: Any) -> Tensor:
    call = ExpertsCall.unpack_extended(*packed)
    check_call(call, "experts_extended")
    return _result(call)


def _forward(*packed: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = providers.run("experts_extended_forward", ExpertsCall.unpack_extended(*packed))
    return found


def _forward_fake(*packed: Any) -> tuple[Tensor, ...]:
    call = ExpertsCall.unpack_extended(*packed)
    experts, width, hidden = check_call(call, "experts_extended")
    x, slots = call.x, call.x.shape[0] * call.top_k
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    u = x.new_empty((slots, call.ranks), dtype=accumulation_dtype(x.dtype))
    return x.new_empty((x.shape[0], hidden), dtype=call.out_dtype), x.new_empty((slots, width)), order, offsets, u


def _hidden(*given: Any) -> Tensor:
    """h of ``experts_extended_forward`` with these ``order``, ``offsets`` and ``u``."""
    *packed, order, offsets, u = given
    found: Tensor = providers.run("experts_extended_hidden", ExpertsCall.unpack_extended(*packed, given[0][0].dtype), order, offsets, u)
    return found


def _hidden_fake(*given: Any) -> Tensor:
    *packed, order, _, _ = given
    call = ExpertsCall.unpack_extended(*packed, given[0][0].dtype)
    return call.x.new_empty((order.shape[0], check_call(call, "experts_extended")[1]))


def _backward(*packed: Any) -> list[Tensor]:
    found: list[Tensor] = providers.run("experts_extended_backward", GradCall.unpack_extended(*packed))
    return found


def _backward_fake(*packed: Any) -> list[Tensor]:
    call = GradCall.unpack_extended(*packed)
    need_x, need_weights, *need = call.need.flags
    dense = [t.new_empty(t.shape) for t, wanted in ((call.x, need_x), (call.weights, need_weights)) if wanted]
    return dense + [torch.empty_like(t) for some, wanted in zip(call.lists, need, strict=True) if wanted for t in some]


class _Extended(torch.autograd.Function):
    """One call that is differentiated; ``recompute``: h is made again in backward."""

    @staticmethod
    def forward(ctx: Any, recompute: bool, how: tuple[Any, ...], body: tuple[Any, ...], dtype: torch.dtype, *tensors: Tensor) -> Tensor:
        with below_autograd():
            out, h, order, offsets, u = ops.experts_extended_forward.default(tensors, *how, *body, dtype)
        x, ids, weights, *flat = tensors
        ctx.recompute, ctx.how, ctx.body = recompute, how, body
        keep(ctx, x, ids if recompute else h, weights, order, offsets, u, *flat)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, h, weights, order, offsets, u, *flat = kept(ctx)
        # What is differentiated once more is made from the tokens alone.
        if ctx.recompute and not again((grad, x, weights, *flat)):
            h = ops.experts_extended_hidden.default([x, h, weights, *flat], *ctx.how, *ctx.body, order, offsets, u)
        elif ctx.recompute:
            h = x
        need_x, _, need_weights, *need_flat = ctx.needs_input_grad[4:]
        counts, scales, encodings = ctx.how
        flags = [need_x, need_weights, *(any(part) for part in cut(need_flat, counts)[:-1])]
        code = sum(flag << i for i, flag in enumerate(flags))
        given = [grad, x, weights, h, order, offsets, u, *flat]
        computed = ops.experts_extended_backward.default(given, counts, scales, encodings, code, *ctx.body)
        d_x, d_weights, *d_lists = grads_for(flags, (1, 1, *counts[:-1]), computed)
        return None, None, None, None, d_x, None, d_weights, *d_lists, *(None for _ in range(counts[-1]))


def _autograd(*data: Any, recompute: bool = False, **options: Any) -> Tensor:
    call = _legal(*data, **options)
    tensors, counts, scales, encodings, *body, dtype = call.pack_extended()
    if not wants_grad(tensors):
        with below_autograd():
            return ops.experts_extended_infer.default(tensors, counts, scales, encodings, *body, dtype)  # type: ignore[no-any-return]
    _refuse_gradients(call)
    return _Extended.apply(recompute, (counts, scales, encodings), tuple(body), dtype, *tensors)  # type: ignore[no-untyped-call, no-any-return]


def _refuse_gradients(call: ExpertsCall) -> None:
    """Storage, scales and zeros are constants here.

    Raises:
        RuntimeError: one of them needs a gradient, or tokens come rounded.
    """
    if call.came:
        raise RuntimeError("moefuse::experts_extended has no gradients where tokens come rounded")
    held = [(*stack.weight, *stack.codes.scale, *stack.codes.zero) for stack in call.stacks if stack.codes is not None]
    if any(t.requires_grad for tensors in held for t in tensors):
        raise RuntimeError("moefuse::experts_extended has no gradients of what weights in few bits are held in: storage, scales, zeros")


def _composite(*data: Any, **options: Any) -> Tensor:
    call = _legal(*data, **options)
    _refuse_roundings(call)
    return call.reference()


def _again(*packed: Any) -> list[Tensor]:
    call = GradCall.unpack_extended(*packed)
    _refuse_roundings(call)
    return call.reference()


def _refuse_roundings(call: ExpertsCall | GradCall) -> None:
    """A gradient that passes a rounding as if it was not there is a rule of its own, of which nobody has said what comes twice.

    Raises:
        RuntimeError: an encoding rounds activations.
    """
    if any(stack.rounding is not None for stack in call.stacks):
        raise RuntimeError(
            "moefuse::experts_extended with activations in few bits has gradients, "
            "and no rules for forward-mode AD, torch.func or a second derivative"
        )


implement("experts_extended", kernel=_kernel, fake=_fake, autograd=_autograd, composite=_composite)
implement("experts_extended_infer", kernel=_infer, fake=_infer_fake, autograd=None)
for _op, _of, _of_fake in (("experts_extended_forward", _forward, _forward_fake), ("experts_extended_hidden", _hidden, _hidden_fake)):
    implement(_op, kernel=_of, fake=_of_fake, autograd=not_differentiable(_op))
implement(
    "experts_extended_backward",
    kernel=_backward,
    fake=_backward_fake,
    autograd=once("experts_extended_backward", _again),
    composite=_again,
)
