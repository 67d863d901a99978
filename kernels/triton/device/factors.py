"""Factors of low-rank terms, as products want them: one tensor, contiguous, in the dtype of the rows."""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import expert_base


@triton.jit
def copy_factors(
    source, out, E, M, N, at,
    scale: tl.constexpr, of: tl.constexpr, TABLE: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out [E, M, N] = scale times the factor of each expert, rounded once; ``of``: the dtype of these.

    PEFT stores B of stacked experts with the expert as the fastest dimension: a block of BE experts reads whole sectors of it.
    """
    wide: tl.constexpr = tl.float64 if of == tl.float64 or out.dtype.element_ty == tl.float64 else tl.float32
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    live = e < E
    base = expert_base(source, tl.where(live, e, 0), at.stride_e, of, TABLE, False)  # [BE]
    inside = m.to(tl.int64)[:, None] * at.stride_n + n.to(tl.int64)[None, :] * at.stride_k  # [BM, BN]
    mask = live[:, None, None] & ((m < M)[:, None] & (n < N)[None, :])[None, :, :]
    v = tl.load(base[:, None, None] + inside[None, :, :], mask=mask, other=0.0).to(wide) * scale  # [BE, BM, BN]
    to = (e.to(tl.int64)[:, None, None] * M + m[None, :, None]) * N + n[None, None, :]
    tl.store(out + to, v.to(out.dtype.element_ty), mask=mask)  # [BE, BM, BN]
