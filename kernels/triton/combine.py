"""The weighted sum over the slots of a token: a gather, in slot order, without atomics."""

import triton
import triton.language as tl

from moefuse.kernels.triton.functions import after_previous, let_next_start


@triton.jit
def combine_slots(
    y,
    ids,
    weights,
    out,
    top_k,
    E,
    N,
    stride_it,
    stride_ik,
    stride_rt,
    stride_rk,
    SCALE: tl.constexpr,
    EVEN_N: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = sum over k of weights[t, k] * y[t*K + k], slot 0 first; y [S, N] in slot order. Rows of invalid ids are not read.

    SCALE: the routing weight goes on the output.
    """
    after_previous(PDL)
    let_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for k in range(0, top_k):
        e = tl.load(ids + t * stride_it + k * stride_ik).to(tl.int64)
        live = (e >= 0) & (e < E)
        mask = live & (n >= 0) if EVEN_N else live & (n < N)
        v = tl.load(y + (t * top_k + k) * N + n, mask=mask, other=0.0).to(tl.float32)
        if SCALE:
            v *= tl.load(weights + t * stride_rt + k * stride_rk, mask=live, other=0.0).to(tl.float32)
        total += v
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)
