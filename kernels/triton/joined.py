"""Few tokens: routed experts and a shared expert as the vectors of ``gemv.py``, in the same two launches.

The shared expert is read as P pieces of I inner features: to the kernels these are slots K .. K+P-1 of every token, with addresses of
their own instead of an id. So decoding reads all weights of a layer side by side, without a second stream and without more launches.

Gated experts without biases, stored as ``nn.Linear`` stores them; the weights per token go on the outputs. Routed slots are rounded as in
``gemv.py``. Pieces are not, as they are no whole: the sum over them and the routed slots is rounded once.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.functions import after_previous, gated, index, let_next_start, rounded
from moefuse.kernels.triton.gemv import load_block, load_row


@triton.jit
def distance(a, b, ALIGNED: tl.constexpr):
    """Elements from address b to address a, of two tensors with one dtype."""
    size: tl.constexpr = a.dtype.element_ty.primitive_bitwidth // 8
    apart = (a.to(tl.int64) - b.to(tl.int64)) // size
    if ALIGNED:
        apart = tl.multiple_of(apart, 16 // size)
    return apart


@triton.jit
def up_joined(
    x, ids, w_a, w_b, s_a, s_b, h, top_k, P, E, H, I, IS, arg0, arg1,
    stride_xt, stride_xh, stride_it, stride_ik, stride_ae, stride_be, stride_n, first_a, first_b, first_sa, first_sb,
    ACT: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [T, K + P, I]: activation(x W_a^T) * (x W_b^T) of the slots with a valid id and of the shared expert's pieces.

    ``stride_n``: from one feature to the next, the same in all four weights, whose inputs lie side by side. ``IS``: inner features of
    the shared expert; what its last piece has too few of is left out.
    """
    after_previous(PDL)
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    slot = tl.program_id(0)
    t = (slot // (top_k + P)).to(tl.int64)
    j = slot % (top_k + P)
    routed = j < top_k
    e = tl.load(ids + t * stride_it + j.to(tl.int64) * stride_ik, mask=routed, other=0).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    piece = (j - top_k).to(tl.int64) * I
    here_a, here_b = e * stride_ae + index(first_a, True) * stride_n, e * stride_be + index(first_b, True) * stride_n
    at_a = tl.where(routed, here_a, distance(s_a, w_a, ALIGNED) + (piece + first_sa) * stride_n)
    at_b = tl.where(routed, here_b, distance(s_b, w_b, ALIGNED) + (piece + first_sb) * stride_n)
    limit = tl.where(routed, I, tl.minimum(I, IS - piece)).to(tl.int32)
    row = x + t * stride_xt
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    acc_a = tl.zeros([BN, BK], acc_type)
    acc_b = tl.zeros([BN, BK], acc_type)
    for k0 in tl.range(0, H, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        v = load_row(row, k, 0.0, H, stride_xh, WIDE, EVEN_K, False, acc_type)
        acc_a += load_block(w_a + at_a, n, k, limit, H, stride_n, 1, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
        acc_b += load_block(w_b + at_b, n, k, limit, H, stride_n, 1, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
    out = gated(rounded(tl.sum(acc_a, 1), dtype), rounded(tl.sum(acc_b, 1), dtype), arg0, arg1, ACT, FAST)
    tl.store(h + slot.to(tl.int64) * I + n, out.to(dtype), mask=n < limit)


@triton.jit
def down_joined(
    h, ids, weights, gate, w, s, out, top_k, P, E, I, IS, N,
    stride_it, stride_ik, stride_rt, stride_rk, stride_gt, stride_we, stride_wn, stride_sn,
    GATE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    KB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] = sum over k of weights[t, k] * round(h[t, k] W[ids[t, k]]^T), then gate[t] times the shared expert's pieces.

    KB slots at a time, slot 0 first. GATE: there is a weight per token; else it is one.
    """
    let_next_start(PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    j = tl.arange(0, KB)
    apart = distance(s, w, ALIGNED)
    after_previous(PDL)
    scale = 1.0
    if GATE:
        scale = tl.load(gate + t * stride_gt).to(acc_type)
    total = tl.zeros([BN], acc_type)
    for k0 in range(0, top_k + P, KB):
        slot = k0 + j
        routed = slot < top_k
        e = tl.load(ids + t * stride_it + slot * stride_ik, mask=routed, other=0).to(tl.int64)
        live = (e >= 0) & (e < E) & (slot < top_k + P)
        e = tl.where(live, e, 0)
        piece = (slot - top_k).to(tl.int64) * I
        stride_n = tl.where(routed, stride_wn, stride_sn)
        at = tl.where(routed, e * stride_we, apart + piece)[:, None] + index(n, WIDE)[None, :] * stride_n[:, None]
        limit = tl.where(routed, I, tl.minimum(I, IS - piece))[:, None, None]
        rows = h + (t * (top_k + P) + slot)[:, None, None] * I
        acc = tl.zeros([KB, BN, BK], acc_type)
        for i0 in tl.range(0, I, BK, num_stages=STAGES):
            i = (i0 + tl.arange(0, BK))[None, None, :]
            mask = live[:, None, None]
            if not EVEN_K:
                mask = mask & (i < limit)
            v = tl.load(rows + i, mask=mask, other=0.0).to(acc_type)
            if not EVEN_N:
                mask = mask & (n[None, :, None] < N)
            acc += tl.load(w + at[:, :, None] + i, mask=mask, other=0.0, eviction_policy="evict_first").to(acc_type) * v
        y = tl.sum(acc, 2)
        share = tl.load(weights + t * stride_rt + slot * stride_rk, mask=live & routed, other=0.0).to(acc_type)
        y = tl.where(routed[:, None], y.to(dtype).to(acc_type) * share[:, None], y * scale)
        for i in tl.static_range(KB):
            total += tl.sum(tl.where((j == i)[:, None] & live[:, None], y, 0.0), 0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)
