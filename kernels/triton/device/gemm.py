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

from moefuse.kernels.triton.device.functions import (
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
from moefuse.kernels.triton.device.structs import Weights


@triton.jit
def weight_tile(w, at, row, col, n, k0, N, limit, stored: tl.constexpr, tiling: tl.constexpr):
    """Weights [BN, BK] of features n and inputs from k0; zero outside (a descriptor may show other experts in rows that are not stored).

    DESC "out-in": w is a descriptor of [E * features, inputs], and features begin at row + col; "in-out": of [E * inputs, features], inputs
    begin at row, features at col; "apart ...": of an expert's own matrix, ``row`` steps behind the beginning (``operands.py``); else w is a
    pointer to the expert's first feature.
    """
    BK: tl.constexpr = tiling.BK
    if stored.DESC == "out-in":
        v = w.load([row + col, k0])  # [BN, BK]
    elif stored.DESC == "in-out":
        v = tl.trans(w.load([row + k0, col]))  # [BK, BN]
    elif stored.DESC == "apart out-in":
        v = w.load([(row >> 30).to(tl.int32), (row & 0x3FFFFFFF).to(tl.int32), col, k0])  # [1, 1, BN, BK]
        v = tl.reshape(v, [n.shape[0], BK])
    elif stored.DESC == "apart in-out":
        v = w.load([(row >> 30).to(tl.int32), (row & 0x3FFFFFFF).to(tl.int32), k0, col])  # [1, 1, BK, BN]
        v = tl.trans(tl.reshape(v, [BK, n.shape[0]]))
    else:
        k = k0 + tl.arange(0, BK)
        from_w = w + index(n, stored.WIDE)[:, None] * at.stride_n + index(k, stored.WIDE)[None, :] * at.stride_k
        if tiling.EVEN_N and tiling.EVEN_K:
            v = tl.load(from_w)  # [BN, BK]
        elif tiling.EVEN_K:
            v = tl.load(from_w, mask=n[:, None] < N, other=0.0)  # [BN, BK]
        elif tiling.EVEN_N:
            v = tl.load(from_w, mask=k[None, :] < limit, other=0.0)  # [BN, BK]
        else:
            v = tl.load(from_w, mask=(n[:, None] < N) & (k[None, :] < limit), other=0.0)  # [BN, BK]
    return v


@triton.jit
def first_row(steps, e, rows, DESC: tl.constexpr):
    """Where expert e begins in what a descriptor shows: ``rows`` per expert, or the steps of a table."""
    if DESC == "apart out-in" or DESC == "apart in-out":
        row = tl.load(steps + e)  # []
    else:
        row = e * rows
    return row


@triton.jit
def row_tile(from_x, live, k0, limit, stride, BK: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, REPEAT: tl.constexpr):
    """Rows [BM, BK] from inputs k0; ``from_x`` [BM, 1] points to the first element of each row; zero outside.

    REPEAT: rows that are not live point to some live row, whose product is not stored, so that no load needs a mask.
    """
    k = k0 + tl.arange(0, BK)
    from_x = from_x + index(k, WIDE)[None, :] * stride
    if EVEN and REPEAT:
        v = tl.load(from_x)  # [BM, BK]
    elif EVEN:
        v = tl.load(from_x, mask=live[:, None], other=0.0)  # [BM, BK]
    elif REPEAT:
        v = tl.load(from_x, mask=k[None, :] < limit, other=0.0)  # [BM, BK]
    else:
        v = tl.load(from_x, mask=live[:, None] & (k[None, :] < limit), other=0.0)  # [BM, BK]
    return v


@triton.jit
def multiply(a, w, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a [BM, BK] w [BN, BK]^T; with SWAP acc is [BN, BM]."""
    if SWAP:
        r = tl.dot(w, tl.trans(a), acc, input_precision=PRECISION)  # [BN, BM]
    else:
        r = tl.dot(a, tl.trans(w), acc, input_precision=PRECISION)  # [BM, BN]
    return r


@triton.jit
def finished(acc, weights, e, first, n, N, dtype: tl.constexpr, TABLE: tl.constexpr, HAS: tl.constexpr, SWAP: tl.constexpr):
    """acc as [BM, BN], plus the biases of outputs first + n of expert e."""
    if SWAP:
        acc = tl.trans(acc)
    if HAS:
        base = expert_base(weights.b, e, weights.at.bias_e, dtype, TABLE, False)
        acc += tl.load(base + (first + n).to(tl.int64) * weights.at.bias_n, mask=n < N, other=0.0).to(tl.float32)[None, :]  # [BN]
    return acc


@triton.jit
def activated(
    acc, acc_b, a, b, e, n, features, args, dtype: tl.constexpr, BM: tl.constexpr, form: tl.constexpr, stored: tl.constexpr,
    tiling: tl.constexpr,
):  # fmt: skip
    """What a tile of h holds [BM, BN], float32: the activation of both sums, each with its bias and rounded to storage."""
    BN: tl.constexpr = tiling.BN
    if form.JOIN:
        acc, acc_b = tl.split(tl.permute(tl.reshape(acc, [BM, 2, BN]), (0, 2, 1)))
        if form.UP_FIRST:
            acc, acc_b = acc_b, acc
    first = finished(acc, a, e, a.at.first, n, features, dtype, stored.BIAS_TABLE, stored.BIAS, tiling.SWAP)
    first = rounded(first, dtype)
    ACT: tl.constexpr = form.ACT
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    if form.GATING == "plain":
        out = pointwise(first, ACT, FAST)
    elif form.GATING == "interleaved":
        gate, up = tl.split(tl.reshape(first, [BM, BN, 2]))
        if form.UP_FIRST:
            gate, up = up, gate
        out = gated(gate, up, args[0], args[1], ACT, FAST)
    else:
        second = finished(acc_b, b, e, b.at.first, n, features, dtype, stored.BIAS_TABLE, stored.BIAS_B, tiling.SWAP)
        out = gated(first, rounded(second, dtype), args[0], args[1], ACT, FAST)
    return out


@triton.jit
def up_tile(
    e, start, rows, block, x, weights, a, b, h, h_desc, order, top_k, H, N, args, at_x, at_weights,
    BM: tl.constexpr, STORE: tl.constexpr, form: tl.constexpr, stored: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """One tile of h: rows [start, start + rows) of expert e, inner features from block * BN."""
    dtype: tl.constexpr = h.dtype.element_ty
    DESC: tl.constexpr = stored.DESC
    BN: tl.constexpr = tiling.BN
    BK: tl.constexpr = tiling.BK
    SWAP: tl.constexpr = tiling.SWAP
    PRECISION: tl.constexpr = tiling.PRECISION
    INTERLEAVED: tl.constexpr = form.GATING == "interleaved"
    HALVES: tl.constexpr = form.GATING == "halves"
    WIDTH: tl.constexpr = 2 * BN if INTERLEAVED else BN
    REPEAT: tl.constexpr = BM >= 64
    r = tl.arange(0, BM)
    live = r < rows
    if not tiling.ROWS_DESC:
        if REPEAT:
            slot = tl.load(order + start + tl.minimum(r, rows - 1))  # [BM]
        else:
            slot = tl.load(order + start + r, mask=live, other=0)  # [BM]
        token = (slot // top_k).to(tl.int64)
        from_x = x + token[:, None] * at_x.row
    if form.SCALE:
        from_weights = weights + token * at_weights.row + (slot % top_k).to(tl.int64) * at_weights.col
        scale = tl.load(from_weights, mask=live, other=0.0).to(tl.float32)  # [BM]
    features = 2 * N if INTERLEAVED else N
    n = block * WIDTH + tl.arange(0, WIDTH)
    row_a = first_row(a.steps, e, a.at.rows, DESC)
    row_b = row_a if not HALVES else first_row(b.steps, e, b.at.rows, DESC)
    col_a = a.at.first + block * WIDTH
    col_b = b.at.first + block * WIDTH
    base_a = a.w
    base_b = b.w
    if DESC == "":
        base_a = expert_base(a.w, e, a.at.stride_e, dtype, stored.TABLE, stored.ALIGNED) + index(a.at.first, True) * a.at.stride_n
        if HALVES:
            base_b = expert_base(b.w, e, b.at.stride_e, dtype, stored.TABLE, stored.ALIGNED) + index(b.at.first, True) * b.at.stride_n
    ACC: tl.constexpr = 2 * BN if form.JOIN else WIDTH
    acc = tl.zeros([ACC, BM] if SWAP else [BM, ACC], tl.float32)
    acc_b = tl.zeros([WIDTH, BM] if SWAP else [BM, WIDTH], tl.float32)
    for k0 in tl.range(0, H, BK):
        if tiling.ROWS_DESC:
            # Rows past the tile belong to other tiles or to nobody: they make rows of acc that are not stored.
            v = x.load([start, k0])  # [BM, BK]
        else:
            v = row_tile(from_x, live, k0, H, at_x.col, BK, stored.WIDE, tiling.EVEN_K, REPEAT)
        if form.SCALE:
            v = (v.to(tl.float32) * scale[:, None]).to(dtype)
        if form.JOIN:
            both = tl.reshape(a.w.load([e, 0, block * BN, k0]), [2 * BN, BK])  # [1, 2, BN, BK]
            acc = tl.dot(v, tl.trans(both), acc, input_precision=PRECISION)  # [BM, 2 * BN]
        else:
            va = weight_tile(base_a, a.at, row_a, col_a, n, k0, features, H, stored, tiling)
            acc = multiply(v, va, acc, SWAP, PRECISION)
            if HALVES:
                vb = weight_tile(base_b, b.at, row_b, col_b, n, k0, features, H, stored, tiling)
                acc_b = multiply(v, vb, acc_b, SWAP, PRECISION)
    out = activated(acc, acc_b, a, b, e, n, features, args, dtype, BM, form, stored, tiling)
    if STORE:
        store_rows(h_desc, out.to(dtype), start, tl.minimum(rows, BM), block * BN, BM, BN, STORE)
    else:
        col = block * BN + tl.arange(0, BN)
        to_h = h + (start + r).to(tl.int64)[:, None] * N + col[None, :]
        tl.store(to_h, out.to(dtype), mask=live[:, None] & (col[None, :] < N))  # [BM, BN]


@triton.jit(do_not_specialize=["max_tiles"])
def up_tiles(
    x, weights, w_a, w_b, b_a, b_b, h, h_desc, order, offsets, tiles, num_tiles, steps_a, steps_b, max_tiles, top_k, H, N, args,
    at_x, at_weights, at_a, at_b, form: tl.constexpr, stored: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """h [S, N], sorted rows: activation(x W_a^T + b_a, x W_b^T + b_b), rounded to storage after each step.

    Gating "halves": gate rows from feature ``first`` of w_a, up rows likewise of w_b; "interleaved": both alternate in w_a; "plain": w_a
    only. Up first (interleaved, JOIN): the up feature comes before the gate's. ROWS_DESC: x is a descriptor of the rows in sorted order,
    already scaled; else rows are gathered from x [T, H] while they are loaded. STORE: tiles are stored through h_desc.
    """
    after_previous(tiling.PDL)
    let_next_start(tiling.PDL)
    BM: tl.constexpr = tiling.BM
    a = Weights(w_a, b_a, steps_a, at_a)
    b = Weights(w_b, b_b, steps_b, at_b)
    count = tl.load(num_tiles)  # []
    blocks = tl.cdiv(N, tiling.BN)
    last = count * blocks if tiling.PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=tiling.FLATTEN):
        tile, block = tile_order(i, count, blocks, tiling.GROUP)
        e = tl.load(tiles + tile)  # []
        start = tl.load(tiles + max_tiles + tile)  # []
        rows = tl.load(offsets + e + 1) - start  # []
        if tiling.TAIL and rows <= BM // 2:
            up_tile(
                e, start, rows, block, x, weights, a, b, h, h_desc, order, top_k, H, N, args, at_x, at_weights, BM // 2, 0, form, stored,
                tiling,
            )  # fmt: skip
        else:
            up_tile(
                e, start, rows, block, x, weights, a, b, h, h_desc, order, top_k, H, N, args, at_x, at_weights, BM, tiling.STORE, form,
                stored, tiling,
            )  # fmt: skip


@triton.jit
def down_tile(
    e, start, rows, block, h, h_desc, w, y, y_desc, order, I, N,
    BM: tl.constexpr, ROWS_DESC: tl.constexpr, STORE: tl.constexpr, SORTED: tl.constexpr, stored: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """One tile of y: rows [start, start + rows) of expert e, output features from block * BN."""
    dtype: tl.constexpr = y.dtype.element_ty
    DESC: tl.constexpr = stored.DESC
    BN: tl.constexpr = tiling.BN
    BK: tl.constexpr = tiling.BK
    SWAP: tl.constexpr = tiling.SWAP
    PRECISION: tl.constexpr = tiling.PRECISION
    REPEAT: tl.constexpr = BM >= 64
    r = tl.arange(0, BM)
    live = r < rows
    n = block * BN + tl.arange(0, BN)
    row_w = first_row(w.steps, e, w.at.rows, DESC)
    base = w.w
    if DESC == "":
        base = expert_base(w.w, e, w.at.stride_e, dtype, stored.TABLE, stored.ALIGNED)
    from_h = h + (start + (tl.minimum(r, rows - 1) if REPEAT else r)).to(tl.int64)[:, None] * I
    acc = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for k0 in tl.range(0, I, BK):
        if ROWS_DESC:
            a = h_desc.load([start, k0])  # [BM, BK]
        else:
            a = row_tile(from_h, live, k0, I, 1, BK, False, tiling.EVEN_K, REPEAT)
        v = weight_tile(base, w.at, row_w, block * BN, n, k0, N, I, stored, tiling)
        acc = multiply(a, v, acc, SWAP, PRECISION)
    out = finished(acc, w, e, 0, n, N, dtype, stored.BIAS_TABLE, stored.BIAS, SWAP)
    if STORE:
        store_rows(y_desc, out.to(dtype), start, tl.minimum(rows, BM), block * BN, BM, BN, STORE)
    else:
        to = start + r if SORTED else tl.load(order + start + r, mask=live, other=0)  # [BM]
        to_y = y + to.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to_y, out.to(dtype), mask=live[:, None] & (n[None, :] < N))  # [BM, BN]


@triton.jit(do_not_specialize=["max_tiles"])
def down_tiles(
    h, h_desc, w, b, y, y_desc, order, offsets, tiles, num_tiles, steps, max_tiles, I, N, at_w, stored: tl.constexpr, tiling: tl.constexpr
):
    """y [S, N]: h W^T + b, rounded, in slot order, with STORE in sorted order; rows of slots with an invalid id are not written."""
    after_previous(tiling.PDL)
    let_next_start(tiling.PDL)
    BM: tl.constexpr = tiling.BM
    STORE: tl.constexpr = tiling.STORE
    each = Weights(w, b, steps, at_w)
    count = tl.load(num_tiles)  # []
    blocks = tl.cdiv(N, tiling.BN)
    last = count * blocks if tiling.PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=tiling.FLATTEN):
        tile, block = tile_order(i, count, blocks, tiling.GROUP)
        e = tl.load(tiles + tile)  # []
        start = tl.load(tiles + max_tiles + tile)  # []
        rows = tl.load(offsets + e + 1) - start  # []
        if tiling.TAIL and rows <= BM // 2:
            down_tile(e, start, rows, block, h, h_desc, each, y, y_desc, order, I, N, BM // 2, False, 0, STORE > 0, stored, tiling)
        else:
            down_tile(
                e, start, rows, block, h, h_desc, each, y, y_desc, order, I, N, BM, tiling.ROWS_DESC, STORE, False, stored, tiling
            )  # fmt: skip
