"""Factors of low-rank terms before and after the products: copies in the dtype of the rows, and gradients in their own."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device import factors, wgrad
from moefuse.kernels.triton.device.structs import Experts, Rows, Stored
from moefuse.kernels.triton.host.layout import Device, device_of, precision_of
from moefuse.kernels.triton.host.linear import weight
from moefuse.kernels.triton.host.sorted_rows import Lists, Sorted, fit, rows_of, whole
from moefuse.kernels.triton.host.wgrad import new_grads, spread
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.problem import Tiles, power_of_two

ELEMENTS = 2048
"""Of a block that one program copies."""


def copied(factor: Lists, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """[E, m, n] contiguous: the factors of all experts times ``scale``, rounded once; themselves where they are that already."""
    first = factor[0]
    if len(factor) == 1 and first.dim() == 3 and first.dtype == dtype and scale == 1.0 and first.is_contiguous():
        return first
    source = weight(factor)
    (m, n), experts = first.shape[-2:], len(factor) if len(factor) > 1 or first.dim() == 2 else first.shape[0]
    out = torch.empty((experts, m, n), dtype=dtype, device=first.device)
    if not out.numel():
        return out
    stride_e, _, stride_n = source.strides
    be = min(max(power_of_two(experts), 1), 16) if stride_e == 1 and stride_n > 1 else 1
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
        of=getattr(tl, str(first.dtype).removeprefix("torch.")),
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
    dtype = factor[0].dtype
    known = dtype in (wide.dtype, torch.float32) and not (dtype == torch.float32 and wide.dtype == torch.float64)
    like = factor if known else [torch.empty_like(t, dtype=_sums(wide.dtype)) for t in factor]
    made, target, instead = new_grads(like, 2)
    target = target.transposed() if transposed else target
    n, rank, device = wide.shape[1], narrow.shape[1], device_of(wide.device)
    bn, part = sizes(rank, whole(wide.element_size(), n), wide.dtype, device)
    if n and rank:
        launch(
            wgrad.weight_grads,
            (it.experts * -(-n // bn) * -(-rank // part.bn),),
            {
                "g": wide, "x": narrow, "weights": narrow if scale is None else scale, "order": it.order, "offsets": it.offsets,
                "d_w": target.pointer,
            },
            warps=part.warps,
            stages=part.stages,
            top_k=it.top_k,
            N=n,
            K=rank,
            at_g=Rows(*wide.stride()),
            at_x=Rows(*narrow.stride()),
            at_weights=rows_of(scale),
            at_d=Experts(*target.strides),
            GATHER_G=tokens,
            GATHER_X=False,
            SCALE=scale is not None,
            stored=Stored(target.operand.table, target.operand.aligned, target.operand.wide, HELD=like[0].dtype != wide.dtype),
            BN=bn,
            BK=part.bn,
            BR=part.bk,
            GROUP=part.group,
            PRECISION=precision_of(wide.dtype),
        )  # fmt: skip
    found = spread(made, instead)
    return found if known else [g.to(dtype) for g in found]


def _sums(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
