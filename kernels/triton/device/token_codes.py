"""Products of which both sides are in eight bits: ``round_rows`` makes codes of tokens, ``rounded_tiles`` multiplies them with the storage.

What a code is says ``ops/meaning/token_codes.py``, bit by bit. Sums of codes are exact products in float32; where scales belong to groups
of inputs each group is summed for itself, and multiplied with its scales before it is added.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.backward import row_products
from moefuse.kernels.triton.device.coded import factor_of, number_of
from moefuse.kernels.triton.device.functions import after_previous, expert_base, index, let_next_start, tile_order
from moefuse.kernels.triton.device.rows import expert_of


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_and_divisor(top, coding: tl.constexpr):
    """(scale, what is divided by) of the largest of a group."""
    scale = tl.div_rn(top, coding.LIMIT)
    divisor = tl.where(scale < coding.LEAST, coding.LEAST, scale)
    if coding.POWER:
        bits = (divisor.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF
        divisor = tl.where(divisor < float("inf"), bits.to(tl.float32, bitcast=True), divisor)
        scale = divisor
    return scale, divisor


@triton.jit
def quotient(x, divisor):
    """x / divisor, correctly rounded (Markstein's, of numbers that are far from what float32 cannot hold)."""
    far = tl.where(divisor < 1e-18, 18446744073709551616.0, 1.0)
    divisor = divisor * far
    inverse = tl.div_rn(1.0, divisor)
    x = x * far
    ratio = x * inverse
    return tl.fma(tl.fma(-ratio, divisor, x), inverse, ratio)


@triton.jit
def as_codes(ratio, coding: tl.constexpr):
    """Bytes of the nearest codes."""
    limit: tl.constexpr = coding.LIMIT
    ratio = tl.where(ratio > limit, limit, tl.where(ratio < -limit, -limit, ratio))
    if coding.ELEMENT == "e4m3" and coding.DIRECT:
        code = ratio.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif coding.ELEMENT == "e4m3":
        bits = ratio.to(tl.int32, bitcast=True)
        sign = (bits >> 24) & 0x80
        bits = bits & 0x7FFFFFFF
        # Below 2^-6 codes count in steps of 2^-9; above, three bits of the fraction are left, and the exponent counts from another number.
        few = (bits.to(tl.float32, bitcast=True) * 512.0 + 12582912.0 - 12582912.0).to(tl.int32)
        most = (bits + 0x7FFFF + ((bits >> 20) & 1) >> 20) - 960
        code = tl.where(bits < 0x3C800000, few, tl.minimum(most, 0x7F))
        code = (sign | tl.where(bits > 0x7F800000, 0x7F, code)).to(tl.uint8)
    else:
        # 1.5 * 2^23 leaves no bits behind the point: the sum is rounded to the nearest whole number, to the even one of two.
        whole = (tl.where(ratio == ratio, ratio, 0.0) + 12582912.0) - 12582912.0
        code = whole.to(tl.int32).to(tl.uint8)
    return code


@triton.jit(do_not_specialize=["S"])
def round_rows(
    x, order, offsets, codes, scales, S, E, top_k, K, GROUPS, at_x, steps,
    GATHER: tl.constexpr, ALL: tl.constexpr, coding: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, AT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Codes [S, K], bytes, and scales [S, GROUPS] of rows of x; ``steps``: from a row of these to the next.

    GATHER: the tokens of sorted rows. Rows behind the last expert's: nothing, but with ALL, where rows are in no order.

    A program has BR rows and AT groups, or of a group of all inputs BK at a time.
    """
    after_previous(PDL)
    let_next_start(PDL)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    live = r < (S if ALL else tl.load(offsets + E).to(tl.int32))
    row = r
    if GATHER:
        row = tl.load(order + r, mask=live, other=0).to(tl.int32) // top_k  # [BR]
    from_x = x + row.to(tl.int64)[:, None] * at_x.row
    k = tl.arange(0, BK)[None, :]
    to = codes + r.to(tl.int64)[:, None] * steps[0]
    to_scale = scales + r.to(tl.int64) * steps[1]
    if coding.GROUP:
        for i in tl.static_range(AT):
            g = tl.program_id(1) * AT + i
            inside = live[:, None] & (g < GROUPS) & (k < coding.GROUP)
            v = tl.load(from_x + (g * coding.GROUP + k) * at_x.col, mask=inside, other=0.0).to(tl.float32)  # [BR, BK]
            scale, divisor = scale_and_divisor(tl.reduce(tl.abs(v), 1, larger), coding)
            tl.store(to + g * coding.GROUP + k, as_codes(quotient(v, divisor[:, None]), coding), mask=inside)  # [BR, BK]
            tl.store(to_scale + g, scale, mask=live & (g < GROUPS))  # [BR]
    else:
        top = tl.zeros([BR, BK], tl.float32)
        for k0 in range(0, K, BK):
            v = tl.load(from_x + (k0 + k) * at_x.col, mask=live[:, None] & (k0 + k < K), other=0.0).to(tl.float32)  # [BR, BK]
            top = larger(top, tl.abs(v))
        scale, divisor = scale_and_divisor(tl.reduce(top, 1, larger), coding)
        for k0 in range(0, K, BK):
            inside = live[:, None] & (k0 + k < K)
            v = tl.load(from_x + (k0 + k) * at_x.col, mask=inside, other=0.0).to(tl.float32)  # [BR, BK]
            tl.store(to + k0 + k, as_codes(quotient(v, divisor[:, None]), coding), mask=inside)  # [BR, BK]
        tl.store(to_scale, scale, mask=live)  # [BR]


@triton.jit(do_not_specialize=["S"])
def weight_grads(
    d_a, codes, scales, grad, b, order, offsets, d_weights, S, top_k, E, I, GROUPS, N, at_grad, at_b,
    coding: tl.constexpr, bias: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d_weights [S] in slot order, the gradient of the routing weights: the inner product of d_a [S, I] with the rows that were multiplied,
    codes [S, I] and scales [S, GROUPS], and of the token's row of grad [T, N] with the expert's bias; zeros for dead rows.

    bias: as of ``backward.activate_grads``.
    """
    dtype: tl.constexpr = d_a.dtype.element_ty
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    live = row < tl.load(offsets + E)  # []
    slot = tl.load(order + row, mask=row < S, other=0).to(tl.int64)  # [BR]
    at_row = row.to(tl.int64)[:, None]
    total = tl.zeros([BR], tl.float32)
    for k0 in range(0, I, BK):
        k = k0 + tl.arange(0, BK)[None, :]
        inside = live[:, None] & (k < I)
        d = tl.load(d_a + at_row * I + k, mask=inside, other=0.0).to(tl.float32)  # [BR, BK]
        code = tl.load(codes + at_row * I + k, mask=inside, other=0).to(tl.int32)  # [BR, BK]
        of_group = k // coding.GROUP if coding.GROUP else k * 0
        scale = tl.load(scales + at_row * GROUPS + of_group, mask=inside, other=0.0)  # [BR, BK]
        total += tl.sum(d * (number_of(code, coding) * scale), 1)
    if bias[0]:
        e = tl.where(live, expert_of(row, offsets, E, BE), 0)
        held: tl.constexpr = tl.float32 if bias[2] else dtype
        base = expert_base(b, e, at_b.row, held, bias[1], False)
        from_grad = grad + slot // top_k * at_grad.row
        total += row_products(from_grad, base, live, N, at_grad.col, at_b.col, dtype, tl.float32, BR, BK)
    tl.store(d_weights + slot, total.to(d_weights.dtype.element_ty), mask=row < S)  # [BR]


@triton.jit
def multiplied(a, w, acc, coding: tl.constexpr):
    """acc + a [BM, BK] w [BN, BK]^T of bytes."""
    if coding.DIRECT:
        a, w = a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot(a, tl.trans(w), acc, max_num_imprecise_acc=None if coding.GROUP else 128)  # [BM, BN]
    else:
        a, w = number_of(a.to(tl.int32), coding).to(tl.float16), number_of(w.to(tl.int32), coding).to(tl.float16)
        acc = tl.dot(a, tl.trans(w), acc)  # [BM, BN]
    return acc


@triton.jit
def block_scales(s, at, n, k0, coding: tl.constexpr):
    """Scales of features n, [BN] or one of a whole block, at input k0, float32."""
    place = s + (n // coding.BLOCK_N if coding.BLOCK_N > 0 else n * 0) * at.stride_n
    if coding.BLOCK_K > 0:
        place += k0 // coding.BLOCK_K * at.stride_k
    v = tl.load(place)  # [BN] or []
    if coding.SCALE == "":
        v = v.to(tl.float32)
    else:
        byte = v.to(tl.int32)
        v = factor_of(byte)
        if coding.SCALE == "e8m0":
            v = tl.where(byte == 255, float("nan"), v)
    return v


@triton.jit(do_not_specialize=["max_tiles"])
def rounded_tiles(
    x, scales, w, s, b, out, offsets, tiles, num_tiles, max_tiles, F, I, GROUPS, at_w, at_s, stride_or,
    coding: tl.constexpr, tiling: tl.constexpr,
):  # fmt: skip
    """out [S, F]: codes x [S, I] with scales [S, GROUPS], in sorted order, times w[e] [F, I] with scales s[e], plus b[e].

    w may be a descriptor of [E * F, I] (``tiling.ROWS_DESC``). Dead rows are not written.
    """
    BM: tl.constexpr = tiling.BM
    BN: tl.constexpr = tiling.BN
    BK: tl.constexpr = tiling.BK
    UNIFORM: tl.constexpr = coding.BLOCK_N == 0 or coding.BLOCK_N % BN == 0
    count = tl.load(num_tiles)  # []
    blocks = tl.cdiv(F, BN)
    i = tl.program_id(0)
    if i >= count * blocks:
        return
    tile, block = tile_order(i, count, blocks, tiling.GROUP)
    e = tl.load(tiles + tile)  # []
    start = tl.load(tiles + max_tiles + tile)  # []
    rows = tl.load(offsets + e + 1).to(tl.int32) - start  # []
    r = tl.arange(0, BM)
    at = start + tl.minimum(r, rows - 1)
    from_x = x + at.to(tl.int64)[:, None] * I
    n = block * BN + tl.arange(0, BN)
    real = tl.minimum(n, F - 1)
    k = tl.arange(0, BK)[None, :]
    if not tiling.ROWS_DESC:
        from_w = expert_base(w, e, at_w.stride_e, coding.OF, coding.APART, False) + index(real, coding.WIDE)[:, None] * at_w.stride_n
    of_s = expert_base(s, e, at_s.stride_e, coding.SCALES, coding.APART, False)
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, I, BK):
        if tiling.EVEN_K:
            a = tl.load(from_x + (k0 + k))  # [BM, BK]
        else:
            a = tl.load(from_x + (k0 + k), mask=k0 + k < I, other=0)  # [BM, BK]
        if tiling.ROWS_DESC:
            v = w.load([e * F + block * BN, k0])  # [BN, BK]
        elif tiling.EVEN_K:
            v = tl.load(from_w + index(k0 + k, coding.WIDE) * at_w.stride_k)  # [BN, BK]
        else:
            v = tl.load(from_w + index(k0 + k, coding.WIDE) * at_w.stride_k, mask=k0 + k < I, other=0)  # [BN, BK]
        if coding.GROUP:
            part = multiplied(a, v, tl.zeros([BM, BN], tl.float32), coding)
            of_x = tl.load(scales + at * GROUPS + k0 // coding.GROUP)  # [BM]
            if UNIFORM:
                acc += part * (of_x * block_scales(of_s, at_s, block * BN, k0, coding))[:, None]
            else:
                acc += part * (of_x[:, None] * block_scales(of_s, at_s, real, k0, coding)[None, :])
        else:
            acc = multiplied(a, v, acc, coding)
    if not coding.GROUP:
        acc *= tl.load(scales + at)[:, None] * block_scales(of_s, at_s, real, 0, coding)[None, :]  # [BM], [BN]
    if coding.BIAS:
        bias = expert_base(b, e, at_w.bias_e, out.dtype.element_ty, coding.BIAS_APART, False)
        acc += tl.load(bias + real.to(tl.int64) * at_w.bias_n).to(tl.float32)[None, :]  # [BN]
    to = out + (start + r).to(tl.int64)[:, None] * stride_or + n[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(r < rows)[:, None] & (n < F)[None, :])  # [BM, BN]
