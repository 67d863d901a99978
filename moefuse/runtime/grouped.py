"""The grouped-tier ops on any device, in plain torch: one host read of the offsets where a loop over experts needs it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops.meaning.call import Stack
from moefuse.ops.meaning.reference import accumulation_dtype, expert_vector
from moefuse.runtime.cpu import Lists, back_project, project, sum_slots
from moefuse.runtime.expert_grads import empty_grads, vector_grads, weight_grads
from moefuse.runtime.routing import FEW_SLOTS, groups_of, positions, sort_few, sort_slots


def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moefuse::permute``: rows [S, H] of x [T, H] sorted by ids [T, K], order [S] and offsets [E + 1]."""
    top_k = max(ids.shape[1], 1)
    if x.device.type == "cpu" and ids.numel() + num_experts <= FEW_SLOTS:
        few, ends = sort_few(ids, num_experts)
        rows = torch.tensor([slot // top_k for slot in few], dtype=torch.int64)
        return x.index_select(0, rows), torch.tensor(few, dtype=torch.int64), torch.tensor(ends)
    order, offsets = sort_slots(ids, num_experts)
    return x.index_select(0, order // top_k), order, offsets


def grouped_linear(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    """``moefuse::grouped_linear``: rows xs [S, in], cut by offsets [E + 1], to [S, out]; zeros for rows of no expert."""
    ends = offsets.tolist()
    out = xs.new_empty((xs.shape[0], w[0].shape[-2]))
    out[ends[-1] :].zero_()
    groups = groups_of(ends)
    if groups:
        project(out, xs, Stack(w, b), groups)
    return out


def grouped_linear_backward(grad: Tensor, xs: Tensor, offsets: Tensor, w: Lists, b: Lists, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of xs [S, in], w, b that ``needs`` asks for, flattened in that order, from grad [S, out]."""
    ends = offsets.tolist()
    groups = groups_of(ends)
    out: list[Tensor] = []
    grad = grad.contiguous()
    if needs[0]:
        d_xs = torch.empty(xs.shape, dtype=xs.dtype, device=xs.device)
        d_xs[ends[-1] :].zero_()
        if groups:
            back_project(d_xs, grad, w, groups)
        out.append(d_xs)
    if needs[1]:
        d_w = empty_grads(w, groups, 2)
        if groups:
            weight_grads(d_w, grad, xs, groups)
        out += d_w
    if needs[2]:
        out += _sums(grad, b, ends)
    return out


def expert_rows(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    """``moefuse::expert_rows``: the vector [n] of each row's expert, [num_rows, n]; zeros for rows of none."""
    out = v[0].new_empty((num_rows, v[0].shape[-1]))
    ends = offsets.tolist()
    out[min(ends[-1], num_rows) :].zero_()
    for e, start, end in groups_of(ends):
        vector = expert_vector(v, e)
        assert vector is not None
        out[start:end] = vector
    return out


def expert_rows_backward(grad: Tensor, v: Lists, offsets: Tensor) -> list[Tensor]:
    """Gradient of v: the sum of each expert's rows of grad [S, n]."""
    return _sums(grad, v, offsets.tolist())


def _sums(grad: Tensor, v: Lists, ends: list[int]) -> list[Tensor]:
    groups = groups_of(ends)
    out = empty_grads(v, groups, 1)
    if groups:
        vector_grads(out, grad, groups)
    return out


def combine(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    """``moefuse::combine``: rows ys [S, H], times weights [T, K] if given, to [T, H]; no host synchronisation."""
    wide = accumulation_dtype(ys.dtype)
    position = positions(order)
    if offsets.device.type == "cpu" and int(offsets[-1]) == order.shape[0]:
        return sum_slots(ys, position, None if weights is None else weights.to(wide), top_k).to(out_dtype or ys.dtype)
    position = position.view(-1, top_k)
    dead = position >= offsets[-1]
    out = torch.zeros((position.shape[0], ys.shape[1]), dtype=wide, device=ys.device)
    scale = None if weights is None else weights.to(wide)
    for k in range(top_k):
        rows = ys.index_select(0, position[:, k]).to(wide)
        if scale is not None:
            rows = rows * scale[:, k : k + 1]
        out += rows.masked_fill(dead[:, k : k + 1], 0)
    return out.to(out_dtype or ys.dtype)


def combine_backward(
    grad: Tensor, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of ys [S, H] and weights [T, K] that ``needs`` asks for, from grad [T, H]."""
    wide = accumulation_dtype(ys.dtype)
    every = offsets.device.type == "cpu" and int(offsets[-1]) == order.shape[0]
    dead = None if every else (torch.arange(order.shape[0], device=ys.device) >= offsets[-1])[:, None]
    d_out = grad.index_select(0, order // top_k).to(wide)
    out: list[Tensor] = []
    if needs[0]:
        scaled = d_out if weights is None else d_out * weights.reshape(-1)[order, None].to(wide)
        out.append((scaled if dead is None else scaled.masked_fill(dead, 0)).to(ys.dtype))
    if needs[1] and weights is not None:
        product = (d_out * ys.to(wide)).sum(-1)
        product = product if dead is None else product.masked_fill(dead[:, 0], 0)
        by_slot = torch.empty_like(product)
        by_slot[order] = product
        out.append(by_slot.view(weights.shape).to(weights.dtype))
    return out
