"""One grouped GEMM on tensor cores, sorted rows in and out: ``linear_tiles``.

It is every product of the grouped tier and of training but the weights' gradients: a projection, and with the strides of the weight
exchanged the gradient of its input. Rows may be read through the order (tokens), optionally times their routing weight. Tiles, descriptors
and the persistent grid are as in ``gemm.py``, which also does the loading. A low-rank term is one more product, of a few inputs, before a
tile is rounded and stored: it costs no pass over the output.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import expert_base, index, store_rows, tile_order
from moefuse.kernels.triton.device.gemm import first_row, row_tile, weight_tile
from moefuse.kernels.triton.device.structs import Weights


@triton.jit
def with_term(acc, u, f, e, row, live, n, N, at_u, at_f, dtype: tl.constexpr, RANK: tl.constexpr, WIDE: tl.constexpr, tiling: tl.constexpr):
    """acc [BM, BN] + u [BM, RANK] f[e] [BN, RANK]^T, both rounded to the dtype of the rows."""
    BR: tl.constexpr = tiling.BR
    for r0 in tl.static_range(0, RANK, BR):
        k = r0 + tl.arange(0, BR)
        from_u = u + row[:, None] * at_u.row + k[None, :] * at_u.col
        a = tl.load(from_u, mask=live[:, None] & (k < RANK)[None, :], other=0.0).to(dtype)  # [BM, BR]
        base = f + e.to(tl.int64) * at_f.stride_e
        from_f = base + index(n, WIDE)[:, None] * at_f.stride_n + k[None, :] * at_f.stride_k
        v = tl.load(from_f, mask=(n < N)[:, None] & (k < RANK)[None, :], other=0.0).to(dtype)  # [BN, BR]
        acc = tl.dot(a, tl.trans(v), acc, input_precision=tiling.PRECISION, out_dtype=acc.dtype)  # [BM, BN]
    return acc


@triton.jit
def linear_tile(
    e, start, rows, block, x, x_desc, w, weights, order, u, f, out, out_desc, top_k, K, N, at_x, at_weights, at_u, at_f, stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, stored: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """One tile of out: rows [start, start + rows) of expert e, output features from block * BN."""
    dtype: tl.constexpr = x.dtype.element_ty
    wide: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    held: tl.constexpr = tl.float32 if stored.HELD else dtype
    DESC: tl.constexpr = stored.DESC
    BM: tl.constexpr = tiling.BM
    BN: tl.constexpr = tiling.BN
    r = tl.arange(0, BM)
    live = r < rows
    row = (start + r).to(tl.int64)
    n = block * BN + tl.arange(0, BN)
    REPEAT: tl.constexpr = BM >= 64
    from_row = start + (tl.minimum(r, rows - 1) if REPEAT else r)
    if GATHER:
        slot = tl.load(order + from_row, mask=live | REPEAT, other=0).to(tl.int64)  # [BM]
        token = slot // top_k
        from_x = x + token[:, None] * at_x.row
        if SCALE:
            scale = tl.load(weights + token * at_weights.row + (slot % top_k) * at_weights.col, mask=live, other=0.0).to(wide)  # [BM]
    else:
        from_x = x + from_row.to(tl.int64)[:, None] * at_x.row
    row_w = first_row(w.steps, e, w.at.rows, DESC)
    base = w.w
    if DESC == "":
        base = expert_base(w.w, e, w.at.stride_e, held, stored.TABLE, stored.ALIGNED)
    acc = tl.zeros([BM, BN], wide)
    for k0 in tl.range(0, K, tiling.BK):
        if tiling.ROWS_DESC:
            # Rows past the tile belong to other tiles or to nobody: they make rows of acc that are not stored.
            a = x_desc.load([start, k0])  # [BM, BK]
        else:
            a = row_tile(from_x, live, k0, K, at_x.col, tiling.BK, stored.WIDE, tiling.EVEN_K, REPEAT)
        if SCALE:
            a = (a.to(wide) * scale[:, None]).to(dtype)
        v = weight_tile(base, w.at, row_w, block * BN, n, k0, N, K, stored, tiling).to(dtype)
        acc = tl.dot(a, tl.trans(v), acc, input_precision=tiling.PRECISION, out_dtype=wide)  # [BM, BN]
    if RANK:
        acc = with_term(acc, u, f, e, from_row.to(tl.int64), live, n, N, at_u, at_f, dtype, RANK, stored.WIDE, tiling)
    if stored.BIAS:
        bias = expert_base(w.b, e, w.at.bias_e, held, stored.BIAS_TABLE, False)
        acc += tl.load(bias + n.to(tl.int64) * w.at.bias_n, mask=n < N, other=0.0).to(dtype).to(wide)[None, :]  # [BN]
    value = acc.to(out.dtype.element_ty)
    if tiling.STORE:
        store_rows(out_desc, value, start, tl.minimum(rows, BM), block * BN, BM, BN, tiling.STORE)
    else:
        to = out + row[:, None] * stride_or + n[None, :]
        mask = live[:, None] & (n < N)[None, :]
        if ADD:
            value = (tl.load(to, mask=mask, other=0.0).to(wide) + value.to(wide)).to(out.dtype.element_ty)  # [BM, BN]
        tl.store(to, value, mask=mask)  # [BM, BN]


@triton.jit(do_not_specialize=["max_tiles"])
def linear_tiles(
    x, x_desc, w, b, weights, order, u, f, out, out_desc, offsets, tiles, num_tiles, steps, max_tiles, top_k, K, N, at_w, at_x, at_weights,
    at_u, at_f, stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, RANK: tl.constexpr, stored: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """out [S, N] (row stride stride_or): rows of x times w[e]^T plus b[e], rounded once to storage. Dead rows are not written.

    RANK: plus rows of u [S, RANK] times f[e] [N, RANK]^T, before it is rounded.

    GATHER: row i is token order[i] // top_k of x; SCALE: times its routing weight, rounded to storage. ADD: the rounded product is added
    to what out holds, which is rounded again. STORE: tiles are stored through out_desc.
    """
    each = Weights(w, b, steps, at_w)
    count = tl.load(num_tiles)  # []
    blocks = tl.cdiv(N, tiling.BN)
    last = count * blocks if tiling.PERSISTENT else tl.minimum(tl.program_id(0) + 1, count * blocks)
    for i in tl.range(tl.program_id(0), last, tl.num_programs(0), flatten=tiling.FLATTEN):
        tile, block = tile_order(i, count, blocks, tiling.GROUP)
        e = tl.load(tiles + tile)  # []
        start = tl.load(tiles + max_tiles + tile)  # []
        rows = tl.load(offsets + e + 1).to(tl.int32) - start  # []
        linear_tile(
            e, start, rows, block, x, x_desc, each, weights, order, u, f, out, out_desc, top_k, K, N, at_x, at_weights, at_u, at_f,
            stride_or, GATHER, SCALE, ADD, RANK, stored, tiling,
        )  # fmt: skip
