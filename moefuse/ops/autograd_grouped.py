"""Gradients of the grouped-tier ops. The gradient of permute is a combine; the others have a backward op of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import below_autograd, grads_for, ops, wants_grad

Lists = Sequence[Tensor]


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        with below_autograd():
            xs, order, offsets = ops.permute.default(x, ids, num_experts)
        ctx.mark_non_differentiable(order, offsets)
        ctx.top_k = ids.shape[1]
        ctx.shape = x.shape
        ctx.save_for_backward(order, offsets)
        return xs, order, offsets

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        order, offsets = ctx.saved_tensors
        if ctx.top_k == 0:
            return grad.new_zeros(ctx.shape), None, None
        # Unlike combine, permute copies tokens to the rows of invalid slots too, so those rows count in its gradient.
        every_slot = torch.full_like(offsets, order.shape[0])
        return ops.combine.default(grad, None, order, every_slot, ctx.top_k, None), None, None


def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Autograd entry of ``moefuse::permute``: rows [S, H], order [S] and offsets [E + 1] of x [T, H] and ids [T, K]."""
    if wants_grad((x,)):
        return _Permute.apply(x, ids, num_experts)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.permute.default(x, ids, num_experts)  # type: ignore[no-any-return]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: tuple[int, int], xs: Tensor, offsets: Tensor, *flat: Tensor) -> Tensor:
        ctx.lengths = lengths
        ctx.save_for_backward(xs, offsets, *flat)
        with below_autograd():
            return ops.grouped_linear.default(xs, offsets, flat[: lengths[0]], flat[lengths[0] :])  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        xs, offsets, *flat = ctx.saved_tensors
        count = ctx.lengths[0]
        _, need_xs, _, *need_flat = ctx.needs_input_grad
        needs = [need_xs, any(need_flat[:count]), any(need_flat[count:])]
        computed = ops.grouped_linear_backward.default(grad, xs, offsets, flat[:count], flat[count:], needs)
        d_xs, *d_flat = grads_for(needs, (1, *ctx.lengths), computed)
        return None, d_xs, None, *d_flat


def grouped_linear(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    """Autograd entry of ``moefuse::grouped_linear``: xs [S, in] to [S, out]."""
    if wants_grad((xs, *w, *b)):
        return _GroupedLinear.apply((len(w), len(b)), xs, offsets, *w, *b)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.grouped_linear.default(xs, offsets, w, b)  # type: ignore[no-any-return]


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, offsets: Tensor, num_rows: int, *v: Tensor) -> Tensor:
        ctx.save_for_backward(offsets, *v)
        with below_autograd():
            return ops.expert_rows.default(v, offsets, num_rows)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        offsets, *v = ctx.saved_tensors
        return None, None, *ops.expert_rows_backward.default(grad, v, offsets)


def expert_rows(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    """Autograd entry of ``moefuse::expert_rows``: [num_rows, n]."""
    if wants_grad(v):
        return _ExpertRows.apply(offsets, num_rows, *v)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.expert_rows.default(v, offsets, num_rows)  # type: ignore[no-any-return]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None
    ) -> Tensor:
        ctx.top_k = top_k
        ctx.save_for_backward(ys, weights, order, offsets)
        with below_autograd():
            return ops.combine.default(ys, weights, order, offsets, top_k, out_dtype)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ys, weights, order, offsets = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:2])
        d_ys, d_weights = grads_for(needs, (1, 1), ops.combine_backward.default(grad, ys, weights, order, offsets, ctx.top_k, needs))
        return d_ys, d_weights, None, None, None, None


def combine(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    """Autograd entry of ``moefuse::combine``: ys [S, H] to [T, H]."""
    if wants_grad((ys, weights)):
        return _Combine.apply(ys, weights, order, offsets, top_k, out_dtype)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.combine.default(ys, weights, order, offsets, top_k, out_dtype)  # type: ignore[no-any-return]
