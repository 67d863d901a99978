"""The grouped-tier ops on CUDA: ``permute``, ``grouped_linear``, ``expert_rows``, ``combine`` and their gradients.

Nothing waits for the device and nothing but values depends on the routing, as ``docs/design/gpu-kernels.md`` explains for ``experts``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.device import rows
from moefuse.kernels.triton.device.structs import Rows
from moefuse.kernels.triton.host import linear, pointwise, sorted_rows, wgrad
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.host.sorted_rows import Lists
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.call import first_tensor


def supports(first: Any, *rest: object) -> str | None:
    """None, or why no kernel takes a call whose first tensor is this one; all of a call have its device, and its dtype or another float."""
    dtype = first_tensor(first).dtype
    return None if dtype in DTYPES else f"no kernel for {dtype}"


@recorded
def permute(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """``moefuse::permute``."""
    order, offsets = sorted_rows.sort(ids, num_experts)
    xs = torch.empty((order.shape[0], x.shape[1]), dtype=x.dtype, device=x.device)
    if xs.numel():
        sorted_rows.gather(xs, x, sorted_rows.given(offsets, order.shape[0], order, ids.shape[1]))
    return xs, order, offsets


@recorded
def grouped_linear(xs: Tensor, offsets: Tensor, w: Lists, b: Lists) -> Tensor:
    """``moefuse::grouped_linear``."""
    out = torch.empty((xs.shape[0], w[0].shape[-2]), dtype=xs.dtype, device=xs.device)
    if out.numel():
        it = sorted_rows.tiled(sorted_rows.given(offsets, xs.shape[0]), xs.dtype)
        linear.linear(out, xs, linear.weight(w), it, bias=linear.weight(b, 1) if b else None)
        sorted_rows.clear_dead(out, it)
    return out


@recorded
def grouped_linear_backward(grad: Tensor, xs: Tensor, offsets: Tensor, w: Lists, b: Lists, needs: Sequence[bool]) -> list[Tensor]:
    """Gradients of xs, w, b that ``needs`` asks for, flattened in that order."""
    it = sorted_rows.given(offsets, xs.shape[0])
    out: list[Tensor] = []
    if needs[0]:
        d_xs = torch.empty(xs.shape, dtype=xs.dtype, device=xs.device)
        if d_xs.numel():
            it = sorted_rows.tiled(it, xs.dtype)
            linear.linear(d_xs, grad, linear.weight(w).transposed(), it)
            sorted_rows.clear_dead(d_xs, it)
        out.append(d_xs)
    if needs[1]:
        out += wgrad.weight_grads(w, grad, xs, it)
    if needs[2]:
        out += wgrad.vector_grads(b, grad, it)
    return out


@recorded
def expert_rows(v: Lists, offsets: Tensor, num_rows: int) -> Tensor:
    """``moefuse::expert_rows``."""
    n = v[0].shape[-1]
    out = torch.empty((num_rows, n), dtype=v[0].dtype, device=v[0].device)
    if out.numel():
        it, source = sorted_rows.given(offsets, num_rows), linear.weight(v, 1)
        br, bn = sorted_rows.blocks(n)
        launch(
            rows.vector_rows,
            (-(-num_rows // br), -(-n // bn)),
            {"v": source.pointer, "offsets": it.offsets, "out": out},
            S=num_rows,
            E=it.experts,
            N=n,
            at_v=Rows(*source.strides),
            TABLE=source.operand.table,
            BE=sorted_rows.bins(it.experts),
            BR=br,
            BN=bn,
        )
    return out


@recorded
def expert_rows_backward(grad: Tensor, v: Lists, offsets: Tensor) -> list[Tensor]:
    """Gradient of v: the sum of each expert's rows."""
    return wgrad.vector_grads(v, grad, sorted_rows.given(offsets, grad.shape[0]))


@recorded
def combine(ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, out_dtype: torch.dtype | None) -> Tensor:
    """``moefuse::combine``."""
    out = torch.empty((ys.shape[0] // top_k, ys.shape[1]), dtype=out_dtype or ys.dtype, device=ys.device)
    if out.numel():
        sorted_rows.sum_slots(out, ys, sorted_rows.given(offsets, ys.shape[0], order, top_k), weights)
    return out


@recorded
def combine_backward(
    grad: Tensor, ys: Tensor, weights: Tensor | None, order: Tensor, offsets: Tensor, top_k: int, needs: Sequence[bool]
) -> list[Tensor]:
    """Gradients of ys and weights that ``needs`` asks for."""
    d_ys = torch.empty(ys.shape, dtype=ys.dtype, device=ys.device) if needs[0] else None
    d_weights = None
    if needs[1] and weights is not None:
        d_weights = torch.empty(weights.shape, dtype=weights.dtype, device=ys.device)
    if ys.shape[0]:
        pointwise.pair(sorted_rows.given(offsets, ys.shape[0], order, top_k), grad, ys, weights, out=d_ys, d_weights=d_weights)
    return [t for t in (d_ys, d_weights) if t is not None]
