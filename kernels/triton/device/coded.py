"""One grouped GEMM on tensor cores whose weights are quantised: ``coded_tiles``, and how a block of them is read.

A block is read as codes, becomes what the program makes of it (``ops/meaning/encoding.py``, with the same rounding after each step, so the
same bits), and is multiplied; nothing unpacked is ever written. With BACK the product is with the transpose: rows of gradients come in,
and inputs are what leaves.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import expert_base, index, tile_order
from moefuse.kernels.triton.device.gemm import row_tile


@triton.jit
def number_of(code, coding: tl.constexpr):
    """What codes stand for, in float32; ``code`` is int32: four bits, or a byte."""
    KIND: tl.constexpr = coding.KIND
    if KIND == "e4m3" and coding.FLOAT8:
        v = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(tl.float32)
    elif KIND == "e4m3":
        magnitude = code & 0x7F
        v = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the difference of the exponents' biases
        v = tl.where(magnitude == 0x7F, float("nan"), v)
        v = tl.where(code > 0x7F, -v, v)
    elif KIND == "e5m2":
        v = (code << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    elif KIND == "s8":
        v = code.to(tl.int8).to(tl.float32)
    elif KIND == "range":
        v = (code + coding.FIRST).to(tl.float32)
    elif KIND == "s4":
        v = ((code ^ 8) - 8).to(tl.float32)
    elif KIND == "e2m1":
        magnitude = code & 7
        normal = (((magnitude >> 1) + 126 << 23) | ((magnitude & 1) << 22)).to(tl.float32, bitcast=True)
        v = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
        v = tl.where(code > 7, -v, v)
    else:
        tl.static_assert(KIND == "table")
        v = tl.zeros(code.shape, tl.float32)
        for i in tl.static_range(16):
            v = tl.where(code == i, coding.TABLE[i], v)
    return v


@triton.jit
def factor_of(byte):
    """2^(b - 127) of bytes, float32; inf for 255."""
    b = byte.to(tl.int32)
    return tl.where(b == 0, 1 << 22, b << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(v, scale, coding: tl.constexpr):
    """Numbers times their scales, float32, as ``encoding.dequantise`` has them."""
    if coding.SCALE == "":
        v = v * scale.to(coding.ARITH).to(tl.float32)
    elif coding.SCALE == "ldexp":
        # The largest power is no number of its own, its products may be.
        b = tl.minimum(scale.to(tl.int32), 254)
        v = v * factor_of(b) * tl.where(scale.to(tl.int32) == 255, 2.0, 1.0)
    else:
        by = factor_of(scale)
        if coding.SCALE == "e8m0":
            by = tl.where(scale.to(tl.int32) == 255, float("nan"), by)
        v = v * by.to(coding.ARITH).to(tl.float32)
    return v


@triton.jit
def words(w, at, row, col, ROWS, COLS, NR: tl.constexpr, NC: tl.constexpr, coding: tl.constexpr):
    """Storage [NR, NC] from a row and a column on, int32; 0 outside [ROWS, COLS]."""
    r = row + tl.arange(0, NR)
    c = col + tl.arange(0, NC)
    place = w + index(r, coding.WIDE)[:, None] * at.stride_n + index(c, coding.WIDE)[None, :] * at.stride_k
    if coding.EVEN:
        v = tl.load(place)  # [NR, NC]
    else:
        v = tl.load(place, mask=(r < ROWS)[:, None] & (c < COLS)[None, :], other=0)  # [NR, NC]
    return v.to(tl.int32)


@triton.jit
def part_of(v, J: tl.constexpr, coding: tl.constexpr):
    """The codes at place J of each number."""
    return (v >> ((coding.ORDER >> (4 * J)) & 15) * 4) & 15


@triton.jit
def apart(v, coding: tl.constexpr):
    """All codes of numbers [R, C], in their order along the last dimension: [R, C * PER]. Each stays in the thread that has its number."""
    if coding.PER == 2:
        v = tl.join(part_of(v, 0, coding), part_of(v, 1, coding))
    else:
        tl.static_assert(coding.PER == 8)
        even = tl.join(tl.join(part_of(v, 0, coding), part_of(v, 4, coding)), tl.join(part_of(v, 2, coding), part_of(v, 6, coding)))
        odd = tl.join(tl.join(part_of(v, 1, coding), part_of(v, 5, coding)), tl.join(part_of(v, 3, coding), part_of(v, 7, coding)))
        v = tl.join(even, odd)  # [R, C, 4 * (j >> 2), 2 * (j >> 1 & 1), j & 1]
    return v


@triton.jit
def codes(w, at, f0, i0, F, I, NF: tl.constexpr, NI: tl.constexpr, coding: tl.constexpr):
    """Codes [NF, NI] of features from f0 and inputs from i0 on, int32; f0 and i0 are multiples of NF and NI."""
    PER: tl.constexpr = coding.PER
    if PER == 1:
        v = words(w, at, f0, i0, F, I, NF, NI, coding) & 0xFF
    elif coding.HALVES and coding.AXIS == 0:
        part = F // PER
        v = words(w, at, f0 % part, i0, part, I, NF, NI, coding) >> (((coding.ORDER >> (4 * (f0 // part))) & 15) * 4)
        v = v & 15
    elif coding.HALVES:
        part = I // PER
        v = words(w, at, f0, i0 % part, F, part, NF, NI, coding) >> (((coding.ORDER >> (4 * (i0 // part))) & 15) * 4)
        v = v & 15
    elif coding.AXIS == 1:
        v = apart(words(w, at, f0, i0 // PER, F, I // PER, NF, NI // PER, coding), coding)
        v = tl.reshape(v, [NF, NI])
    else:
        v = apart(words(w, at, f0 // PER, i0, F // PER, I, NF // PER, NI, coding), coding)
        v = tl.permute(v, (0, 2, 1)) if PER == 2 else tl.permute(v, (0, 2, 3, 4, 1))
        v = tl.reshape(v, [NF, NI])
    return v


@triton.jit
def per_block(p, at, f0, i0, F, I, NF: tl.constexpr, NI: tl.constexpr, coding: tl.constexpr):
    """Numbers of the blocks of features from f0 and inputs from i0 on, [NF, 1] or [NF, NI]."""
    BLOCK_N: tl.constexpr = coding.BLOCK_N
    BLOCK_K: tl.constexpr = coding.BLOCK_K
    f = tl.minimum(f0 + tl.arange(0, NF), F - 1)
    rows = p + (f // BLOCK_N if BLOCK_N > 0 else f * 0)[:, None] * at.stride_n
    if BLOCK_K == 0:
        v = tl.load(rows)  # [NF, 1]
    elif BLOCK_K % NI == 0:
        v = tl.load(rows + i0 // BLOCK_K * at.stride_k)  # [NF, 1]
    elif NI % BLOCK_K == 0:
        GROUPS: tl.constexpr = NI // BLOCK_K
        g = tl.minimum(i0 // BLOCK_K + tl.arange(0, GROUPS), (I - 1) // BLOCK_K)
        v = tl.load(rows + g[None, :] * at.stride_k)  # [NF, GROUPS]
        v = tl.reshape(tl.broadcast_to(v[:, :, None], [NF, GROUPS, BLOCK_K]), [NF, NI])
    else:
        i = tl.minimum(i0 + tl.arange(0, NI), I - 1)
        v = tl.load(rows + (i // BLOCK_K)[None, :] * at.stride_k)  # [NF, NI]
    return v


@triton.jit
def coded_block(w, s, z, at_w, at_s, at_z, f0, i0, F, I, dtype: tl.constexpr, NF: tl.constexpr, NI: tl.constexpr, coding: tl.constexpr):
    """Weights [NF, NI] of one expert in ``dtype``, from feature f0 and input i0 on; zero outside [F, I]."""
    ARITH: tl.constexpr = coding.ARITH
    v = number_of(codes(w, at_w, f0, i0, F, I, NF, NI, coding), coding)
    if coding.ZERO:
        v = (v - per_block(z, at_z, f0, i0, F, I, NF, NI, coding).to(tl.float32)).to(ARITH).to(tl.float32)
    v = scaled(v, per_block(s, at_s, f0, i0, F, I, NF, NI, coding), coding).to(ARITH)
    if not coding.EVEN:
        inside = (f0 + tl.arange(0, NF) < F)[:, None] & (i0 + tl.arange(0, NI) < I)[None, :]
        v = tl.where(inside, v, tl.zeros([NF, NI], ARITH))
    return v.to(dtype)


@triton.jit
def coded_tile(
    e, start, rows, block, x, w, s, z, b, weights, order, out, top_k, F, I, at_x, at_w, at_s, at_z, at_weights, stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, BACK: tl.constexpr, coding: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """One tile of out: rows [start, start + rows) of expert e, columns from block * BN."""
    dtype: tl.constexpr = x.dtype.element_ty
    BM: tl.constexpr = tiling.BM
    BN: tl.constexpr = tiling.BN
    BK: tl.constexpr = tiling.BK
    TABLE: tl.constexpr = coding.APART
    WIDE: tl.constexpr = coding.WIDE
    REPEAT: tl.constexpr = BM >= 64
    r = tl.arange(0, BM)
    live = r < rows
    from_row = start + (tl.minimum(r, rows - 1) if REPEAT else r)
    if GATHER:
        slot = tl.load(order + from_row, mask=live | REPEAT, other=0).to(tl.int64)  # [BM]
        token = slot // top_k
        from_x = x + token[:, None] * at_x.row
        if SCALE:
            scale = tl.load(weights + token * at_weights.row + (slot % top_k) * at_weights.col, mask=live, other=0.0).to(tl.float32)
    else:
        from_x = x + from_row.to(tl.int64)[:, None] * at_x.row
    of_w = expert_base(w, e, at_w.stride_e, coding.OF, TABLE, False)
    of_s = expert_base(s, e, at_s.stride_e, coding.SCALES, TABLE, False)
    of_z = expert_base(z, e, at_z.stride_e, coding.ZEROS, TABLE, False) if coding.ZERO else of_s
    N = I if BACK else F
    K = F if BACK else I
    n = block * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, K, BK):
        a = row_tile(from_x, live, k0, K, at_x.col, BK, WIDE, tiling.EVEN_K, REPEAT)  # [BM, BK]
        if SCALE:
            a = (a.to(tl.float32) * scale[:, None]).to(dtype)
        if BACK:
            v = coded_block(of_w, of_s, of_z, at_w, at_s, at_z, k0, block * BN, F, I, dtype, BK, BN, coding)  # [BK, BN]
        else:
            v = tl.trans(coded_block(of_w, of_s, of_z, at_w, at_s, at_z, block * BN, k0, F, I, dtype, BN, BK, coding))  # [BK, BN]
        acc = tl.dot(a, v, acc, input_precision=tiling.PRECISION)  # [BM, BN]
    if coding.BIAS:
        bias = expert_base(b, e, at_w.bias_e, dtype, coding.BIAS_APART, False)
        acc += tl.load(bias + n.to(tl.int64) * at_w.bias_n, mask=n < N, other=0.0).to(tl.float32)[None, :]  # [BN]
    value = acc.to(out.dtype.element_ty)
    to = out + (start + r).to(tl.int64)[:, None] * stride_or + n[None, :]
    mask = live[:, None] & (n < N)[None, :]
    if ADD:
        value = (tl.load(to, mask=mask, other=0.0).to(tl.float32) + value.to(tl.float32)).to(out.dtype.element_ty)  # [BM, BN]
    tl.store(to, value, mask=mask)  # [BM, BN]


@triton.jit(do_not_specialize=["max_tiles"])
def coded_tiles(
    x, w, s, z, b, weights, order, out, offsets, tiles, num_tiles, max_tiles, top_k, F, I, at_x, at_w, at_s, at_z, at_weights, stride_or,
    GATHER: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, BACK: tl.constexpr, coding: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """out [S, F]: rows of x [., I] times w[e] [F, I] transposed, plus b[e]; with BACK out [S, I]: rows of x [., F] times w[e].

    GATHER, SCALE, ADD: as of ``grouped.linear_tiles``. Dead rows are not written. w, s, z: storage, scales and zeros, stacked or as
    addresses.
    """
    count = tl.load(num_tiles)  # []
    blocks = tl.cdiv(I if BACK else F, tiling.BN)
    i = tl.program_id(0)
    if i < count * blocks:
        tile, block = tile_order(i, count, blocks, tiling.GROUP)
        e = tl.load(tiles + tile)  # []
        start = tl.load(tiles + max_tiles + tile)  # []
        rows = tl.load(offsets + e + 1).to(tl.int32) - start  # []
        coded_tile(
            e, start, rows, block, x, w, s, z, b, weights, order, out, top_k, F, I, at_x, at_w, at_s, at_z, at_weights, stride_or,
            GATHER, SCALE, ADD, BACK, coding, tiling,
        )  # fmt: skip


@triton.jit
def unpack_blocks(
    w, s, z, out, first, F, I, at_w, at_s, at_z, coding: tl.constexpr, NF: tl.constexpr, NI: tl.constexpr,
):  # fmt: skip
    """out [., F, I]: the weights of experts from ``first`` on, one for each program of the first dimension."""
    e = tl.program_id(0) + first
    f0 = tl.program_id(1) * NF
    i0 = tl.program_id(2) * NI
    of_w = expert_base(w, e, at_w.stride_e, coding.OF, coding.APART, False)
    of_s = expert_base(s, e, at_s.stride_e, coding.SCALES, coding.APART, False)
    of_z = expert_base(z, e, at_z.stride_e, coding.ZEROS, coding.APART, False) if coding.ZERO else of_s
    v = coded_block(of_w, of_s, of_z, at_w, at_s, at_z, f0, i0, F, I, out.dtype.element_ty, NF, NI, coding)  # [NF, NI]
    f = f0 + tl.arange(0, NF)
    i = i0 + tl.arange(0, NI)
    to = out + (tl.program_id(0).to(tl.int64) * F + f[:, None]) * I + i[None, :]
    tl.store(to, v, mask=(f < F)[:, None] & (i < I)[None, :])  # [NF, NI]
