"""``moefuse::experts_lora``: routed experts whose projections have low-rank terms, ``W_e + s * B_e @ A_e``, which is never formed.

The arguments are those of ``moefuse::experts`` and, for each projection, A [E, r, in] and B [E, out, r] (or E tensors of two dimensions;
both empty for a projection without a term) with one scale. A and B may have another dtype than the experts: float32 beside bfloat16 is the
usual case. Terms are computed and differentiated in the accumulation dtype, and weights that need no gradient get none.

What forward saves for backward is what ``moefuse::experts`` saves, and u [S, r of all terms]: each term's rows times s * A, in the
accumulation dtype. What multiplies 16-bit rows on tensor cores (factors, u and its gradient) is rounded to their dtype as it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moefuse.ops.autograd import below_autograd, grads_for, not_differentiable, once, ops, wants_grad
from moefuse.ops.meaning.call import ExpertsCall, cut, lists_of, stacks
from moefuse.ops.meaning.checks import check_experts, check_lora
from moefuse.ops.meaning.composite import pulled_back
from moefuse.ops.meaning.lora_calls import Lists, LoraCall, LoraGradCall, terms_of
from moefuse.ops.meaning.reference import accumulation_dtype, expert_weight, experts_by_projections
from moefuse.ops.meaning.reference_grouped import ids_of_rows
from moefuse.ops.schema import implement
from moefuse.runtime import providers


def checked(call: LoraCall) -> tuple[Any, Any, Any]:
    """E, the width of h, and the features of the result; raises where the arguments do not fit."""
    sizes = check_experts(call.base, "experts_lora")
    base = call.base
    for name, stack, term in zip(("in", "up", "out"), (base.w_in, base.w_up, base.w_out), call.terms, strict=True):
        check_lora(name, stack, term.a, term.b, base.x)
    return sizes


def kernel(*data: Any, **options: Any) -> Tensor:
    """``experts_lora`` below autograd."""
    call = LoraCall.of(*data, **options)
    checked(call)
    found: Tensor = providers.run("experts_lora", call)
    return found


def fake(*data: Any, **options: Any) -> Tensor:
    """Its result in shape and dtype."""
    call = LoraCall.of(*data, **options)
    _, _, hidden = checked(call)
    return call.base.x.new_empty((call.base.x.shape[0], hidden), dtype=call.base.out_dtype)


def _forward(*packed: Any) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = providers.run("experts_lora_forward", LoraCall.unpack(*packed))
    return found


def _forward_fake(*packed: Any) -> tuple[Tensor, ...]:
    call = LoraCall.unpack(*packed)
    experts, width, hidden = checked(call)
    x, slots = call.base.x, call.base.x.shape[0] * call.base.top_k
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    u = x.new_empty((slots, call.ranks), dtype=accumulation_dtype(x.dtype))
    return x.new_empty((x.shape[0], hidden), dtype=call.base.out_dtype), x.new_empty((slots, width)), order, offsets, u


def _backward(*packed: Any) -> list[Tensor]:
    found: list[Tensor] = providers.run("experts_lora_backward", LoraGradCall.unpack(*packed))
    return found


def _backward_fake(tensors: Lists, counts: Sequence[int], scales: Sequence[float], needs: int, *body: Any) -> list[Tensor]:
    groups = (tensors[1:2], tensors[2:3], *cut(tensors, counts, 7))
    dense = [t.new_empty(t.shape) for i, group in enumerate(groups[:2]) if needs >> i & 1 for t in group]
    return dense + [torch.empty_like(t) for i, group in enumerate(groups[2:], 2) if needs >> i & 1 for t in group]


class _Lora(torch.autograd.Function):
    """One call of ``moefuse::experts_lora`` that is differentiated."""

    @staticmethod
    def forward(
        ctx: Any, counts: list[int], scales: list[float], body: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor
    ) -> Tensor:
        with below_autograd():
            out, h, order, offsets, u = ops.experts_lora_forward.default(tensors, counts, scales, *body, out_dtype)
        x, _, weights, *flat = tensors
        ctx.counts, ctx.scales, ctx.body = counts, scales, body
        ctx.save_for_backward(x, weights, h, order, offsets, u, *flat)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return gradients(ctx, grad, ctx.saved_tensors)


def gradients(ctx: Any, grad: Tensor, saved: Sequence[Tensor]) -> tuple[Any, ...]:
    """Of all arguments of the Functions; ``saved``: x, weights, h, order, offsets, u and what is in the lists."""
    need_x, _, need_weights, *need_flat = ctx.needs_input_grad[4:]
    flags = [need_x, need_weights, *(any(part) for part in cut(need_flat, ctx.counts))]
    code = sum(flag << i for i, flag in enumerate(flags))
    computed = ops.experts_lora_backward.default([grad, *saved], ctx.counts, ctx.scales, code, *ctx.body)
    d_x, d_weights, *d_flat = grads_for(flags, (1, 1, *ctx.counts), computed)
    return None, None, None, None, d_x, None, d_weights, *d_flat


def lora_by(function: Any, *data: Any, **options: Any) -> Tensor:
    """A call that ``function`` differentiates; inference where no gradient is wanted."""
    call = LoraCall.of(*data, **options)
    checked(call)
    tensors, counts, scales, *body, dtype = call.pack()
    if wants_grad(tensors):
        return function.apply(counts, scales, tuple(body), dtype, *tensors)  # type: ignore[no-any-return]
    with below_autograd():
        return ops.experts_lora.default(*data, **options)  # type: ignore[no-any-return]


def _autograd(*data: Any, **options: Any) -> Tensor:
    return lora_by(_Lora, *data, **options)


def composite(*data: Any, **options: Any) -> Tensor:
    """The op in torch's operations."""
    call = LoraCall.of(*data, **options)
    checked(call)
    return reference(call)


def reference(call: LoraCall) -> Tensor:
    """What a call means: to each projection its term is added in the accumulation dtype."""
    base, how = call.base, call.base.body
    wide, projections = accumulation_dtype(base.dtype), (base.w_in, base.w_up, base.w_out)

    def project(rows: Tensor, which: int, e: int) -> Tensor:
        weight, bias = projections[which].expert(e)
        out = F.linear(rows, weight.to(base.dtype), None if bias is None else bias.to(base.dtype))
        a, b, scale = call.terms[which]
        if not a:
            return out
        u = scale * F.linear(rows.to(wide), expert_weight(a, e).to(wide))
        return (out.to(wide) + F.linear(u, expert_weight(b, e).to(wide))).to(base.dtype)

    options = how.activation, how.args, how.gating, how.up_first, how.on_input, base.out_dtype
    return experts_by_projections(base.x, base.ids, base.weights, base.w_in.experts, base.w_out.features, project, *options)


def _again(*packed: Any) -> list[Tensor]:
    call = LoraGradCall.unpack(*packed)
    lists = (*lists_of(call.w_in, call.w_up, call.w_out), *(part for term in call.terms for part in term[:2]))
    counts, ids = [*map(len, lists)], ids_of_rows(call.order, call.offsets, call.weights.shape[1])

    def function(x: Tensor, weights: Tensor, *flat: Tensor) -> Tensor:
        found = cut(flat, counts)
        base = ExpertsCall(x, ids, weights, *stacks(found[:6]), call.body, call.grad.dtype)
        return reference(LoraCall(base, terms_of(found[6:], [term.scale for term in call.terms])))

    need_x, need_weights, *need = call.needs
    inputs = [call.x, call.weights, *(t for some in lists for t in some)]
    return pulled_back(function, inputs, [need_x, need_weights, *(n for n, some in zip(need, lists, strict=True) for _ in some)], call.grad)


implement("experts_lora", kernel=kernel, fake=fake, autograd=_autograd, composite=composite)
implement("experts_lora_forward", kernel=_forward, fake=_forward_fake, autograd=not_differentiable("experts_lora_forward"))
implement("experts_lora_backward", kernel=_backward, fake=_backward_fake, autograd=once("experts_lora_backward", _again), composite=_again)
