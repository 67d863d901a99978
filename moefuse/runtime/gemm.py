"""One GEMM into a given output, the way that is quickest for its dtype and shape on the CPU.

A CPU without 16-bit float instructions runs 16-bit GEMMs several times slower than float32 ones. There, operands are widened tile by tile
into a scratch of at most :data:`TILE` elements and multiplied in float32: the same accumulation, one rounding at the end.

Weights that are held in float32 are rounded to 16 bits in such tiles, or one expert's at a time; their gradients are not rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 1 << 17
"""Elements of the weight widened at a time (512 KiB of float32, so it stays in the second-level cache)."""
MIN_ROWS = {torch.bfloat16: 4, torch.float16: 3}
"""From this many rows on, widening the weight costs less than it saves."""
MV_ELEMENTS = 1 << 20
"""From this many weight elements on, one bfloat16 row goes through mv, which reads the weight at memory speed."""


def _native(names: tuple[str, ...]) -> bool:
    return any(bool(getattr(torch.cpu, name)()) for name in names if hasattr(torch.cpu, name))


def _widened_dtypes() -> frozenset[torch.dtype]:
    """The 16-bit dtypes for which this x86 CPU has no GEMM instructions; empty on other CPUs."""
    if not torch.backends.cpu.get_cpu_capability().startswith(("AVX", "DEFAULT")) or not torch.backends.mkl.is_available():
        return frozenset()
    missing = set()
    if not _native(("_is_avx512_bf16_supported", "_is_amx_tile_supported")):
        missing.add(torch.bfloat16)
    if not _native(("_is_amx_fp16_supported",)):
        missing.add(torch.float16)
    return frozenset(missing)


WIDENED = _widened_dtypes()


def mm_into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out [m, n] = a [m, k] @ b [k, n] (+ bias [n]), accumulated in at least float32 and rounded to the dtype of out.

    b and bias are rounded to the dtype of a, if theirs is wider.
    """
    if out.dtype != a.dtype:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
        return
    if a.dtype in WIDENED and a.device.type == "cpu":
        if a.shape[0] >= MIN_ROWS[a.dtype]:
            _widened(out, a, b, bias)
            return
        if a.shape[0] == 1 and a.dtype == b.dtype == torch.bfloat16 and b.numel() >= MV_ELEMENTS:
            torch.mv(b.t(), a[0], out=out[0])
            if bias is not None:
                out.add_(bias)
            return
    if bias is None:
        torch.mm(a, b.to(a.dtype), out=out)
    else:
        torch.addmm(bias.to(a.dtype), a, b.to(a.dtype), out=out)


def _widened(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    """The product in float32, a band of b's columns at a time."""
    wide = a.float()
    step = max(16, TILE // max(b.shape[0], 1))
    for start in range(0, b.shape[1], step):
        band = slice(start, start + step)
        tile = b[:, band].to(a.dtype).float()
        out[:, band] = torch.mm(wide, tile) if bias is None else torch.addmm(bias[band].to(a.dtype).float(), wide, tile)
