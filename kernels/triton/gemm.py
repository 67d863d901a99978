"""Grouped GEMMs on tensor cores over the tiles of ``routing.py``: ``up_tiles`` (both projections and the activation) and ``down_tiles``.

A tile is up to BM sorted rows of one expert times BN output features. Token rows are gathered through the order while they are loaded,
so no gathered copy of x exists; ``down_tiles`` writes each row to its slot, where the combine reads it. A tile whose rows fit half of BM
runs at half the height (TAIL), which is most of the padding. With SWAP the weights are the left operand: wgmma's 64 rows are then
weight rows and a tile of 16 tokens wastes nothing. Weights arrive through a tensor descriptor (DESC) where their strides allow it, by
pointers otherwise; with PERSISTENT a fixed grid walks over the tiles. JOIN makes one product of the gate and up halves of one tensor: a
descriptor with four dimensions shows both as one block of 2 BN rows, so a tile is a single 256 wide wgmma, whose columns c and BN + c
are in the same thread when the activation wants them.

Group order, descriptors for weights and the epilogue in registers are ideas of vLLM's fused_moe, SGLang and triton_kernels; the code is
our own.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.functions import (
    after_previous,
    expert_base,
    gated,
    index,
    let_next_start,
    pointwise,
    rounded,
    store_rows,
    tile_order,
)


@triton.jit
def weight_tile(
    w, row, col, n, k0, N, limit, stride_n, stride_k, BK: tl.constexpr, DESC: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Weights [BN, BK] of features n and inputs from k0; zero outside (a descriptor may show other experts in rows that are not stored).

    DESC "out-in": w is a descriptor of [E * features, inputs], and features begin at row + col; "in-out": of [E * inputs, features], inputs
    begin at row, features at col; "apart ...": of an expert's own matrix, ``row`` steps behind the beginning (``operands.py``); else w is a
    pointer to the expert's first feature.
    """
    if DESC == "out-in":
        v = w.load([row + col, k0])
    elif DESC == "in-out":
        v = tl.trans(w.load([row + k0, col]))
    elif DESC == "apart out-in":
        v = tl.reshape(w.load([(row >> 30).to(tl.int32), (row & 0x3FFFFFFF).to(tl.int32), col, k0]), [n.shape[0], BK])
    elif DESC == "apart in-out":
        v = tl.trans(tl.reshape(w.load([(row >> 30).to(tl.int32), (row & 0x3FFFFFFF).to(tl.int32), k0, col]), [BK, n.shape[0]]))
    else:
        k = k0 + tl.arange(0, BK)
        at = w + index(n, WIDE)[:, None] * stride_n + index(k, WIDE)[None, :] * stride_k
        if EVEN_N and EVEN_K:
            v = tl.load(at)
        elif EVEN_K:
            v = tl.load(at, mask=n[:, None] < N, other=0.0)
        elif EVEN_N:
            v = tl.load(at, mask=k[None, :] < limit, other=0.0)
        else:
            v = tl.load(at, mask=(n[:, None] < N) & (k[None, :] < limit), other=0.0)
    return v


@triton.jit
def first_row(steps, e, rows, DESC: tl.constexpr):
    """Where expert e begins in what a descriptor shows: ``rows`` per expert, or the steps of a table."""
    if DESC == "apart out-in" or DESC == "apart in-out":
        row = tl.load(steps + e)
    else:
        row = e * rows
    return row


@triton.jit
def row_tile(at, live, k0, limit, stride, BK: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, REPEAT: tl.constexpr):
    """Rows [BM, BK] from inputs k0; ``at`` [BM, 1] points to the first element of each row; zero outside.

    REPEAT: rows that are not live point to some live row, whose product is not stored, so that no load needs a mask.
    """
    k = k0 + tl.arange(0, BK)
    at = at + index(k, WIDE)[None, :] * stride
    if EVEN and REPEAT:
        v = tl.load(at)
    elif EVEN:
        v = tl.load(at, mask=live[:, None], other=0.0)
    elif REPEAT:
        v = tl.load(at, mask=k[None, :] < limit, other=0.0)
    else:
        v = tl.load(at, mask=live[:, None] & (k[None, :] < limit), other=0.0)
    return v


@triton.jit
def multiply(a, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a [BM, BK] w [BN, BK]^T; with SWAP acc is [BN, BM]."""
    if SWAP:
        r = tl.dot(w, tl.trans(a), acc, input_precision=PRECISION)
    else:
        r = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)
    return r


@triton.jit
def finished(acc, b, e, first, n, N, stride_e, stride_n, dtype: tl.constexpr, TABLE: tl.constexpr, HAS: tl.constexpr, SWAP: tl.constexpr):
    """acc as [BM, BN], plus the bias of features first + n of expert e."""
    if SWAP:
        acc = tl.trans(acc)
    if HAS:
        base = expert_base(b, e, stride_e, dtype, TABLE, False)
        acc += tl.load(base + (first + n).to(tl.int64) * stride_n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    return acc


@triton.jit
def activated(
    acc, acc_b, e, n, features, b_a, b_b, arg0, arg1, stride_bae, stride_ban, stride_bbe, stride_bbn, first_a, first_b,
    dtype: tl.constexpr, GATING: tl.constexpr, UP_FIRST: tl.constexpr, ACT: tl.constexpr, BIAS_A: tl.constexpr, BIAS_B: tl.constexpr,
    BIAS_TABLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr, JOIN: tl.constexpr,
):  # fmt: skip
    """What a tile of h holds [BM, BN], float32: the activation of both sums, each with its bias and rounded to storage."""
    if JOIN:
        acc, acc_b = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), (0, 2, 1)))
        if UP_FIRST:
            acc, acc_b = acc_b, acc
    first = finished(acc, b_a, e, first_a, n, features, stride_bae, stride_ban, dtype, BIAS_TABLE, BIAS_A, SWAP)
    first = rounded(first, dtype)
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    if GATING == "plain":
        out = pointwise(first, ACT, FAST)
    elif GATING == "interleaved":
        gate, up = tl.split(tl.reshape(first, [BM, BN, 2]))
        if UP_FIRST:
            gate, up = up, gate
        out = gated(gate, up, arg0, arg1, ACT, FAST)
    else:
        second = finished(acc_b, b_b, e, first_b, n, features, stride_bbe, stride_bbn, dtype, BIAS_TABLE, BIAS_B, SWAP)
        out = gated(first, rounded(second, dtype), arg0, arg1, ACT, FAST)
    return out


@triton.jit
def up_tile(
    e, start, rows, block,
    x, weights, w_a, w_b, b_a, b_b, h, h_desc, order, steps_a, steps_b,
    top_k, H, N, arg0, arg1,
    stride_xt, stride_xh, stride_rt, stride_rk,
    stride_ae, stride_an, stride_ak, stride_be, stride_bn, stride_bk, stride_bae, stride_ban, stride_bbe, stride_bbn,
    first_a, first_b, rows_a, rows_b,
    GATING: tl.constexpr, UP_FIRST: tl.constexpr, ACT: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS_A: tl.constexpr,
    BIAS_B: tl.constexpr, BIAS_TABLE: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, DESC: tl.constexpr, ROWS_DESC: tl.constexpr,
    JOIN: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of h: rows [start, start + rows) of expert e, inner features from block * BN."""
    dtype: tl.constexpr = h.dtype.element_ty
    WIDTH: tl.constexpr = 2 * BN if GATING == "interleaved" else BN
    REPEAT: tl.constexpr = BM >= 64
    r = tl.arange(0, BM)
    live = r < rows
    if not ROWS_DESC:
        if REPEAT:
            slot = tl.load(order + start + tl.minimum(r, rows - 1))
        else:
            slot = tl.load(order + start + r, mask=live, other=0)
        token = (slot // top_k).to(tl.int64)
        at_x = x + token[:, None] * stride_xt
    if SCALE:
        scale = tl.load(weights + token * stride_rt + (slot % top_k).to(tl.int64) * stride_rk, mask=live, other=0.0).to(tl.float32)
    features = 2 * N if GATING == "interleaved" else N
    n = block * WIDTH + tl.arange(0, WIDTH)
    row_a = first_row(steps_a, e, rows_a, DESC)
    row_b = row_a if GATING != "halves" else first_row(steps_b, e, rows_b, DESC)
    col_a = first_a + block * WIDTH
    col_b = first_b + block * WIDTH
    base_a = w_a
    base_b = w_b
    if DESC == "":
        base_a = expert_base(w_a, e, stride_ae, dtype, TABLE, ALIGNED) + index(first_a, True) * stride_an
        if GATING == "halves":
            base_b = expert_base(w_b, e, stride_be, dtype, TABLE, ALIGNED) + index(first_b, True) * stride_bn
    ACC: tl.constexpr = 2 * BN if JOIN else WIDTH
    acc = tl.zeros([ACC, BM] if SWAP else [BM, ACC], tl.float32)
    acc_b = tl.zeros([WIDTH, BM] if SWAP else [BM, WIDTH], tl.float32)
    for k0 in tl.range(0, H, BK):
        if ROWS_DESC:
            # Rows past the tile belong to other tiles or to nobody: they make rows of acc that are not stored.
            a = x.load([start, k0])
        else:
            a = row_tile(at_x, live, k0, H, stride_xh, BK, WIDE, EVEN_K, REPEAT)
        if SCALE:
            a = (a.to(tl.float32) * scale[:, None]).to(dtype)
        if JOIN:
            both = tl.reshape(w_a.load([e, 0, block * BN, k0]), [2 * BN, BK])
            acc = tl.dot(a, tl.trans(both), acc, input_precision=PRECISION)
        else:
            va = weight_tile(base_a, row_a, col_a, n, k0, features, H, stride_an, stride_ak, BK, DESC, WIDE, EVEN_N, EVEN_K)
            acc = multiply(a, va, acc, SWAP, PRECISION)
            if GATING == "halves":
                vb = weight_tile(base_b, row_b, col_b, n, k0, features, H, stride_bn, stride_bk, BK, DESC, WIDE, EVEN_N, EVEN_K)
                acc_b = multiply(a, vb, acc_b, SWAP, PRECISION)
    out = activated(
        acc, acc_b, e, n, features, b_a, b_b, arg0, arg1, stride_bae, stride_ban, stride_bbe, stride_bbn, first_a, first_b, dtype,
        GATING, UP_FIRST, ACT, BIAS_A, BIAS_B, BIAS_TABLE, BM, BN, SWAP, JOIN,
    )  # fmt: skip
    if STORE:
        store_rows(h_desc, out.to(dtype), start, tl.minimum(rows, BM), block * BN, BM, BN, STORE)
    else:
        col = block * BN + tl.arange(0, BN)
        at_h = h + (start + r).to(tl.int64)[:, None] * N + col[None, :]
        tl.store(at_h, out.to(dtype), mask=live[:, None] & (col[None, :] < N))


@triton.jit(do_not_specialize=["max_tiles"])
def up_tiles(
    x, weights, w_a, w_b, b_a, b_b, h, h_desc, order, offsets, tiles, num_tiles, steps_a, steps_b, max_tiles,
    top_k, H, N, arg0, arg1,
    stride_xt, stride_xh, stride_rt, stride_rk,
    stride_ae, stride_an, stride_ak, stride_be, stride_bn, stride_bk, stride_bae, stride_ban, stride_bbe, stride_bbn,
    first_a, first_b, rows_a, rows_b,
    GATING: tl.constexpr, UP_FIRST: tl.constexpr, ACT: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS_A: tl.constexpr,
    BIAS_B: tl.constexpr, BIAS_TABLE: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, DESC: tl.constexpr,
    ROWS_DESC: tl.constexpr, JOIN: tl.constexpr, TAIL: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
    STORE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """h [S, N], sorted rows: activation(x W_a^T + b_a, x W_b^T + b_b), rounded to storage after each step.

    GATING "halves": gate rows from feature first_a of w_a, up rows from feature first_b of w_b; "interleaved": both alternate in w_a;
    "plain": w_a only. rows_a, rows_b: features per expert in the tensors that the descriptors show. UP_FIRST (interleaved, JOIN): the up
    feature comes before the gate's. ROWS_DESC: x is a descriptor of the rows in sorted order, already scaled; else rows are gathered from
    x [T, H] while they are loaded. STORE: tiles are stored through h_desc, in so many blocks of columns.
    """
    after_previous(PDL)
    let_next_start(PDL)
    count = tl.load(num_tiles)
    blocks = tl.cdiv(N, BN)
    last = count * blocks if PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=FLATTEN):
        tile, block = tile_order(i, count, blocks, GROUP)
        e = tl.load(tiles + tile)
        start = tl.load(tiles + max_tiles + tile)
        rows = tl.load(offsets + e + 1) - start
        if TAIL and rows <= BM // 2:
            up_tile(
                e, start, rows, block, x, weights, w_a, w_b, b_a, b_b, h, h_desc, order, steps_a, steps_b, top_k, H, N, arg0, arg1,
                stride_xt, stride_xh, stride_rt, stride_rk,
                stride_ae, stride_an, stride_ak, stride_be, stride_bn, stride_bk, stride_bae, stride_ban, stride_bbe, stride_bbn,
                first_a, first_b, rows_a, rows_b,
                GATING, UP_FIRST, ACT, TABLE, ALIGNED, BIAS_A, BIAS_B, BIAS_TABLE, SCALE, WIDE, EVEN_N, EVEN_K,
                BM // 2, BN, BK, SWAP, DESC, ROWS_DESC, JOIN, 0, PRECISION,
            )  # fmt: skip
        else:
            up_tile(
                e, start, rows, block, x, weights, w_a, w_b, b_a, b_b, h, h_desc, order, steps_a, steps_b, top_k, H, N, arg0, arg1,
                stride_xt, stride_xh, stride_rt, stride_rk,
                stride_ae, stride_an, stride_ak, stride_be, stride_bn, stride_bk, stride_bae, stride_ban, stride_bbe, stride_bbn,
                first_a, first_b, rows_a, rows_b,
                GATING, UP_FIRST, ACT, TABLE, ALIGNED, BIAS_A, BIAS_B, BIAS_TABLE, SCALE, WIDE, EVEN_N, EVEN_K,
                BM, BN, BK, SWAP, DESC, ROWS_DESC, JOIN, STORE, PRECISION,
            )  # fmt: skip


@triton.jit
def down_tile(
    e, start, rows, block, h, h_desc, w, b, y, y_desc, order, steps, I, N, rows_w, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, BIAS_TABLE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, DESC: tl.constexpr,
    ROWS_DESC: tl.constexpr, STORE: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of y: rows [start, start + rows) of expert e, output features from block * BN."""
    dtype: tl.constexpr = y.dtype.element_ty
    REPEAT: tl.constexpr = BM >= 64
    r = tl.arange(0, BM)
    live = r < rows
    n = block * BN + tl.arange(0, BN)
    row_w = first_row(steps, e, rows_w, DESC)
    base = w
    if DESC == "":
        base = expert_base(w, e, stride_we, dtype, TABLE, ALIGNED)
    at_h = h + (start + (tl.minimum(r, rows - 1) if REPEAT else r)).to(tl.int64)[:, None] * I
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k0 in tl.range(0, I, BK):
        if ROWS_DESC:
            a = h_desc.load([start, k0])
        else:
            a = row_tile(at_h, live, k0, I, 1, BK, False, EVEN_K, REPEAT)
        v = weight_tile(base, row_w, block * BN, n, k0, N, I, stride_wn, stride_wk, BK, DESC, WIDE, EVEN_N, EVEN_K)
        acc = multiply(a, v, acc, SWAP, PRECISION)
    out = finished(acc, b, e, 0, n, N, stride_be, stride_bn, dtype, BIAS_TABLE, BIAS, SWAP)
    if STORE:
        store_rows(y_desc, out.to(dtype), start, tl.minimum(rows, BM), block * BN, BM, BN, STORE)
    else:
        at = start + r if SORTED else tl.load(order + start + r, mask=live, other=0)
        at_y = y + at.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at_y, out.to(dtype), mask=live[:, None] & (n[None, :] < N))


@triton.jit(do_not_specialize=["max_tiles"])
def down_tiles(
    h, h_desc, w, b, y, y_desc, order, offsets, tiles, num_tiles, steps, max_tiles,
    I, N, rows_w, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, BIAS_TABLE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr,
    DESC: tl.constexpr, ROWS_DESC: tl.constexpr, TAIL: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
    STORE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [S, N]: h W^T + b, rounded, in slot order, with STORE in sorted order; rows of slots with an invalid id are not written."""
    after_previous(PDL)
    let_next_start(PDL)
    count = tl.load(num_tiles)
    blocks = tl.cdiv(N, BN)
    last = count * blocks if PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=FLATTEN):
        tile, block = tile_order(i, count, blocks, GROUP)
        e = tl.load(tiles + tile)
        start = tl.load(tiles + max_tiles + tile)
        rows = tl.load(offsets + e + 1) - start
        if TAIL and rows <= BM // 2:
            down_tile(
                e, start, rows, block, h, h_desc, w, b, y, y_desc, order, steps,
                I, N, rows_w, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
                TABLE, ALIGNED, BIAS, BIAS_TABLE, WIDE, EVEN_N, EVEN_K, BM // 2, BN, BK, SWAP, DESC, False, 0, STORE > 0, PRECISION,
            )  # fmt: skip
        else:
            down_tile(
                e, start, rows, block, h, h_desc, w, b, y, y_desc, order, steps,
                I, N, rows_w, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
                TABLE, ALIGNED, BIAS, BIAS_TABLE, WIDE, EVEN_N, EVEN_K, BM, BN, BK, SWAP, DESC, ROWS_DESC, STORE, False, PRECISION,
            )  # fmt: skip
