"""Few rows times quantised weights, on tensor cores: weights are the left operand, unpacked in the registers where these read them.

A program makes 16 features per warp of up to COLS rows of one expert. Four threads have a row of weights, each 16 bytes of every 64, so
the order of the inputs in a product is not that of memory but (64 bytes, word, thread, code): tokens are read in the same order, and a sum
has no other. Nothing goes through shared memory.

Of the first projection half of a warp's features are the gate's and half the up projection's of the same outputs, which then are in the
same thread. Rows come by the tiles of the sort, or with one slot per tile straight from ids.

Weights of the next step are on their way while those of this one are unpacked and multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moefuse.kernels.triton.device.functions import after_previous, expert_base, gated, let_next_start, pointwise, rounded
from moefuse.kernels.triton.words.unpack import as_number, unpacked

LANES: gl.constexpr = gl.constexpr(4)
"""Threads that share a row, each with WORDS words of every step."""
WORDS: gl.constexpr = gl.constexpr(4)


@gluon.constexpr_function
def halves(n):
    """1, 2, 4, ... below n."""
    return [1 << i for i in range(n.bit_length() - 1)]


@gluon.constexpr_function
def weight_layout(steps, warps, high):
    """The layout of words [16 * warps * high, steps, LANES, WORDS]."""
    reg = [[0, 0, 0, i] for i in halves(4)] + [[8, 0, 0, 0]] + [[0, i, 0, 0] for i in halves(steps)]
    reg = reg + [[16 * warps * i, 0, 0, 0] for i in halves(high)]
    lane = [[0, 0, i, 0] for i in halves(4)] + [[i, 0, 0, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[16 * i, 0, 0, 0] for i in halves(warps)], [], [16 * warps * high, steps, 4, 4])


@gluon.constexpr_function
def token_layout(cols, steps, each, warps):
    """The layout of inputs [cols, steps, LANES, each]: every warp has all."""
    reg = [[0, 0, 0, i] for i in halves(each)] + [[0, i, 0, 0] for i in halves(steps)] + [[i, 0, 0, 0] for i in halves(cols) if i >= 8]
    lane = [[0, 0, i, 0] for i in halves(4)] + [[i, 0, 0, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[0, 0, 0, 0] for i in halves(warps)], [], [cols, steps, 4, each])


@gluon.jit
def in_order(w, STEPS: gl.constexpr, PER: gl.constexpr):
    """[BN, K] of what words [BN, STEPS, LANES, WORDS] hold, PER in each, in the order of a product."""
    BN: gl.constexpr = w.type.shape[0]
    return w.reshape([BN, STEPS, 4, 4, PER]).permute((0, 1, 3, 2, 4)).reshape([BN, STEPS * 16 * PER])


@gluon.jit
def weights_of(v, s, z, mma: gl.constexpr, coding: gl.constexpr):
    """The left operand [BN, K] of words [BN, STEPS, LANES, WORDS]."""
    w = in_order(unpacked(v, s, z, coding), v.type.shape[1], coding.PER)
    return gl.convert_layout(w, gl.DotOperandLayout(0, mma, coding.PER))


@gluon.jit
def tokens_of(x, mma: gl.constexpr, PER: gl.constexpr):
    """The right operand [K, COLS] of inputs [COLS, STEPS, LANES, WORDS * PER]."""
    COLS: gl.constexpr = x.type.shape[0]
    STEPS: gl.constexpr = x.type.shape[1]
    b = x.reshape([COLS, STEPS, 4, 4, PER]).permute((0, 1, 3, 2, 4)).reshape([COLS, STEPS * 16 * PER]).permute((1, 0))
    return gl.convert_layout(b, gl.DotOperandLayout(1, mma, PER))


@gluon.jit
def load_step(from_w, from_s, from_z, at_s, at_z, step, quarters, coding: gl.constexpr, cut: gl.constexpr):
    """Words, scales and zeros of STEPS times 64 bytes of each row from 64 * ``step`` on; zeros behind the last of ``quarters`` 16 bytes."""
    L: gl.constexpr = from_w.type.layout
    L3: gl.constexpr = from_s.type.layout
    BLOCK_K: gl.constexpr = coding.BLOCK_K
    c = step + gl.arange(0, cut.STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]  # [1, STEPS, 1, 1]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]  # [1, 1, LANES, 1]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]  # [1, 1, 1, WORDS]
    place = from_w + (c * 16 + t * 4 + i)
    q = (step + gl.arange(0, cut.STEPS, gl.SliceLayout(0, gl.SliceLayout(2, L3)))[None, :, None]) * 4
    q += gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L3)))[None, None, :]  # [1, STEPS, LANES]
    group = q * (4 * coding.PER) // BLOCK_K if BLOCK_K > 0 else q * 0
    v = gl.load(place, mask=c * 4 + t < quarters, other=0)  # [BN, STEPS, LANES, WORDS]
    inside = q < quarters
    s = gl.load(from_s + group * at_s.stride_k, mask=inside, other=0)  # [BN, STEPS, LANES]
    z = gl.load(from_z + group * at_z.stride_k, mask=inside, other=0) if coding.ZERO else s  # as s
    return v, s, z


@gluon.jit
def sums(w, s, z, at_s, at_z, from_x, live, K, LATE: gl.constexpr, mma: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """[BN, COLS] float32: features at w [BN, 1, 1, 1], with scales and zeros at s, z [BN, 1, 1], times rows at from_x [COLS, 1, 1, 1]."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = cut.STEPS
    PER: gl.constexpr = coding.PER
    LX: gl.constexpr = token_layout(cut.COLS, STEPS, 4 * PER, WARPS)
    k = gl.arange(0, STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LX))))[None, :, None, None] * (16 * PER)
    k += gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LX))))[None, None, :, None] * (4 * PER)
    k += gl.arange(0, 4 * PER, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LX))))[None, None, None, :]
    BN: gl.constexpr = 16 * WARPS * cut.HIGH
    COLS: gl.constexpr = cut.COLS
    acc = gl.zeros([BN, COLS], gl.float32, mma)
    quarters = K // (4 * PER)
    steps = (quarters + 3) // 4
    v, by, less = load_step(w, s, z, at_s, at_z, 0, quarters, coding, cut)
    after_previous(LATE)
    for step in range(0, steps, STEPS):
        inside = live if cut.EVEN else live & (k < K - step * (16 * PER))
        x = gl.load(from_x + (k + step * (16 * PER)), mask=inside, other=0.0)  # [COLS, STEPS, LANES, 4 * PER]
        next_v, next_by, next_less = load_step(w, s, z, at_s, at_z, step + STEPS, quarters, coding, cut)
        a = weights_of(v, by.expand_dims(3), less.expand_dims(3), mma, coding)  # [BN, STEPS * 16 * PER]
        acc = mma_v2(a, tokens_of(x, mma, PER), acc)  # [BN, COLS]
        v, by, less = next_v, next_by, next_less
    return acc


@gluon.jit
def codes_in(v):
    """Codes [BN, K] of words [BN, STEPS, LANES, WORDS] of float8, as they are, in the order of a product."""
    even = gl.join(v.to(gl.int8), (v >> 16).to(gl.int8))
    odd = gl.join((v >> 8).to(gl.int8), (v >> 24).to(gl.int8))
    return in_order(gl.join(even, odd).to(gl.float8e4nv, bitcast=True), v.type.shape[1], 4)


@gluon.jit
def rounded_sums(
    w, s, at_s, from_x, from_r, live, alive, K, LATE: gl.constexpr, mma: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr
):
    """As :func:`sums`, of float8 codes in blocks of 128 inputs, times codes of tokens whose groups are as long; WHOLE: scales are for all.

    s points to the scales [BN] of the features, from_r to those [COLS] of the rows, both in the layout of sums.
    """
    WARPS: gl.constexpr = gl.num_warps()
    LX: gl.constexpr = token_layout(cut.COLS, 2, 16, WARPS)
    k = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, LX))))[None, :, None, None] * 64
    k += gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LX))))[None, None, :, None] * 16
    k += gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LX))))[None, None, None, :]  # [1, 2, LANES, 16]
    BN: gl.constexpr = 16 * WARPS * cut.HIGH
    COLS: gl.constexpr = cut.COLS
    acc = gl.zeros([BN, COLS], gl.float32, mma)
    v = load_group(w, 0, K, cut)  # [BN, STEPS, LANES, WORDS]
    after_previous(LATE)
    for group in range(0, K // 128, cut.STEPS // 2):
        following = load_group(w, group + cut.STEPS // 2, K, cut)
        acc = add_groups(acc, v, group, s, at_s, from_x + k, from_r, live, alive, K, mma, coding, cut.STEPS)  # [BN, COLS]
        v = following
    return acc


@gluon.jit
def load_group(from_w, group, K, cut: gl.constexpr):
    """Words of STEPS times 64 bytes of each row from 128 * ``group`` on; zeros behind the last."""
    L: gl.constexpr = from_w.type.layout
    c = group * 2 + gl.arange(0, cut.STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]  # [1, 1, LANES, 1]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]  # [1, 1, 1, WORDS]
    return gl.load(from_w + (c * 16 + t * 4 + i), mask=c < K // 64, other=0)  # [BN, STEPS, LANES, WORDS]


@gluon.jit
def add_groups(acc, v, group, s, at_s, from_x, from_r, live, alive, K, mma: gl.constexpr, coding: gl.constexpr, STEPS: gl.constexpr):
    """acc plus the products of STEPS / 2 groups from ``group`` on, each with the scales of its block and of its rows."""
    if STEPS == 2:
        inside = group < K // 128
        codes = gl.load(from_x + group * 128, mask=live & inside, other=0).to(gl.float8e4nv, bitcast=True)  # [COLS, 2, LANES, 16]
        scale: gl.constexpr = 0 if coding.WHOLE else 1
        by = gl.load(from_r + group * scale, mask=alive & inside, other=0.0)  # [COLS]
        of = gl.load(s + group * scale * at_s.stride_k, mask=inside, other=0)  # [BN]
        of = as_number(of, coding)
        w = gl.convert_layout(codes_in(v), gl.DotOperandLayout(0, mma, 4))  # [BN, 128]
        products = mma_v2(w, tokens_of(codes, mma, 4), gl.zeros_like(acc))  # [BN, COLS]
        acc = acc + products * (of[:, None] * by[None, :])
    else:
        BN: gl.constexpr = v.type.shape[0]
        HALF: gl.constexpr = STEPS // 2
        first, second = v.reshape([BN, 2, HALF, 4, 4]).permute((0, 2, 3, 4, 1)).split()  # [BN, HALF, LANES, WORDS]
        acc = add_groups(acc, first, group, s, at_s, from_x, from_r, live, alive, K, mma, coding, HALF)
        acc = add_groups(acc, second, group + HALF // 2, s, at_s, from_x, from_r, live, alive, K, mma, coding, HALF)
    return acc


@gluon.jit
def weight_rows(w_a, w_b, s_a, s_b, z_a, z_b, e, n, upper, at_w, at_s, at_z, first_b, form: gl.constexpr, coding: gl.constexpr):
    """Where the words, scales and zeros of features n of expert e begin, each as n; ``upper`` as of :func:`features_of`."""
    w = expert_base(w_a, e, at_w.stride_e, coding.OF, coding.APART, coding.ALIGNED)
    s = expert_base(s_a, e, at_s.stride_e, coding.SCALES, coding.APART, False)
    z = expert_base(z_a, e, at_z.stride_e, coding.ZEROS, coding.APART, False) if coding.ZERO else s
    rows = n
    if form.GATING == "interleaved":
        rows = 2 * n + upper
    elif form.GATING == "halves":
        w_2 = expert_base(w_b, e, at_w.stride_e, coding.OF, coding.APART, coding.ALIGNED)
        s_2 = expert_base(s_b, e, at_s.stride_e, coding.SCALES, coding.APART, False)
        z_2 = expert_base(z_b, e, at_z.stride_e, coding.ZEROS, coding.APART, False) if coding.ZERO else s_2
        w, s, z = gl.where(upper == 0, w, w_2), gl.where(upper == 0, s, s_2), gl.where(upper == 0, z, z_2)
        rows = n + gl.where(upper == 0, at_w.first, first_b)
    from_w = (w + rows * at_w.stride_n).to(gl.pointer_type(gl.int32))
    scale_rows = rows // coding.BLOCK_N if coding.BLOCK_N > 0 else rows * 0
    from_s = s + scale_rows * at_s.stride_n
    from_z = z + scale_rows * at_z.stride_n if coding.ZERO else from_s
    return from_w, from_s, from_z


@gluon.jit
def features_of(r, block, N, BN: gl.constexpr, form: gl.constexpr):
    """The outputs of rows r of a program, and whether a row is of the up projection (1) or of the gate (0)."""
    BOTH: gl.constexpr = form.GATING == "halves" or form.GATING == "interleaved"
    if BOTH:
        n, upper = block * (BN // 2) + (r // 16) * 8 + r % 8, (r // 8) % 2
    else:
        n, upper = block * BN + r, r * 0
    return gl.minimum(n, N - 1), upper


@gluon.jit
def word_tiles(
    x, x_scales, ids, w_a, w_b, s_a, s_b, z_a, z_b, b_a, b_b, order, tiles, num_tiles, offsets, out, max_tiles, top_k, E, K, N, args,
    at_x, step_scales, at_ids, at_w, at_s, at_z, first_b, form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """out [S, N], rows in the order of slots: x times weights, in the first projection through its activation.

    GATING "halves": gate rows from feature ``at_w.first`` of w_a, up rows from ``first_b`` of w_b; "interleaved": both alternate in w_a;
    "plain": w_a only; "none": no activation, x [S, K] has a row for each slot. w_a, s_a, z_a: words, scales, zeros, stacked or as
    addresses. Rows that are rounded are codes, with x_scales of each group, ``step_scales`` from a row to the next.
    """
    # What a last projection multiplies with was there before the first one began, so it waits only with its first weights on their way.
    LATE: gl.constexpr = cut.PDL and form.GATING == "none"
    after_previous(cut.PDL and form.GATING != "none")
    let_next_start(cut.PDL)
    dtype: gl.constexpr = out.dtype.element_ty
    ACT: gl.constexpr = form.ACT
    WARPS: gl.constexpr = gl.num_warps()
    COLS: gl.constexpr = cut.COLS
    BOTH: gl.constexpr = form.GATING == "halves" or form.GATING == "interleaved"
    BN: gl.constexpr = 16 * WARPS * cut.HIGH
    OUT: gl.constexpr = BN // 2 if BOTH else BN
    LX: gl.constexpr = token_layout(COLS, 2 if coding.GROUP else cut.STEPS, 4 * coding.PER, WARPS)
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    tile = gl.program_id(1)
    if cut.SORTED:
        if tile >= gl.load(num_tiles):
            after_previous(LATE)
            return
        e = gl.load(tiles + tile).to(gl.int64)  # []
        start = gl.load(tiles + max_tiles + tile)  # []
        count = gl.load(offsets + e + 1).to(gl.int32) - start  # []
    else:
        e = gl.load(ids + (tile // top_k).to(gl.int64) * at_ids.row + (tile % top_k).to(gl.int64) * at_ids.col).to(gl.int64)
        start = tile
        count = 1
        if (e < 0) | (e >= E):
            after_previous(LATE)
            return
    block = gl.program_id(0)
    L: gl.constexpr = weight_layout(cut.STEPS, WARPS, cut.HIGH)
    r = gl.arange(0, BN, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L))))  # [BN]
    n, upper = features_of(r, block, N, BN, form)
    from_w, from_s, from_z = weight_rows(w_a, w_b, s_a, s_b, z_a, z_b, e, n, upper, at_w, at_s, at_z, first_b, form, coding)
    from_w = from_w[:, None, None, None]  # [BN, 1, 1, 1]
    col = gl.arange(0, COLS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LX))))  # [COLS]
    live = col < count
    slot = start + col
    if cut.SORTED:
        slot = gl.load(order + slot, mask=live, other=0).to(gl.int32)  # [COLS]
    row = slot if form.GATING == "none" else slot // top_k
    from_x = (x + row.to(gl.int64) * at_x.row)[:, None, None, None]  # [COLS, 1, 1, 1]
    if coding.GROUP:
        LA: gl.constexpr = gl.SliceLayout(1, mma)
        LR: gl.constexpr = gl.SliceLayout(0, mma)
        blocks = gl.convert_layout(from_s, LA)  # [BN]
        from_r = x_scales + gl.convert_layout(row, LR).to(gl.int64) * step_scales  # [COLS]
        acc = rounded_sums(
            from_w, blocks, at_s, from_x, from_r, live[:, None, None, None], gl.convert_layout(live, LR), K, LATE, mma, coding, cut
        )
    else:
        from_s, from_z = from_s[:, None, None], from_z[:, None, None]  # [BN, 1, 1]
        acc = sums(from_w, from_s, from_z, at_s, at_z, from_x, live[:, None, None, None], K, LATE, mma, coding, cut)  # [BN, COLS]
    if coding.BIAS:
        n, upper = features_of(gl.arange(0, BN, gl.SliceLayout(1, mma)), block, N, BN, form)
        acc = acc + biases(b_a, b_b, e, n, upper, at_w, first_b, dtype, form, coding)[:, None]
    acc = rounded(acc, dtype)
    if BOTH:
        gate, upper = acc.reshape([BN // 16, 2, 8, COLS]).permute((0, 2, 3, 1)).split()  # [BN // 16, 8, COLS]
        if form.UP_FIRST:
            gate, upper = upper, gate
        acc = gated(gate, upper, args[0], args[1], ACT, True).reshape([OUT, COLS])
    elif form.GATING == "plain":
        acc = pointwise(acc, ACT, True)
    LO: gl.constexpr = acc.type.layout
    j = gl.arange(0, COLS, gl.SliceLayout(0, LO))
    to = start + j
    if cut.SORTED:
        to = gl.load(order + to, mask=j < count, other=0).to(gl.int32)  # [COLS]
    f = block * OUT + gl.arange(0, OUT, gl.SliceLayout(1, LO))  # [OUT]
    gl.store(out + to.to(gl.int64)[None, :] * N + f[:, None], acc.to(dtype), mask=(j < count)[None, :] & (f < N)[:, None])


@gluon.jit
def biases(b_a, b_b, e, n, upper, at_w, first_b, dtype: gl.constexpr, form: gl.constexpr, coding: gl.constexpr):
    """Biases of features n, float32; ``upper`` as of :func:`features_of`."""
    base = expert_base(b_a, e, at_w.bias_e, dtype, coding.BIAS_APART, False)
    if form.GATING == "interleaved":
        n = 2 * n + upper
    elif form.GATING == "halves":
        base = gl.where(upper == 0, base, expert_base(b_b, e, at_w.bias_e, dtype, coding.BIAS_APART, False))
        n = n + gl.where(upper == 0, at_w.first, first_b)
    return gl.load(base + n.to(gl.int64) * at_w.bias_n).to(gl.float32)  # as n
