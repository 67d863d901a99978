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
from moefuse.kernels.triton.products import Library, Own, products
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
    slots, width = ids.numel(), 2 * features if gating == "separate" else features
    order, offsets = plan.sort(ids, experts)
    out = torch.empty((x.shape[0], hidden), dtype=out_dtype or x.dtype, device=x.device)
    if not slots:
        return out.zero_(), torch.empty((0, width), dtype=x.dtype, device=x.device), order, offsets
    it = Sorted(order, offsets, slots, experts, ids.shape[1])
    by = products(x, it, gating, (b_in, b_up, b_out), w_in, w_out)
    scale = weights if weight_on_input else None
    if gating == "separate":
        h = torch.empty((slots, width), dtype=x.dtype, device=x.device)
        by.linear(x, w_in, b_in, tokens=True, scale=scale, out=h[:, :features])
        by.linear(x, w_up, b_up, tokens=True, scale=scale, out=h[:, features:])
    else:
        h = by.linear(x, w_in, b_in, tokens=True, scale=scale)
    a = torch.empty((slots, inter), dtype=x.dtype, device=x.device)
    if inter:
        plan.clear_dead(h, it)
        plan.activate(a, h, it, _how(activation, activation_args, gating, up_first, inter))
    y = by.linear(a, w_out, b_out)
    if hidden:
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
    by = products(x, it, gating, (), w_in, w_out)  # no product here has a bias
    scale, scale_in = (None, weights) if weight_on_input else (weights, None)
    d_out, h = grad.to(x.dtype), h.contiguous()
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=x.device) if need_weights else None
    need_rows = need_x or (need_weights and weight_on_input)
    need_h = need_rows or need_in or need_up or need_b_in or need_b_up
    d_h = torch.empty_like(h) if need_h else None
    a = None if slots or not need_out else torch.empty((0, inter), dtype=x.dtype, device=x.device)
    if slots:
        d_a = by.linear(d_out, w_out, back=True, tokens=True) if need_h or need_weights else None
        if need_out:
            a = torch.empty((slots, inter), dtype=x.dtype, device=x.device) if d_a is None else d_a
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
    d_w_out = by.weight_grads(w_out, d_out, a, g_tokens=True) if a is not None else []
    d_b_out = plan.vector_grads(b_out, d_out, it, tokens=True, scale=scale) if need_b_out else []
    del a
    parts: list[Tensor] = []
    if d_h is not None:
        parts = [d_h[:, :inter], d_h[:, inter:]] if gating == "separate" else [d_h]
    lists = (w_in, w_up)[: len(parts)]
    wanted = zip(parts, lists, (need_in, need_up), strict=False)
    d_w_in = [g for part, w, need in wanted if need for g in by.weight_grads(w, part, x, x_tokens=True, scale=scale_in)]
    pairs = zip(parts, (b_in, b_up), (need_b_in, need_b_up), strict=False)
    d_b_in = [g for part, b, need in pairs if need for g in plan.vector_grads(b, part, it)]
    d_x = _token_grads(x, parts, lists, it, by, weights, weight_on_input, need_x, d_weights) if need_rows else None
    out = [t for t in (d_x, d_weights) if t is not None]
    return [*out, *d_w_in, *d_w_out, *d_b_in, *d_b_out]


def _token_grads(
    x: Tensor,
    parts: Sequence[Tensor],
    lists: Sequence[Lists],
    it: Sorted,
    by: Own | Library,
    weights: Tensor,
    on_input: bool,
    need_x: bool,
    d_weights: Tensor | None,
) -> Tensor | None:
    """Gradient [T, H] of x if it is wanted, from that of the pre-activation; with the weight on the input, d_weights is filled too."""
    if not (it.slots and x.shape[1]):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need_x else None
    d_rows = by.linear(parts[0], lists[0], back=True)
    for part, w in zip(parts[1:], lists[1:], strict=True):
        by.linear(part, w, back=True, out=d_rows, add=True)
    if on_input:
        plan.pair(it, x, d_rows, weights, out=d_rows if need_x else None, d_weights=d_weights, from_rows=True)
    if not need_x:
        return None
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    plan.sum_slots(d_x, d_rows, it, None)
    return d_x
