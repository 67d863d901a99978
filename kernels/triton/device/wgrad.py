"""Gradients of expert weights and vectors: every program owns one piece of one expert's gradient and walks over that expert's rows.

Nothing is shared between programs, so the sums have one order and need no atomics; an expert without rows gets zeros. Rows are gathered
through the order while they are loaded: no sorted copy of the tokens or of the output's gradient exists. (SonicMoE's and ScatterMoE's
papers gather inside the weight gradient likewise; the code is our own.)
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import expert_base, index, load_rows, tile_order


@triton.jit
def place(row, live, order, top_k, GATHER: tl.constexpr):
    """Where rows [BR] are in their tensor: themselves, or their tokens."""
    if GATHER:
        at = tl.load(order + row, mask=live, other=0).to(tl.int64) // top_k  # [BR]
    else:
        at = row.to(tl.int64)
    return at


@triton.jit
def factor_of(row, live, order, weights, top_k, at_weights, wide: tl.constexpr):
    """Routing weights of rows [BR]."""
    slot = tl.load(order + row, mask=live, other=0).to(tl.int64)  # [BR]
    from_weights = weights + slot // top_k * at_weights.row + slot % top_k * at_weights.col
    return tl.load(from_weights, mask=live, other=0.0).to(wide)  # [BR]


@triton.jit
def weight_grads(
    g, x, weights, order, offsets, d_w,
    top_k, N, K, at_g, at_x, at_weights, at_d,
    GATHER_G: tl.constexpr, GATHER_X: tl.constexpr, SCALE: tl.constexpr, stored: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_w[e] [N, K] = sum over the rows of e of g[row]^T x[row], rounded once (HELD: not at all).

    SCALE: rows of x times their routing weight, rounded. Rows in float32 beside rows of 16 bits are rounded as they are read.
    """
    of_g: tl.constexpr = g.dtype.element_ty
    of_x: tl.constexpr = x.dtype.element_ty
    dtype: tl.constexpr = of_g if of_g.primitive_bitwidth < of_x.primitive_bitwidth else of_x
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    blocks_n = tl.cdiv(N, BN)
    blocks_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    e = pid // (blocks_n * blocks_k)
    block_n, block_k = tile_order(pid % (blocks_n * blocks_k), blocks_n, blocks_k, GROUP)
    n = block_n * BN + tl.arange(0, BN)
    k = block_k * BK + tl.arange(0, BK)
    begin = tl.load(offsets + e).to(tl.int32)  # []
    end = tl.load(offsets + e + 1).to(tl.int32)  # []
    acc = tl.zeros([BN, BK], wide)
    for r0 in tl.range(begin, end, BR):
        row = r0 + tl.arange(0, BR)
        live = row < end
        row_g = place(row, live, order, top_k, GATHER_G)
        row_x = place(row, live, order, top_k, GATHER_X)
        from_g = g + row_g[:, None] * at_g.row + n.to(tl.int64)[None, :] * at_g.col
        from_x = x + row_x[:, None] * at_x.row + k.to(tl.int64)[None, :] * at_x.col
        a = tl.load(from_g, mask=live[:, None] & (n < N)[None, :], other=0.0).to(dtype)  # [BR, BN]
        v = tl.load(from_x, mask=live[:, None] & (k < K)[None, :], other=0.0)  # [BR, BK]
        if SCALE:
            v = v.to(wide) * factor_of(row, live, order, weights, top_k, at_weights, wide)[:, None]
        v = v.to(dtype)
        acc = tl.dot(tl.trans(a), v, acc, input_precision=PRECISION, out_dtype=wide)  # [BN, BK]
    held: tl.constexpr = tl.float32 if stored.HELD else dtype
    base = expert_base(d_w, e, at_d.stride_e, held, stored.TABLE, stored.ALIGNED)
    to = base + index(n, stored.WIDE)[:, None] * at_d.stride_n + index(k, stored.WIDE)[None, :] * at_d.stride_k
    tl.store(to, acc.to(held), mask=(n < N)[:, None] & (k < K)[None, :])  # [BN, BK]


@triton.jit
def weight_grad_tiles(
    g_rows, x_rows, offsets, d_w, N, K, at_d, stored: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """The same where both are sorted rows that come through descriptors, which give zeros behind an expert's last row."""
    dtype: tl.constexpr = g_rows.dtype
    blocks_n = tl.cdiv(N, BN)
    blocks_k = tl.cdiv(K, BK)
    pid = tl.program_id(0)
    e = pid // (blocks_n * blocks_k)
    block_n, block_k = tile_order(pid % (blocks_n * blocks_k), blocks_n, blocks_k, GROUP)
    begin = tl.load(offsets + e).to(tl.int32)  # []
    end = tl.load(offsets + e + 1).to(tl.int32)  # []
    acc = tl.zeros([BN, BK], tl.float32)
    for row in tl.range(begin, end, BR):
        rows = tl.minimum(end - row, BR)
        a = load_rows(g_rows, row, rows, block_n * BN, BR, BN)  # [BR, BN]
        v = load_rows(x_rows, row, rows, block_k * BK, BR, BK)  # [BR, BK]
        acc = tl.dot(tl.trans(a), v, acc)  # [BN, BK]
    n = block_n * BN + tl.arange(0, BN)
    k = block_k * BK + tl.arange(0, BK)
    held: tl.constexpr = tl.float32 if stored.HELD else dtype
    base = expert_base(d_w, e, at_d.stride_e, held, stored.TABLE, stored.ALIGNED)
    to = base + index(n, stored.WIDE)[:, None] * at_d.stride_n + index(k, stored.WIDE)[None, :] * at_d.stride_k
    tl.store(to, acc.to(held), mask=(n < N)[:, None] & (k < K)[None, :])  # [BN, BK]


@triton.jit
def vector_grads(
    g, weights, order, offsets, d_b, top_k, N, at_g, at_weights, at_d,
    GATHER: tl.constexpr, SCALE: tl.constexpr, stored: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """d_b[e] [N] = the sum of g over the rows of e, rounded once (HELD: not at all). SCALE: times their routing weights (not rounded)."""
    dtype: tl.constexpr = g.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    e = tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    begin = tl.load(offsets + e).to(tl.int32)  # []
    end = tl.load(offsets + e + 1).to(tl.int32)  # []
    acc = tl.zeros([BR, BN], wide)
    for r0 in tl.range(begin, end, BR):
        row = r0 + tl.arange(0, BR)
        live = row < end
        row_g = place(row, live, order, top_k, GATHER)
        mask = live[:, None] & (n < N)[None, :]
        v = tl.load(g + row_g[:, None] * at_g.row + n.to(tl.int64)[None, :] * at_g.col, mask=mask, other=0.0).to(wide)  # [BR, BN]
        if SCALE:
            v *= factor_of(row, live, order, weights, top_k, at_weights, wide)[:, None]
        acc += v
    held: tl.constexpr = tl.float32 if stored.HELD else dtype
    base = expert_base(d_b, e, at_d.row, held, stored.TABLE, False)
    tl.store(base + n.to(tl.int64) * at_d.col, tl.sum(acc, 0).to(held), mask=n < N)  # [BN]


@triton.jit(do_not_specialize=["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "first"])
def write_addresses(table, a0, a1, a2, a3, a4, a5, a6, a7, first):
    """Eight entries of a table of addresses. Gradients of separate Parameters are new tensors at every call, so their table is new too."""
    tl.store(table + first, a0)
    tl.store(table + first + 1, a1)
    tl.store(table + first + 2, a2)
    tl.store(table + first + 3, a3)
    tl.store(table + first + 4, a4)
    tl.store(table + first + 5, a5)
    tl.store(table + first + 6, a6)
    tl.store(table + first + 7, a7)
