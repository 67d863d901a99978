"""Factors of low-rank terms before and after the products: copies in the dtype of the rows, and gradients in their own."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.device import factors
from moefuse.kernels.triton.device.structs import Experts
from moefuse.kernels.triton.host import wgrad
from moefuse.kernels.triton.host.layout import Device, device_of, in_triton
from moefuse.kernels.triton.host.linear import weight
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted, fit, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.ops.meaning.reference import accumulation_dtype, count_experts
from moefuse.tuning.problem import Tiles, power_of_two

ELEMENTS = 2048
"""Elements that one program copies."""


def copied(factor: Lists, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """[E, m, n] contiguous: the factors of all experts times ``scale``, rounded once; themselves where they are that already."""
    first = factor[0]
    if len(factor) == 1 and first.dim() == 3 and first.dtype == dtype and scale == 1.0 and first.is_contiguous():
        return first
    source = weight(factor)
    (m, n), experts = first.shape[-2:], count_experts(factor)
    out = torch.empty((experts, m, n), dtype=dtype, device=first.device)
    if not out.numel():
        return out
    stride_e, _, stride_n = source.strides
    be = min(power_of_two(experts), 16) if stride_e == 1 and stride_n > 1 else 1
    bn = min(power_of_two(n), ELEMENTS // be)
    bm = min(power_of_two(m), ELEMENTS // (be * bn))
    launch(
        factors.copy_factors,
        (-(-experts // be), -(-m // bm), -(-n // bn)),
        {"source": source.pointer, "out": out},
        E=experts,
        M=m,
        N=n,
        at=Experts(*source.strides),
        scale=scale,
        of=in_triton(first.dtype),
        TABLE=source.operand.table,
        BE=be,
        BM=bm,
        BN=bn,
    )
    return out


def sizes(rank: int, aligned: bool, dtype: torch.dtype, device: Device) -> tuple[int, Tiles]:
    """(BN, tiles) of ``wgrad.weight_grads`` where x has few features: reading the wide rows is all there is to do."""
    if dtype == torch.float64:
        return 16, Tiles(16, 16, 8, 1)
    bk = min(max(power_of_two(rank), 16), 64)
    if dtype == torch.float32:
        return 64, fit(Tiles(bk, 32, 4, 2), 64, 4, device)
    if not device.hopper:
        return 64, fit(Tiles(bk, 32, 8, 3, 8), 64, 2, device)
    return 128, fit(Tiles(bk, 64 if aligned else 32, 8, 3, 8), 128, 2, device)


def grads(
    factor: Lists, wide: Tensor, narrow: Tensor, it: Sorted, *, transposed: bool = False, tokens: bool = False, scale: Tensor | None = None
) -> list[Tensor]:
    """Gradients of the factors [n, r] of one term: the sum over an expert's rows of wide^T [n, rows] narrow [rows, r].

    ``transposed``: of factors [r, n]. ``tokens``: wide is [T, n]. ``scale``: narrow times the routing weight of its slot. ``narrow`` may be
    in float32 beside rows of 16 bits. Sums are in float32 (float64), and rounded only to the dtype of the factors.
    """
    dtype, sum_dtype = factor[0].dtype, accumulation_dtype(wide.dtype)
    known = dtype in (wide.dtype, sum_dtype)
    like = factor if known else [torch.empty_like(t, dtype=sum_dtype) for t in factor]
    made, target, instead = wgrad.new_grads(like, 2)
    target = target.transposed() if transposed else target
    bn, part = sizes(narrow.shape[1], whole(wide.element_size(), wide.shape[1]), wide.dtype, device_of(wide.device))
    wgrad.sums(target, like[0].dtype != wide.dtype, wide, narrow, it, bn, part, g_tokens=tokens, scale=scale)
    found = wgrad.spread(made, instead)
    return found if known else [g.to(dtype) for g in found]
