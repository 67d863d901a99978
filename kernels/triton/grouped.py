"""One grouped GEMM on tensor cores, sorted rows in and out: ``linear_tiles``.

It is every product of the grouped tier and of training but the weights' gradients: a projection, and with the strides of the weight
exchanged the gradient of its input. Rows may be read through the order (tokens), optionally times their routing weight. Tiles, descriptors
and the persistent grid are as in ``gemm.py``, which also does the loading.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.functions import expert_base, store_rows, tile_order
from moefuse.kernels.triton.gemm import first_row, row_tile, weight_tile


@triton.jit
def linear_tile(
    e, start, rows, block,
    x, x_desc, w, b, weights, order, out, out_desc, steps,
    top_k, K, N, rows_w, stride_xr, stride_xk, stride_rt, stride_rk, stride_we, stride_wn, stride_wk, stride_be, stride_bn, stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    BIAS_TABLE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, DESC: tl.constexpr, ROWS_DESC: tl.constexpr, STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of out: rows [start, start + rows) of expert e, output features from block * BN."""
    dtype: tl.constexpr = out.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    r = tl.arange(0, BM)
    live = r < rows
    row = (start + r).to(tl.int64)
    n = block * BN + tl.arange(0, BN)
    REPEAT: tl.constexpr = BM >= 64
    from_row = start + (tl.minimum(r, rows - 1) if REPEAT else r)
    if GATHER:
        slot = tl.load(order + from_row, mask=live | REPEAT, other=0).to(tl.int64)
        token = slot // top_k
        at_x = x + token[:, None] * stride_xr
        if SCALE:
            scale = tl.load(weights + token * stride_rt + (slot % top_k) * stride_rk, mask=live, other=0.0).to(wide)
    else:
        at_x = x + from_row.to(tl.int64)[:, None] * stride_xr
    row_w = first_row(steps, e, rows_w, DESC)
    base = w
    if DESC == "":
        base = expert_base(w, e, stride_we, dtype, TABLE, ALIGNED)
    acc = tl.zeros([BM, BN], wide)
    for k0 in tl.range(0, K, BK):
        if ROWS_DESC:
            # Rows past the tile belong to other tiles or to nobody: they make rows of acc that are not stored.
            a = x_desc.load([start, k0])
        else:
            a = row_tile(at_x, live, k0, K, stride_xk, BK, WIDE, EVEN_K, REPEAT)
        if SCALE:
            a = (a.to(wide) * scale[:, None]).to(dtype)
        v = weight_tile(base, row_w, block * BN, n, k0, N, K, stride_wn, stride_wk, BK, DESC, WIDE, EVEN_N, EVEN_K)
        acc = tl.dot(a, tl.trans(v), acc, input_precision=PRECISION, out_dtype=wide)
    if BIAS:
        bias = expert_base(b, e, stride_be, dtype, BIAS_TABLE, False)
        acc += tl.load(bias + n.to(tl.int64) * stride_bn, mask=n < N, other=0.0).to(wide)[None, :]
    value = acc.to(dtype)
    if STORE:
        store_rows(out_desc, value, start, tl.minimum(rows, BM), block * BN, BM, BN, STORE)
    else:
        at = out + row[:, None] * stride_or + n[None, :]
        mask = live[:, None] & (n < N)[None, :]
        if ADD:
            value = (tl.load(at, mask=mask, other=0.0).to(wide) + value.to(wide)).to(dtype)
        tl.store(at, value, mask=mask)


@triton.jit(do_not_specialize=["max_tiles"])
def linear_tiles(
    x, x_desc, w, b, weights, order, out, out_desc, offsets, tiles, num_tiles, steps,
    max_tiles, top_k, K, N, rows_w, stride_xr, stride_xk, stride_rt, stride_rk, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, TABLE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    BIAS_TABLE: tl.constexpr, WIDE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, DESC: tl.constexpr, ROWS_DESC: tl.constexpr, PERSISTENT: tl.constexpr, FLATTEN: tl.constexpr,
    STORE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [S, N] (row stride stride_or): rows of x times w[e]^T plus b[e], rounded once to storage. Dead rows are not written.

    GATHER: row i is token order[i] // top_k of x; SCALE: times its routing weight, rounded to storage. ADD: the rounded product is added
    to what out holds, which is rounded again. STORE: tiles are stored through out_desc, in so many blocks of columns.
    """
    count = tl.load(num_tiles)
    blocks = tl.cdiv(N, BN)
    last = count * blocks if PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=FLATTEN):
        tile, block = tile_order(i, count, blocks, GROUP)
        e = tl.load(tiles + tile)
        start = tl.load(tiles + max_tiles + tile)
        rows = tl.load(offsets + e + 1).to(tl.int32) - start
        linear_tile(
            e, start, rows, block, x, x_desc, w, b, weights, order, out, out_desc, steps,
            top_k, K, N, rows_w, stride_xr, stride_xk, stride_rt, stride_rk, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
            stride_or, GATHER, SCALE, ADD, TABLE, ALIGNED, BIAS, BIAS_TABLE, WIDE, EVEN_N, EVEN_K, BM, BN, BK, DESC, ROWS_DESC, STORE,
            PRECISION,
        )  # fmt: skip
