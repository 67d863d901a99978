"""Few slots: each projection as matrix-vector products that stream the weights of the chosen experts once, without tensor cores.

Two launches make a layer: :func:`up_vectors` (one program per slot and block of inner features: both projections and the activation), and
:func:`down_vectors` (one program per token and block of output features: all K slots of the token, weighted and summed in slot order).
No sorting: an expert that several slots chose is read again from L2. Any dtype, float64 included, so this is also what runs where the
tensor-core kernels have no form.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.functions import after_previous, expert_base, gated, index, let_next_start, pointwise, rounded


@triton.jit
def load_row(x, k, scale, limit, stride, WIDE: tl.constexpr, EVEN: tl.constexpr, SCALE: tl.constexpr, acc_type: tl.constexpr):
    """Elements k of one row in the accumulation dtype, times the routing weight (rounded to storage) if it goes on the input."""
    at = x + index(k, WIDE) * stride
    v = tl.load(at) if EVEN else tl.load(at, mask=k < limit, other=0.0)
    if SCALE:
        v = (v.to(acc_type) * scale).to(x.dtype.element_ty)
    return v.to(acc_type)


@triton.jit
def load_block(
    w, n, k, N, limit, stride_n, stride_k, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, acc_type: tl.constexpr
):
    """Weights [BN, BK] of one expert in the accumulation dtype, zero outside."""
    at = w + index(n, WIDE)[:, None] * stride_n + index(k, WIDE)[None, :] * stride_k
    if EVEN_N and EVEN_K:
        v = tl.load(at, eviction_policy="evict_first")
    elif EVEN_K:
        v = tl.load(at, mask=n[:, None] < N, other=0.0, eviction_policy="evict_first")
    else:
        v = tl.load(at, mask=(n[:, None] < N) & (k[None, :] < limit), other=0.0, eviction_policy="evict_first")
    return v.to(acc_type)


@triton.jit
def add_bias(acc, b, e, first, n, N, stride_e, stride_n, dtype: tl.constexpr, TABLE: tl.constexpr, HAS: tl.constexpr):
    """acc [BN] plus the bias of features first + n of expert e; b stacked or a table of addresses."""
    if HAS:
        base = expert_base(b, e, stride_e, dtype, TABLE, False)
        acc += tl.load(base + (first + n).to(tl.int64) * stride_n, mask=n < N, other=0.0).to(acc.dtype)
    return acc


@triton.jit(do_not_specialize=["S"])
def up_vectors(
    x,
    ids,
    weights,
    w_a,
    w_b,
    b_a,
    b_b,
    h,
    S,
    top_k,
    E,
    H,
    N,
    arg0,
    arg1,
    stride_xt,
    stride_xh,
    stride_it,
    stride_ik,
    stride_rt,
    stride_rk,
    stride_ae,
    stride_an,
    stride_ak,
    stride_be,
    stride_bn,
    stride_bk,
    stride_bae,
    stride_ban,
    stride_bbe,
    stride_bbn,
    first_a,
    first_b,
    GATING: tl.constexpr,
    UP_FIRST: tl.constexpr,
    ACT: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS_A: tl.constexpr,
    BIAS_B: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """h [S, N] of slots with a valid id: activation(x W_a^T, x W_b^T).

    GATING "halves": gate rows from feature first_a of w_a, up rows from feature first_b of w_b; "interleaved": both alternate in w_a;
    "plain": w_a only.
    """
    after_previous(PDL)
    let_next_start(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    slot = tl.program_id(0)
    t = (slot // top_k).to(tl.int64)
    j = (slot % top_k).to(tl.int64)
    e = tl.load(ids + t * stride_it + j * stride_ik).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    scale = 0.0
    if SCALE:
        scale = tl.load(weights + t * stride_rt + j * stride_rk).to(acc_type)
    row = x + t * stride_xt
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    base_a = expert_base(w_a, e, stride_ae, dtype, TABLE, ALIGNED)
    if GATING == "interleaved":
        n2 = tl.program_id(1) * 2 * BN + tl.arange(0, 2 * BN)
        acc = tl.zeros([2 * BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, stride_xh, WIDE, EVEN_K, SCALE, acc_type)
            acc += load_block(base_a, n2, k, 2 * N, H, stride_an, stride_ak, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
        both = add_bias(tl.sum(acc, 1), b_a, e, 0, n2, 2 * N, stride_bae, stride_ban, dtype, BIAS_TABLE, BIAS_A)
        gate, up = tl.split(tl.reshape(rounded(both, dtype), [BN, 2]))
        if UP_FIRST:
            gate, up = up, gate
        out = gated(gate, up, arg0, arg1, ACT, FAST)
    elif GATING == "halves":
        base_b = expert_base(w_b, e, stride_be, dtype, TABLE, ALIGNED) + index(first_b, True) * stride_bn
        base_a += index(first_a, True) * stride_an
        acc_a = tl.zeros([BN, BK], acc_type)
        acc_b = tl.zeros([BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, stride_xh, WIDE, EVEN_K, SCALE, acc_type)
            acc_a += load_block(base_a, n, k, N, H, stride_an, stride_ak, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
            acc_b += load_block(base_b, n, k, N, H, stride_bn, stride_bk, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
        gate = add_bias(tl.sum(acc_a, 1), b_a, e, first_a, n, N, stride_bae, stride_ban, dtype, BIAS_TABLE, BIAS_A)
        up = add_bias(tl.sum(acc_b, 1), b_b, e, first_b, n, N, stride_bbe, stride_bbn, dtype, BIAS_TABLE, BIAS_B)
        out = gated(rounded(gate, dtype), rounded(up, dtype), arg0, arg1, ACT, FAST)
    else:
        acc_p = tl.zeros([BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, stride_xh, WIDE, EVEN_K, SCALE, acc_type)
            acc_p += load_block(base_a, n, k, N, H, stride_an, stride_ak, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
        gate = add_bias(tl.sum(acc_p, 1), b_a, e, 0, n, N, stride_bae, stride_ban, dtype, BIAS_TABLE, BIAS_A)
        out = pointwise(rounded(gate, dtype), ACT, FAST)
    tl.store(h + slot.to(tl.int64) * N + n, out.to(dtype), mask=n < N)


@triton.jit
def down_vectors(
    h,
    ids,
    weights,
    w,
    b,
    out,
    top_k,
    E,
    I,
    N,
    stride_it,
    stride_ik,
    stride_rt,
    stride_rk,
    stride_we,
    stride_wn,
    stride_wk,
    stride_be,
    stride_bn,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    BIAS: tl.constexpr,
    BIAS_TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    KB: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [T, N] = sum over k of weights[t, k] * round(h[t*K + k] W[ids[t, k]]^T + b), slot 0 first; KB slots at a time.

    SCALE: the routing weight goes on the output.
    """
    let_next_start(PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live_n = n[None, :, None] < N
    j = tl.arange(0, KB)
    after_previous(PDL)
    total = tl.zeros([BN], acc_type)
    for k0 in range(0, top_k, KB):
        slot = k0 + j
        e = tl.load(ids + t * stride_it + slot * stride_ik, mask=slot < top_k, other=-1).to(tl.int64)
        live = (e >= 0) & (e < E)
        e = tl.where(live, e, 0)
        base = expert_base(w, e, stride_we, dtype, TABLE, ALIGNED)[:, None, None] + index(n, WIDE)[None, :, None] * stride_wn
        rows = h + (t * top_k + slot)[:, None, None] * I
        acc = tl.zeros([KB, BN, BK], acc_type)
        for i0 in tl.range(0, I, BK, num_stages=STAGES):
            i = i0 + tl.arange(0, BK)
            mask = live[:, None, None]
            if not EVEN_K:
                mask = mask & (i[None, None, :] < I)
            v = tl.load(rows + i[None, None, :], mask=mask, other=0.0).to(acc_type)
            if not EVEN_N:
                mask = mask & live_n
            at = base + index(i, WIDE)[None, None, :] * stride_wk
            acc += tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(acc_type) * v
        y = tl.sum(acc, 2)
        if BIAS:
            at_b = expert_base(b, e, stride_be, dtype, BIAS_TABLE, False)[:, None] + n.to(tl.int64)[None, :] * stride_bn
            y += tl.load(at_b, mask=live[:, None] & (n[None, :] < N), other=0.0).to(acc_type)
        y = y.to(dtype).to(acc_type)
        if SCALE:
            y *= tl.load(weights + t * stride_rt + slot * stride_rk, mask=live, other=0.0).to(acc_type)[:, None]
        for i in tl.static_range(KB):
            total += tl.sum(tl.where((j == i)[:, None] & live[:, None], y, 0.0), 0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["span"])
def down_parts(
    h, ids, w, parts, top_k, E, I, N, span, stride_it, stride_ik, stride_we, stride_wn, stride_wk,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [S, P, N] in the accumulation dtype: h[s] W[ids[s]]^T over inputs [p * span, (p + 1) * span).

    Where outputs are stored side by side a program needs many of them for whole cache lines, so few tokens make too few programs for the
    device: here the inputs are shared out as well. :func:`moefuse.kernels.triton.combine.combine_parts` adds the parts up.
    """
    after_previous(PDL)
    let_next_start(PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    slot = tl.program_id(0)
    e = tl.load(ids + (slot // top_k).to(tl.int64) * stride_it + (slot % top_k).to(tl.int64) * stride_ik).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    p = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    base = expert_base(w, e, stride_we, dtype, TABLE, ALIGNED)
    row = h + slot.to(tl.int64) * I
    end = tl.minimum((p + 1) * span, I)
    acc = tl.zeros([BN, BK], acc_type)
    for k0 in tl.range(p * span, end, BK, num_stages=STAGES):
        k = k0 + tl.arange(0, BK)
        v = load_row(row, k, 0.0, end, 1, False, EVEN_K, False, acc_type)
        acc += load_block(base, n, k, N, end, stride_wn, stride_wk, WIDE, EVEN_N, EVEN_K, acc_type) * v[None, :]
    at = parts + (slot.to(tl.int64) * tl.num_programs(2) + p) * N + n
    tl.store(at, tl.sum(acc, 1), mask=n < N)
