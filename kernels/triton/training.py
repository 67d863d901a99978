"""``moefuse::experts_forward`` and the parts of its backward on CUDA: what a differentiated call of ``experts`` runs as.

Saved are the pre-activation in sorted rows and the routing arrays, nothing else (``moefuse/ops/experts.py``). Tokens and the gradient of
the output are gathered while they are loaded, or copied for the library's products. The parts and the rounding are those of
``moefuse/runtime/backward.py``; a compiled program frees the pre-activation after the first part and its gradient after the second.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton import grouped_plan as plan
from moefuse.kernels.triton import wgrad_plan
from moefuse.kernels.triton.grouped_plan import Activation, Lists, Sorted
from moefuse.kernels.triton.launch.calls import on_device
from moefuse.kernels.triton.products import Library, Own, products
from moefuse.kernels.triton.tier import supports
from moefuse.ops.body import Needs
from moefuse.ops.reference import count_experts

__all__ = ["experts_backward_in", "experts_backward_out", "experts_backward_rows", "experts_forward", "supports"]


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
    by = products(x, it, gating, (b_in, b_up, b_out), min(hidden, inter), w_in, w_out)
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
def experts_backward_rows(
    grad: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_out: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    """Of d_h, a and the gradient of routing weights on the output, what ``needs`` (``moefuse.ops.body.Needs``) asks for."""
    need, slots, inter = Needs.of(needs, weight_on_input), order.shape[0], w_out[0].shape[-1]
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=h.device) if need.products else None
    h, d_out, d_a, a = h.contiguous(), grad.to(h.dtype), None, None
    it = _sorted(order, offsets, w_out, weights)
    if slots and (need.h or need.products):
        d_a = products(h, it, gating, (), min(grad.shape[1], inter), w_out).linear(d_out, w_out, back=True, tokens=True)
    if need.w_out:
        a = torch.empty((slots, inter), dtype=h.dtype, device=h.device) if d_a is None else d_a
    d_h = torch.empty_like(h) if need.h else None
    if slots:
        plan.activate_grads(
            it,
            h,
            d_a,
            _how(activation, activation_args, gating, up_first, inter),
            scale=None if weight_on_input else weights,
            d_h=d_h,
            a=a,
            d_weights=d_weights,
            grad=d_out,
            bias=plan.weight(b_out, 1) if b_out else None,
        )
    return [t for t in (d_h, a, d_weights) if t is not None]


@on_device
def experts_backward_in(
    x: Tensor,
    weights: Tensor,
    d_h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_in: Lists,
    w_up: Lists,
    b_in: Lists,
    b_up: Lists,
    needs: Sequence[bool],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    """What ``needs`` asks for of the gradients of x, of routing weights on the input, of w_in, w_up, b_in and b_up, flattened."""
    need, it = Needs.of(needs, weight_on_input), _sorted(order, offsets, w_in, weights)
    d_h, features, hidden = d_h.contiguous(), *w_in[0].shape[-2:]
    inter = features if gating in ("plain", "separate") else features // 2
    by = products(x, it, gating, (), min(hidden, inter), w_in)
    parts = [d_h[:, :features], d_h[:, features:]] if gating == "separate" else [d_h]
    lists = (w_in, w_up)[: len(parts)]
    d_weights = None
    if need.weights and weight_on_input:
        d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=x.device)
    d_x = _token_grads(x, parts, lists, it, by, weights, weight_on_input, need.x, d_weights) if need.tokens else None
    scale = weights if weight_on_input else None
    matrices = zip(parts, lists, (need.w_in, need.w_up), strict=False)
    d_w = [g for part, w, wanted in matrices if wanted for g in by.weight_grads(w, part, x, x_tokens=True, scale=scale)]
    vectors = zip(parts, (b_in, b_up), (need.b_in, need.b_up), strict=False)
    d_b = [g for part, b, wanted in vectors if wanted for g in wgrad_plan.vector_grads(b, part, it)]
    return [*(t for t in (d_x, d_weights) if t is not None), *d_w, *d_b]


@on_device
def experts_backward_out(
    grad: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    a: Lists,
    w_out: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    """What ``needs`` asks for of the gradients of w_out and b_out, flattened. ``a`` is one tensor, or none if only b_out's is wanted."""
    need, it = Needs.of(needs, weight_on_input), _sorted(order, offsets, w_out, weights)
    d_out = grad.to(w_out[0].dtype)
    by = products(d_out, it, gating, (), min(w_out[0].shape[-2:]), w_out)
    d_w = by.weight_grads(w_out, d_out, a[0], g_tokens=True) if need.w_out else []
    d_b = wgrad_plan.vector_grads(b_out, d_out, it, tokens=True, scale=None if weight_on_input else weights) if need.b_out else []
    return [*d_w, *d_b]


def _sorted(order: Tensor, offsets: Tensor, w: Lists, weights: Tensor) -> Sorted:
    return Sorted(order.contiguous(), offsets.contiguous(), order.shape[0], count_experts(w), weights.shape[1])


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
