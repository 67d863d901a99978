"""The weighted sum over the slots of a token: a gather, in slot order, without atomics."""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import after_previous, expert_base, let_next_start


@triton.jit
def slot_row(
    y, ids, weights, position, t, k, n, top_k, E, N, at_ids, at_weights, SCALE: tl.constexpr, SORTED: tl.constexpr, EVEN_N: tl.constexpr
):
    """weights[t, k] times the row of y of slot t*K + k, outputs n; zero for an invalid id, whose row is not read."""
    e = tl.load(ids + t * at_ids.row + k * at_ids.col).to(tl.int64)  # []
    live = (e >= 0) & (e < E)
    mask = live & (n >= 0) if EVEN_N else live & (n < N)
    row = t * top_k + k
    if SORTED:
        row = tl.load(position + row).to(tl.int64)  # []
    v = tl.load(y + row * N + n, mask=mask, other=0.0).to(tl.float32)  # [BN]
    if SCALE:
        v *= tl.load(weights + t * at_weights.row + k * at_weights.col, mask=live, other=0.0).to(tl.float32)  # []
    return v


@triton.jit
def combine_slots(
    y, ids, weights, position, out, top_k, E, N, at_ids, at_weights,
    SCALE: tl.constexpr, SORTED: tl.constexpr, EVEN_N: tl.constexpr, BN: tl.constexpr, KNOWN: tl.constexpr, PDL: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """out [T, N] = sum over k of weights[t, k] * y[t*K + k], slot 0 first; y [S, N] in slot order. Rows of invalid ids are not read.

    SORTED: row position[slot] of y belongs to a slot. SCALE: the routing weight goes on the output. KNOWN: K, or 0 for a loop. BESIDE: the
    previous kernel made nothing that is read here, and let this one start. One program waits for its end, so that whatever comes next is
    behind both; all of them would keep others from beginning.
    """
    after_previous(PDL and not BESIDE)
    let_next_start(PDL and not BESIDE)
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    if KNOWN:
        for k in tl.static_range(KNOWN):
            total += slot_row(y, ids, weights, position, t, k, n, top_k, E, N, at_ids, at_weights, SCALE, SORTED, EVEN_N)
    else:
        for k in range(top_k):
            total += slot_row(y, ids, weights, position, t, k, n, top_k, E, N, at_ids, at_weights, SCALE, SORTED, EVEN_N)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)  # [BN]
    if BESIDE:  # noqa: SIM102 (one is of the compiler, one of the device)
        if tl.program_id(0) + tl.program_id(1) == 0:
            after_previous(PDL)


@triton.jit(do_not_specialize=["T"])
def send_sums(
    y, ids, weights, position, out, T, top_k, E, N, at_ids, at_weights,
    SCALE: tl.constexpr, EVEN_N: tl.constexpr, BN: tl.constexpr, KNOWN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """:func:`combine_slots` of T tokens in sorted order by any number of programs, to an ``out`` that is far; nothing for a token without a
    valid id."""
    after_previous(PDL)
    let_next_start(PDL)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    for i in range(tl.program_id(0), T, tl.num_programs(0)):
        t = tl.full([], 1, tl.int64) * i
        total = tl.zeros([BN], tl.float32)
        found = 0
        if KNOWN:
            for k in tl.static_range(KNOWN):
                total += slot_row(y, ids, weights, position, t, k, n, top_k, E, N, at_ids, at_weights, SCALE, True, EVEN_N)
                found |= _is_valid(ids, t, k, E, at_ids)
        else:
            for k in range(top_k):
                total += slot_row(y, ids, weights, position, t, k, n, top_k, E, N, at_ids, at_weights, SCALE, True, EVEN_N)
                found |= _is_valid(ids, t, k, E, at_ids)
        tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=(n < N) & (found > 0))  # [BN]


@triton.jit
def _is_valid(ids, t, k, E, at_ids):
    e = tl.load(ids + t * at_ids.row + k * at_ids.col).to(tl.int64)  # []
    return ((e >= 0) & (e < E)).to(tl.int32)


@triton.jit
def combine_parts(
    parts, ids, weights, b, out, h, top_k, E, N, at_ids, at_weights, at_b,
    PARTS: tl.constexpr, SCALE: tl.constexpr, stored: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N] from parts [S, PARTS, N] of ``gemv.down_parts``: parts in order, the bias, rounding to the dtype of h, then as above."""
    after_previous(PDL)
    let_next_start(PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = parts.dtype.element_ty
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], acc_type)
    for k in range(top_k):
        e = tl.load(ids + t * at_ids.row + k * at_ids.col).to(tl.int64)  # []
        live = (e >= 0) & (e < E)
        mask = live & (n < N)
        from_parts = parts + (t * top_k + k) * PARTS * N + n
        y = tl.load(from_parts, mask=mask, other=0.0)  # [BN]
        for p in tl.static_range(1, PARTS):
            y += tl.load(from_parts + p * N, mask=mask, other=0.0)  # [BN]
        if stored.BIAS:
            base = expert_base(b, tl.where(live, e, 0), at_b.row, dtype, stored.BIAS_TABLE, False)
            y += tl.load(base + n.to(tl.int64) * at_b.col, mask=mask, other=0.0).to(acc_type)  # [BN]
        y = y.to(dtype).to(acc_type)
        if SCALE:
            y *= tl.load(weights + t * at_weights.row + k * at_weights.col, mask=live, other=0.0).to(acc_type)  # []
        total += tl.where(live, y, 0.0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)  # [BN]
