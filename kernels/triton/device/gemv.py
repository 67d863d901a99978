"""Few slots: each projection as matrix-vector products that stream the weights of the chosen experts once, without tensor cores.

Two launches make a layer: :func:`up_vectors` (one program per slot and block of inner features: both projections and the activation), and
:func:`down_vectors` (one program per token and block of output features: all K slots of the token, weighted and summed in slot order).
No sorting: an expert that several slots chose is read again from L2. Any dtype, float64 included, so this is also what runs where the
tensor-core kernels have no form. A low-rank term is added to the sums before they are rounded; its rows u are made by
:func:`shrink_vectors`, one launch for each factor A, and with programmatic dependent launch while weights are streamed already.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import after_previous, expert_base, gated, index, let_next_start, pointwise, rounded


@triton.jit
def load_row(x, k, scale, limit, stride, WIDE: tl.constexpr, EVEN: tl.constexpr, SCALE: tl.constexpr, acc_type: tl.constexpr):
    """Elements k of one row in the accumulation dtype, times the routing weight (rounded to storage) if it goes on the input."""
    from_x = x + index(k, WIDE) * stride
    v = tl.load(from_x) if EVEN else tl.load(from_x, mask=k < limit, other=0.0)  # [BK]
    if SCALE:
        v = (v.to(acc_type) * scale).to(x.dtype.element_ty)
    return v.to(acc_type)


@triton.jit
def load_block(w, at, n, k, N, limit, stored: tl.constexpr, blocks: tl.constexpr, acc_type: tl.constexpr):
    """Weights [BN, BK] of one expert in the accumulation dtype, zero outside."""
    from_w = w + index(n, stored.WIDE)[:, None] * at.stride_n + index(k, stored.WIDE)[None, :] * at.stride_k
    if blocks.EVEN_N and blocks.EVEN_K:
        v = tl.load(from_w, eviction_policy="evict_first")  # [BN, BK]
    elif blocks.EVEN_K:
        v = tl.load(from_w, mask=n[:, None] < N, other=0.0, eviction_policy="evict_first")  # [BN, BK]
    else:
        v = tl.load(from_w, mask=(n[:, None] < N) & (k[None, :] < limit), other=0.0, eviction_policy="evict_first")  # [BN, BK]
    return v.to(acc_type)


@triton.jit
def add_bias(acc, b, at, e, first, n, N, dtype: tl.constexpr, TABLE: tl.constexpr, HAS: tl.constexpr):
    """acc [BN] plus the bias of features first + n of expert e; b stacked or a table of addresses."""
    if HAS:
        base = expert_base(b, e, at.bias_e, dtype, TABLE, False)
        acc += tl.load(base + (first + n).to(tl.int64) * at.bias_n, mask=n < N, other=0.0).to(acc.dtype)  # [BN]
    return acc


@triton.jit
def term_block(f, at, e, first, n, N, r0, term: tl.constexpr):
    """The factor B [BN, BR] of features first + n of expert e, from rank r0 on, zero outside; nothing where there is no term."""
    if term.RANK > 0:
        r = r0 + tl.arange(0, term.BR)
        base = expert_base(f, e, at.stride_e, term.OF, term.TABLE, False) + (first + n).to(tl.int64)[:, None] * at.stride_n
        v = tl.load(base + r[None, :] * at.stride_k, mask=(n < N)[:, None] & (r < term.RANK)[None, :], other=0.0)  # [BN, BR]
    else:
        v = 0.0
    return v


@triton.jit
def add_term(acc, block, u, f, at, e, slot, first, n, N, term: tl.constexpr):
    """acc [BN] plus u[slot] [r] times the factor B of features first + n of expert e; ``block``: of its first ranks, which are there."""
    RANK: tl.constexpr = term.RANK
    BR: tl.constexpr = term.BR
    if RANK > 0:
        for r0 in tl.static_range(0, RANK, BR):
            r = r0 + tl.arange(0, BR)
            v = tl.load(u + slot.to(tl.int64) * term.ROW + term.COL + r, mask=r < RANK, other=0.0)  # [BR]
            if r0 > 0:
                block = term_block(f, at, e, first, n, N, r0, term)
            acc += tl.sum(block.to(acc.dtype) * v.to(acc.dtype)[None, :], 1)
    return acc


@triton.jit
def shrink_vectors(
    x, ids, weights, a, u, top_k, E, K, at_x, at_ids, at_weights, at_a,
    scale: tl.constexpr, TOKENS: tl.constexpr, SCALE: tl.constexpr, term: tl.constexpr, stored: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """Columns COL .. COL + RANK of u [S, ROW]: scale times the row of each slot with a valid id times the factor A [E, r, K] of its expert.

    TOKENS: x is [T, K], else [S, K]. SCALE: the routing weight goes on the rows.
    """
    dtype: tl.constexpr = x.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    BN: tl.constexpr = blocks.BN
    BK: tl.constexpr = blocks.BK
    after_previous(blocks.PDL)
    let_next_start(blocks.PDL)  # which waits for u alone: all else was there before this kernel began
    slot = tl.program_id(0)
    t = (slot // top_k).to(tl.int64)
    j = (slot % top_k).to(tl.int64)
    e = tl.load(ids + t * at_ids.row + j * at_ids.col).to(tl.int64)  # []
    if (e < 0) | (e >= E):
        return
    by = 0.0
    if SCALE:
        by = tl.load(weights + t * at_weights.row + j * at_weights.col).to(acc_type)  # []
    row = x + (t if TOKENS else slot.to(tl.int64)) * at_x.row
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    base = expert_base(a, e, at_a.stride_e, term.OF, term.TABLE, False)
    acc = tl.zeros([BN, BK], acc_type)
    for k0 in tl.range(0, K, BK, num_stages=blocks.STAGES):
        k = k0 + tl.arange(0, BK)
        v = load_row(row, k, by, K, at_x.col, stored.WIDE, blocks.EVEN_K, SCALE, acc_type)
        acc += load_block(base, at_a, n, k, term.RANK, K, stored, blocks, acc_type) * v[None, :]
    tl.store(u + slot.to(tl.int64) * term.ROW + term.COL + n, tl.sum(acc, 1) * scale, mask=n < term.RANK)  # [BN]


@triton.jit(do_not_specialize=["S"])
def up_vectors(
    x, ids, weights, w_a, w_b, b_a, b_b, u, f_a, f_b, h, S, top_k, E, H, N, args, at_x, at_ids, at_weights, at_a, at_b, at_fa, at_fb,
    form: tl.constexpr, term_a: tl.constexpr, term_b: tl.constexpr, stored: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """h [S, N] of slots with a valid id: activation(x W_a^T, x W_b^T), each product with its term u f^T.

    Gating "halves": gate rows from feature ``first`` of w_a, up rows likewise of w_b; "interleaved": both alternate in w_a; "plain": w_a
    only.
    """
    EARLY: tl.constexpr = blocks.PDL and term_a.RANK + term_b.RANK > 0
    after_previous(blocks.PDL and not EARLY)
    let_next_start(blocks.PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    BN: tl.constexpr = blocks.BN
    BK: tl.constexpr = blocks.BK
    TABLE: tl.constexpr = stored.TABLE
    ALIGNED: tl.constexpr = stored.ALIGNED
    ACT: tl.constexpr = form.ACT
    slot = tl.program_id(0)
    t = (slot // top_k).to(tl.int64)
    j = (slot % top_k).to(tl.int64)
    e = tl.load(ids + t * at_ids.row + j * at_ids.col).to(tl.int64)  # []
    if (e < 0) | (e >= E):
        after_previous(EARLY)
        return
    scale = 0.0
    if form.SCALE:
        scale = tl.load(weights + t * at_weights.row + j * at_weights.col).to(acc_type)  # []
    row = x + t * at_x.row
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    base_a = expert_base(w_a, e, at_a.stride_e, dtype, TABLE, ALIGNED)
    if form.GATING == "interleaved":
        n2 = tl.program_id(1) * 2 * BN + tl.arange(0, 2 * BN)
        block = term_block(f_a, at_fa, e, 0, n2, 2 * N, 0, term_a)
        acc = tl.zeros([2 * BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=blocks.STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, at_x.col, stored.WIDE, blocks.EVEN_K, form.SCALE, acc_type)
            acc += load_block(base_a, at_a, n2, k, 2 * N, H, stored, blocks, acc_type) * v[None, :]
        both = add_bias(tl.sum(acc, 1), b_a, at_a, e, 0, n2, 2 * N, dtype, stored.BIAS_TABLE, stored.BIAS)
        after_previous(EARLY)
        both = add_term(both, block, u, f_a, at_fa, e, slot, 0, n2, 2 * N, term_a)
        gate, up = tl.split(tl.reshape(rounded(both, dtype), [BN, 2]))
        if form.UP_FIRST:
            gate, up = up, gate
        out = gated(gate, up, args[0], args[1], ACT, FAST)
    elif form.GATING == "halves":
        base_b = expert_base(w_b, e, at_b.stride_e, dtype, TABLE, ALIGNED) + index(at_b.first, True) * at_b.stride_n
        base_a += index(at_a.first, True) * at_a.stride_n
        block_a = term_block(f_a, at_fa, e, at_a.first, n, N, 0, term_a)
        block_b = term_block(f_b, at_fb, e, at_b.first, n, N, 0, term_b)
        acc_a = tl.zeros([BN, BK], acc_type)
        acc_b = tl.zeros([BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=blocks.STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, at_x.col, stored.WIDE, blocks.EVEN_K, form.SCALE, acc_type)
            acc_a += load_block(base_a, at_a, n, k, N, H, stored, blocks, acc_type) * v[None, :]
            acc_b += load_block(base_b, at_b, n, k, N, H, stored, blocks, acc_type) * v[None, :]
        gate = add_bias(tl.sum(acc_a, 1), b_a, at_a, e, at_a.first, n, N, dtype, stored.BIAS_TABLE, stored.BIAS)
        up = add_bias(tl.sum(acc_b, 1), b_b, at_b, e, at_b.first, n, N, dtype, stored.BIAS_TABLE, stored.BIAS_B)
        after_previous(EARLY)
        gate = add_term(gate, block_a, u, f_a, at_fa, e, slot, at_a.first, n, N, term_a)
        up = add_term(up, block_b, u, f_b, at_fb, e, slot, at_b.first, n, N, term_b)
        out = gated(rounded(gate, dtype), rounded(up, dtype), args[0], args[1], ACT, FAST)
    else:
        block = term_block(f_a, at_fa, e, 0, n, N, 0, term_a)
        acc_p = tl.zeros([BN, BK], acc_type)
        for k0 in tl.range(0, H, BK, num_stages=blocks.STAGES):
            k = k0 + tl.arange(0, BK)
            v = load_row(row, k, scale, H, at_x.col, stored.WIDE, blocks.EVEN_K, form.SCALE, acc_type)
            acc_p += load_block(base_a, at_a, n, k, N, H, stored, blocks, acc_type) * v[None, :]
        gate = add_bias(tl.sum(acc_p, 1), b_a, at_a, e, 0, n, N, dtype, stored.BIAS_TABLE, stored.BIAS)
        after_previous(EARLY)
        gate = add_term(gate, block, u, f_a, at_fa, e, slot, 0, n, N, term_a)
        out = pointwise(rounded(gate, dtype), ACT, FAST)
    tl.store(h + slot.to(tl.int64) * N + n, out.to(dtype), mask=n < N)  # [BN]


@triton.jit
def down_vectors(
    h, ids, weights, w, b, u, f, out, top_k, E, I, N, at_ids, at_weights, at_w, at_f,
    SCALE: tl.constexpr, term: tl.constexpr, stored: tl.constexpr, blocks: tl.constexpr,
):  # fmt: skip
    """out [T, N] = sum over k of weights[t, k] * round(h[t*K + k] W[ids[t, k]]^T + b + u f^T), slot 0 first; AT slots at a time.

    SCALE: the routing weight goes on the output.
    """
    let_next_start(blocks.PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    RANK: tl.constexpr = term.RANK
    BR: tl.constexpr = term.BR
    AT: tl.constexpr = blocks.AT
    BN: tl.constexpr = blocks.BN
    BK: tl.constexpr = blocks.BK
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    live_n = n[None, :, None] < N
    j = tl.arange(0, AT)
    after_previous(blocks.PDL and RANK == 0)
    ranks = tl.arange(0, BR)[None, None, :]
    total = tl.zeros([BN], acc_type)
    for k0 in range(0, top_k, AT):
        slot = k0 + j
        e = tl.load(ids + t * at_ids.row + slot * at_ids.col, mask=slot < top_k, other=-1).to(tl.int64)  # [AT]
        live = (e >= 0) & (e < E)
        e = tl.where(live, e, 0)
        base = expert_base(w, e, at_w.stride_e, dtype, stored.TABLE, stored.ALIGNED)[:, None, None]
        base += index(n, stored.WIDE)[None, :, None] * at_w.stride_n
        if RANK > 0:
            from_f = expert_base(f, e, at_f.stride_e, term.OF, term.TABLE, False)[:, None, None]
            from_f += n.to(tl.int64)[None, :, None] * at_f.stride_n
            block = tl.load(from_f + ranks * at_f.stride_k, mask=live[:, None, None] & live_n & (ranks < RANK), other=0.0)  # [AT, BN, BR]
        rows = h + (t * top_k + slot)[:, None, None] * I
        acc = tl.zeros([AT, BN, BK], acc_type)
        for i0 in tl.range(0, I, BK, num_stages=blocks.STAGES):
            i = i0 + tl.arange(0, BK)
            mask = live[:, None, None]
            if not blocks.EVEN_K:
                mask = mask & (i[None, None, :] < I)
            v = tl.load(rows + i[None, None, :], mask=mask, other=0.0).to(acc_type)  # [AT, 1, BK]
            if not blocks.EVEN_N:
                mask = mask & live_n
            from_w = base + index(i, stored.WIDE)[None, None, :] * at_w.stride_k
            acc += tl.load(from_w, mask=mask, other=0.0, eviction_policy="evict_first").to(acc_type) * v  # [AT, BN, BK]
        y = tl.sum(acc, 2)
        if stored.BIAS:
            from_b = expert_base(b, e, at_w.bias_e, dtype, stored.BIAS_TABLE, False)[:, None] + n.to(tl.int64)[None, :] * at_w.bias_n
            y += tl.load(from_b, mask=live[:, None] & (n[None, :] < N), other=0.0).to(acc_type)  # [AT, BN]
        if RANK > 0:
            after_previous(blocks.PDL)
            for r0 in tl.static_range(0, RANK, BR):
                r = r0 + ranks
                mask = live[:, None, None] & (r < RANK)
                v = tl.load(u + (t * top_k + slot)[:, None, None] * term.ROW + term.COL + r, mask=mask, other=0.0)  # [AT, 1, BR]
                if r0 > 0:
                    block = tl.load(from_f + r * at_f.stride_k, mask=mask & live_n, other=0.0)  # [AT, BN, BR]
                y += tl.sum(block.to(acc_type) * v.to(acc_type), 2)
        y = y.to(dtype).to(acc_type)
        if SCALE:
            from_weights = weights + t * at_weights.row + slot * at_weights.col
            y *= tl.load(from_weights, mask=live, other=0.0).to(acc_type)[:, None]  # [AT]
        for i in tl.static_range(AT):
            total += tl.sum(tl.where((j == i)[:, None] & live[:, None], y, 0.0), 0)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)  # [BN]


@triton.jit(do_not_specialize=["span"])
def down_parts(h, ids, w, parts, top_k, E, I, N, span, at_ids, at_w, stored: tl.constexpr, blocks: tl.constexpr):
    """parts [S, P, N] in the accumulation dtype: h[s] W[ids[s]]^T over inputs [p * span, (p + 1) * span).

    Where outputs are stored side by side a program needs many of them for whole cache lines, so few tokens make too few programs for the
    device: here the inputs are shared out as well. :func:`moefuse.kernels.triton.device.combine.combine_parts` adds the parts up.
    """
    after_previous(blocks.PDL)
    let_next_start(blocks.PDL)
    dtype: tl.constexpr = h.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    BN: tl.constexpr = blocks.BN
    BK: tl.constexpr = blocks.BK
    slot = tl.program_id(0)
    e = tl.load(ids + (slot // top_k).to(tl.int64) * at_ids.row + (slot % top_k).to(tl.int64) * at_ids.col).to(tl.int64)  # []
    if (e < 0) | (e >= E):
        return
    p = tl.program_id(2)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    base = expert_base(w, e, at_w.stride_e, dtype, stored.TABLE, stored.ALIGNED)
    row = h + slot.to(tl.int64) * I
    end = tl.minimum((p + 1) * span, I)
    acc = tl.zeros([BN, BK], acc_type)
    for k0 in tl.range(p * span, end, BK, num_stages=blocks.STAGES):
        k = k0 + tl.arange(0, BK)
        v = load_row(row, k, 0.0, end, 1, False, blocks.EVEN_K, False, acc_type)
        acc += load_block(base, at_w, n, k, N, end, stored, blocks, acc_type) * v[None, :]
    to = parts + (slot.to(tl.int64) * tl.num_programs(2) + p) * N + n
    tl.store(to, tl.sum(acc, 1), mask=n < N)  # [BN]
