"""``moefuse::router_logits`` on CUDA. Few tokens: a program sums one logit or a few, so that a small weight is read by many programs at
once; a library's kernel for so little work takes longer than the choice behind it. More tokens: the library multiplies 16-bit numbers into
float32 where the program casts both factors first, so neither is copied.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.launch.calls import launch, launch_traced
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide.router import DTYPES
from moefuse.ops.meaning.recipe import few_rows
from moefuse.ops.meaning.reference import router_logits_reference
from moefuse.tuning.problem import power_of_two

_EXPERTS = 2
"""Logits of a program."""


@triton.jit
def few_logits(
    x, w, bias, out, E, H, stride_xt, stride_xh, stride_we, stride_wh, stride_b, BIAS: tl.constexpr, BE: tl.constexpr, BH: tl.constexpr
):
    """out [T, E] = x [T, H] times w [E, H] transposed, plus bias [E], in float32; program (block of BE experts, token)."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    t = tl.program_id(1).to(tl.int64)
    rows = w + e.to(tl.int64)[:, None] * stride_we
    total = tl.zeros([BE, BH], tl.float32)
    for first in range(0, H, BH):
        h = first + tl.arange(0, BH)
        wide = h.to(tl.int64)
        a = tl.load(x + t * stride_xt + wide * stride_xh, mask=h < H, other=0.0).to(tl.float32)  # [BH]
        inside = (e < E)[:, None] & (h < H)[None, :]
        b = tl.load(rows + wide[None, :] * stride_wh, mask=inside, other=0.0).to(tl.float32)  # [BE, BH]
        total += a[None, :] * b
    v = tl.sum(total, 1)
    if BIAS:
        v += tl.load(bias + e.to(tl.int64) * stride_b, mask=e < E, other=0.0).to(tl.float32)  # [BE]
    tl.store(out + t * E + e, v.to(out.dtype.element_ty), mask=e < E)


def supports(x: Tensor, w: Tensor, *rest: Any) -> str | None:
    """None, or why there is no kernel for these dtypes."""
    other = next((t.dtype for t in (x, w) if t.dtype not in DTYPES), None)
    return None if other is None else f"no kernel for {other}"


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _arguments(x: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> tuple[tuple[int, ...], dict[str, Tensor], dict[str, Any]]:
    """Grid, arrays, and the rest with the number of warps, for x [T, H]."""
    experts, hidden = w.shape
    block = min(power_of_two(hidden), 2048 if x.shape[0] <= 4 else 1024)
    (xt, xh), (we, wh) = x.stride(), w.stride()
    strides = {"stride_xt": xt, "stride_xh": xh, "stride_we": we, "stride_wh": wh, "stride_b": 0 if bias is None else bias.stride(0)}
    rest = {"E": experts, "H": hidden, **strides, "BIAS": bias is not None, "BE": _EXPERTS, "BH": block, "warps": max(block // 256, 1)}
    return (-(-experts // _EXPERTS), x.shape[0]), {"x": x, "w": w, "bias": x if bias is None else bias, "out": out}, rest


@recorded
def router_logits(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``moefuse::router_logits``."""
    if not few_rows(x, w):
        return _many(x, w, bias, out_dtype)
    out = torch.empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel():
        grid, arrays, rest = _arguments(_rows(x), w, bias, out)
        launch(few_logits, grid, arrays, **rest)
    return out


def _many(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """The same by the library."""
    if x.dtype != w.dtype or x.dtype == torch.float32 or torch.version.hip:  # no product of 16 bits into 32 there
        return router_logits_reference(x, w, bias, out_dtype)
    rows = _rows(x)
    sums = torch.mm(rows, w.t(), out_dtype=torch.float32) if out_dtype == torch.float32 or bias is not None else torch.mm(rows, w.t())
    if bias is not None:
        sums = sums + bias
    return sums.to(out_dtype).view(*x.shape[:-1], w.shape[0])


def router_logits_traced(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``moefuse::router_logits`` in a graph, where Inductor may lay out anew whatever is not dense."""
    if not few_rows(x, w):
        return _many(x, w, bias, out_dtype)
    out = torch.empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype, device=x.device)
    if out.numel():
        rows = _rows(x.contiguous())
        turned = not w.is_contiguous() and w.t().is_contiguous()
        weight = w.t() if turned else w.contiguous()
        grid, arrays, rest = _arguments(rows, weight.t() if turned else weight, None if bias is None else bias.contiguous(), out)
        launch_traced(few_logits, grid, arrays | {"w": weight}, **rest)
    return out


__all__ = ["router_logits", "router_logits_traced", "supports"]
