"""``moefuse::experts_forward`` and the parts of its backward on CUDA: what a differentiated call of ``experts`` runs as.

Saved are the pre-activation in sorted rows and the routing arrays, nothing else (``moefuse/ops/experts.py``). Tokens and the gradient of
the output are gathered while they are loaded, or copied for the library's products. The parts and the rounding are those of
``moefuse/runtime/backward.py``; a compiled program frees the pre-activation after the first part and its gradient after the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.host import linear, pointwise, sorted_rows, wgrad
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide.grouped import supports
from moefuse.kernels.triton.provide.products import Library, Own, products
from moefuse.ops.meaning.call import ExpertsCall, Stack
from moefuse.ops.meaning.grad_calls import InCall, OutCall, RowsCall

__all__ = ["experts_backward_in", "experts_backward_out", "experts_backward_rows", "experts_forward", "experts_hidden", "supports"]


@recorded
def experts_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets) for backward; dead rows of h are zeros."""
    x = call.x
    order, offsets = sorted_rows.sort(call.ids, call.w_in.experts)
    out = torch.empty((x.shape[0], call.w_out.features), dtype=call.out_dtype, device=x.device)
    if not call.ids.numel():
        return out.zero_(), torch.empty((0, call.width), dtype=x.dtype, device=x.device), order, offsets
    it = Sorted(order, offsets, call.ids.numel(), call.w_in.experts, call.top_k)
    by, h = first(call, it)
    y = second(call, it, by, h)
    if out.numel():
        sorted_rows.sum_slots(out, y, it, None if call.body.on_input else call.weights)
    return out, h, order, offsets


def first(call: ExpertsCall, it: Sorted, rows: Tensor | None = None) -> tuple[Library | Own, Tensor]:
    """Who computes the products, and h in sorted rows; ``rows`` [S, H]: those of the tokens, where they are sorted."""
    by = products(
        call.x, it, call.body.gating, call.lists[3:], min(call.w_out.features, call.w_out.inputs), call.w_in.weight, call.w_out.weight
    )
    h = _hidden(call, by, it.slots, rows)
    if call.w_out.inputs:
        sorted_rows.clear_dead(h, it)
    return by, h


def second(call: ExpertsCall, it: Sorted, by: Library | Own, h: Tensor) -> Tensor:
    """The output of each slot, in sorted rows."""
    inter = call.w_out.inputs
    a = torch.empty((it.slots, inter), dtype=h.dtype, device=h.device)
    if inter:
        pointwise.activate(a, h, it, Activation(call.body, inter))
    return by.linear(a, *call.w_out[:2])


@recorded
def experts_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor) -> Tensor:
    """h of :func:`experts_forward`, once more, for the slots in the order that it sorted them into."""
    slots = order.shape[0]
    if not slots:
        return torch.empty((0, call.width), dtype=call.x.dtype, device=call.x.device)
    return first(call, Sorted(order, offsets, slots, call.w_in.experts, call.top_k))[1]


def _hidden(call: ExpertsCall, by: Library | Own, slots: int, rows: Tensor | None = None) -> Tensor:
    """The first projection, or both of them side by side; rows that are nobody's are not written."""
    x, features = call.x, call.w_in.features
    how: dict[str, Any] = {"tokens": True, "scale": call.weights if call.body.on_input else None} if rows is None else {}
    source = x if rows is None else rows
    if not call.body.split:
        return by.linear(source, *call.w_in[:2], **how)
    h = torch.empty((slots, call.width), dtype=x.dtype, device=x.device)
    by.linear(source, *call.w_in[:2], **how, out=h[:, :features])
    by.linear(source, *call.w_up[:2], **how, out=h[:, features:])
    return h


@recorded
def experts_backward_rows(call: RowsCall) -> list[Tensor]:
    """Of d_h, a and the gradient of routing weights on the output, what ``call.need`` asks for."""
    grad = call.grad.to(call.h.dtype)
    return rows_back(call, grad, through_last(call, grad, tokens=True))


def through_last(call: RowsCall, grad: Tensor, *, tokens: bool) -> Tensor | None:
    """The gradient [S, I] of what the last projection multiplies, but for routing weights, if it is needed; ``grad``: [T, N], or sorted."""
    if not (call.order.shape[0] and (call.need.h or call.need.products)):
        return None
    w, it = call.w_out, sorted_of(call, call.w_out)
    by = products(call.h, it, call.body.gating, (), min(w.features, w.inputs), w.weight)
    return by.linear(grad, w.weight, back=True, tokens=tokens)


def rows_back(call: RowsCall, grad: Tensor, d_a: Tensor | None) -> list[Tensor]:
    """:func:`experts_backward_rows`, with what :func:`through_last` gave; ``grad`` [T, N] is read for biases alone."""
    need, body, weights, it = call.need, call.body, call.weights, sorted_of(call, call.w_out)
    slots, inter, h, a = it.slots, call.w_out.inputs, call.h.contiguous(), None
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=h.device) if need.products else None
    if need.w_out:
        a = torch.empty((slots, inter), dtype=h.dtype, device=h.device) if d_a is None else d_a
    d_h = torch.empty_like(h) if need.h else None
    if slots:
        pointwise.activate_grads(
            it,
            h,
            d_a,
            Activation(body, inter),
            scale=None if body.on_input else weights,
            d_h=d_h,
            a=a,
            d_weights=d_weights,
            grad=grad,
            bias=linear.weight(call.w_out.bias, 1) if call.w_out.bias else None,
        )
    return [t for t in (d_h, a, d_weights) if t is not None]


@recorded
def experts_backward_in(call: InCall) -> list[Tensor]:
    """What ``call.need`` asks for of the gradients of x, of routing weights on the input, of w_in and w_up and their biases, flattened."""
    x, weights, need, body, it = call.x, call.weights, call.need, call.body, sorted_of(call, call.w_in)
    d_h, features, hidden = call.d_h.contiguous(), call.w_in.features, call.w_in.inputs
    inter = features if body.gating in ("plain", "separate") else features // 2
    by = products(x, it, body.gating, (), min(hidden, inter), call.w_in.weight)
    parts = [d_h[:, :features], d_h[:, features:]] if body.split else [d_h]
    lists = (call.w_in.weight, call.w_up.weight)[: len(parts)]
    d_weights = None
    if need.weights and body.on_input:
        d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=x.device)
    d_x = _token_grads(x, parts, lists, it, by, weights, body.on_input, need.x, d_weights) if need.tokens else None
    scale = weights if body.on_input else None
    matrices = zip(parts, lists, (need.w_in, need.w_up), strict=False)
    d_w = [
        g for part, w, wanted in matrices if wanted for g in by.weight_grads(w, part, x, x_tokens=True, scale=scale, last=not body.split)
    ]
    vectors = zip(parts, (call.w_in.bias, call.w_up.bias), (need.b_in, need.b_up), strict=False)
    d_b = [g for part, b, wanted in vectors if wanted for g in wgrad.vector_grads(b, part, it)]
    return [*(t for t in (d_x, d_weights) if t is not None), *d_w, *d_b]


@recorded
def experts_backward_out(call: OutCall) -> list[Tensor]:
    """What ``call.need`` asks for of the gradients of w_out and of its biases, flattened."""
    need, (w, b, *_), it = call.need, call.w_out, sorted_of(call, call.w_out)
    d_out = call.grad.to(w[0].dtype if call.a is None else call.a.dtype)
    by = products(d_out, it, call.body.gating, (), min(w[0].shape[-2:]), w)
    d_w = by.weight_grads(w, d_out, call.a, g_tokens=True, last=True) if need.w_out and call.a is not None else []
    scale = None if call.body.on_input else call.weights
    return [*d_w, *(wgrad.vector_grads(b, d_out, it, tokens=True, scale=scale) if need.b_out else [])]


def sorted_of(call: RowsCall | InCall | OutCall, stack: Stack) -> Sorted:
    """The rows of a call."""
    order = call.order
    return Sorted(order.contiguous(), call.offsets.contiguous(), order.shape[0], stack.experts, call.weights.shape[1])


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
        pointwise.pair(it, x, d_rows, weights, out=d_rows if need_x else None, d_weights=d_weights, from_rows=True)
    if not need_x:
        return None
    d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sorted_rows.sum_slots(d_x, d_rows, it, None)
    return d_x
