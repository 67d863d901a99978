"""``moefuse::experts_forward`` and ``experts_backward`` on CUDA: what a differentiated call of ``experts`` runs as.

Saved are the pre-activation in sorted rows and the routing arrays, nothing else (``moefuse/ops/experts.py``). Tokens and the gradient of
the output are gathered while they are loaded. Per slot, backward keeps at most: the gradient of the activation and the activation, of the
pre-activation, and of the token. Rounding is where ``moefuse/runtime/backward.py`` has it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton import grouped_plan as plan
from moefuse.kernels.triton.grouped_plan import Activation, Lists, Sorted, on_device
from moefuse.kernels.triton.tier import supports
from moefuse.ops.reference import count_experts

__all__ = ["experts_backward", "experts_forward", "supports"]


def _how(name: str, args: Sequence[float], gating: str, up_first: bool, inter: int) -> Activation:
    arg0, arg1, *_ = (*args, 0.0, 0.0)
    return Activation(name, (float(arg0), float(arg1)), gating, up_first, inter)


@on_device
def experts_forward(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets) for backward; dead rows of h are zeros."""
    experts, (hidden, inter), features = count_experts(w_in), w_out[0].shape[-2:], w_in[0].shape[-2]
    order, offsets = plan.sort(ids, experts)
    out = torch.empty((x.shape[0], hidden), dtype=out_dtype or x.dtype, device=x.device)
    h = torch.empty((ids.numel(), 2 * features if gating == "separate" else features), dtype=x.dtype, device=x.device)
    if not ids.numel():
        return out.zero_(), h, order, offsets
    it = plan.tiled(Sorted(order, offsets, ids.numel(), experts, ids.shape[1]), x.dtype)
    scale = weights if weight_on_input else None
    if features:
        plan.linear(h[:, :features], x, plan.weight(w_in), it, bias=plan.weight(b_in, 1) if b_in else None, tokens=True, scale=scale)
    if features and gating == "separate":
        plan.linear(h[:, features:], x, plan.weight(w_up), it, bias=plan.weight(b_up, 1) if b_up else None, tokens=True, scale=scale)
    a = torch.empty((ids.numel(), inter), dtype=x.dtype, device=x.device)
    if inter:
        plan.clear_dead(h, it)
        plan.activate(a, h, it, _how(activation, activation_args, gating, up_first, inter))
    y = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    if hidden:
        plan.linear(y, a, plan.weight(w_out), it, bias=plan.weight(b_out, 1) if b_out else None)
        plan.sum_slots(out, y, it, None if weight_on_input else weights)
    return out, h, order, offsets


@on_device
def experts_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    """The gradients that ``needs`` (in the order of ``moefuse.runtime.backward.INPUTS``) asks for, flattened."""
    need_x, need_weights, need_in, need_up, need_out, need_b_in, need_b_up, need_b_out = needs
    slots, inter = order.shape[0], w_out[0].shape[-1]
    it = Sorted(order.contiguous(), offsets.contiguous(), slots, count_experts(w_in), weights.shape[1])
    scale = None if weight_on_input else weights
    d_out, h = grad.to(x.dtype), h.contiguous()
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=x.device) if need_weights else None
    need_rows = need_x or (need_weights and weight_on_input)
    need_h = need_rows or need_in or need_up or need_b_in or need_b_up
    d_h = torch.empty_like(h) if need_h else None
    a = torch.empty((slots, inter), dtype=x.dtype, device=x.device) if need_out else None
    if slots:
        it = plan.tiled(it, x.dtype)
        d_a = None
        if inter and (need_h or need_weights):
            d_a = torch.empty((slots, inter), dtype=x.dtype, device=x.device)
            plan.linear(d_a, d_out, plan.weight(w_out).transposed(), it, tokens=True)
        plan.activate_grads(
            it,
            h,
            d_a,
            _how(activation, activation_args, gating, up_first, inter),
            scale=scale,
            d_h=d_h,
            a=a,
            d_weights=None if weight_on_input else d_weights,
            grad=d_out,
            bias=plan.weight(b_out, 1) if b_out else None,
        )
        del d_a
    d_w_out = plan.weight_grads(w_out, d_out, a, it, g_tokens=True) if a is not None else []
    d_b_out = plan.vector_grads(b_out, d_out, it, tokens=True, scale=scale) if need_b_out else []
    del a
    parts: list[Tensor | None] = [d_h, None]
    if gating == "separate" and d_h is not None:
        parts = [d_h[:, :inter], d_h[:, inter:]]
    scale_in = weights if weight_on_input else None
    found: list[list[Tensor]] = []
    for part, w, need in zip(parts, (w_in, w_up), (need_in, need_up), strict=True):
        found.append(plan.weight_grads(w, part, x, it, x_tokens=True, scale=scale_in) if need and part is not None else [])
    for part, b, need in zip(parts, (b_in, b_up), (need_b_in, need_b_up), strict=True):
        found.append(plan.vector_grads(b, part, it) if need and part is not None else [])
    d_w_in, d_w_up, d_b_in, d_b_up = found
    d_x = _token_grads(x, parts, (w_in, w_up), it, weights, weight_on_input, need_x, d_weights) if need_rows else None
    out = [t for t in (d_x, d_weights) if t is not None]
    return [*out, *d_w_in, *d_w_up, *d_w_out, *d_b_in, *d_b_up, *d_b_out]


def _token_grads(
    x: Tensor,
    parts: Sequence[Tensor | None],
    lists: tuple[Lists, Lists],
    it: Sorted,
    weights: Tensor,
    on_input: bool,
    need_x: bool,
    d_weights: Tensor | None,
) -> Tensor | None:
    """Gradient [T, H] of x if it is wanted, from that of the pre-activation; with the weight on the input, d_weights is filled too."""
    if not (it.slots and x.shape[1]):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    d_rows = torch.empty((it.slots, x.shape[1]), dtype=x.dtype, device=x.device)
    for part, w in zip(parts, lists, strict=True):
        if part is not None:
            plan.linear(d_rows, part, plan.weight(w).transposed(), it, add=part is not parts[0])
    if on_input:
        plan.pair(it, x, d_rows, weights, out=d_rows if need_x else None, d_weights=d_weights, from_rows=True)
    if not need_x:
        return None
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan.sum_slots(d_x, d_rows, it, None)
    return d_x
