"""Few tokens times quantised weights: a warp has the weights of *part* of a sum, so nothing waits for many steps of it.

Words, and how they become the left operand, are those of ``products.py``. A program has 16 features, and a warp all of these for one
part: of a first projection parts are pieces of the inputs of one slot, of the last one the slots of a token (in pieces where warps are left
over). So the last projection ends in the result, and a call is two launches.

A product has eight columns, and here one row to multiply with. The columns share out its inputs: column j has an eighth of them and zeros
elsewhere, so a thread reads, and rounds, as many, and the sum over the columns is the product. (So an infinite weight gives NaN, as if its
token had a zero.)

All that a program reads at first is asked for before anything waits. The assembler would put loads off to save registers, each to where its
product is: so behind them stand a barrier, which loads do not cross, and a branch, before which nothing is multiplied.

Parts are summed in their order, whatever else is in the call; how many there are depends on whether it has one token.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from moefuse.kernels.triton.device.functions import after_previous, gated, let_next_start, pointwise, rounded
from moefuse.kernels.triton.device.token_codes import as_codes, larger, quotient, scale_and_divisor
from moefuse.kernels.triton.words.gluon_names import wait_for_block
from moefuse.kernels.triton.words.products import biases, codes_in, features_of, halves, in_order, weight_layout, weight_rows
from moefuse.kernels.triton.words.unpack import as_number, unpacked


@gluon.constexpr_function
def shared_layout(steps, each, warps):
    """The layout of inputs [warps, steps, LANES, owners, each, columns]: a thread has one column."""
    reg = [[0, 0, 0, 0, i, 0] for i in halves(each)] + [[0, 0, 0, i, 0, 0] for i in halves(8)]
    reg = reg + [[0, i, 0, 0, 0, 0] for i in halves(steps)]
    lane = [[0, 0, i, 0, 0, 0] for i in halves(4)] + [[0, 0, 0, 0, 0, i] for i in halves(8)]
    warp = [[i, 0, 0, 0, 0, 0] for i in halves(warps)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [warps, steps, 4, 8, each, 8])


@gluon.constexpr_function
def piece_layout(slots, pieces, both):
    """The layout of sums [slots, pieces, 16]: pieces are in one thread, and of gate and up both."""
    reg = [[0, i, 0] for i in halves(pieces)] + ([[0, 0, 8]] if both else [])
    lane = [[0, 0, i] for i in halves(8 if both else 16)]
    lane = lane + [[0, 0, 0]] * (5 - len(lane))
    warp = [[i, 0, 0] for i in halves(slots)] + [[0, 0, 0] for i in halves(pieces)]
    return gl.DistributedLinearLayout(reg, lane, warp, [], [slots, pieces, 16])


@gluon.constexpr_function
def slot_layout(slots, warps):
    """The layout of sums [slots, 16]: slots are in one thread."""
    lane = [[0, i] for i in halves(16)] + [[0, 0]]
    return gl.DistributedLinearLayout([[i, 0] for i in halves(slots)], lane, [[0, 0] for i in halves(warps)], [], [slots, 16])


@gluon.jit
def load_weights(from_w, from_s, from_z, at_s, at_z, first, live, K, EVEN: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """Words [BN, STEPS, LANES, WORDS] from step ``first`` of each row on, scales and zeros; nothing of rows that are not live.

    Scales [BN] where all of these words have one, else [BN, STEPS, LANES, 1]: one for each 16 bytes.
    """
    WARPS: gl.constexpr = gl.num_warps()
    PER: gl.constexpr = coding.PER
    L: gl.constexpr = weight_layout(cut.STEPS, WARPS, 1)
    STEP: gl.constexpr = 16 * PER
    ONE: gl.constexpr = coding.BLOCK_K % (cut.STEPS * STEP) == 0
    quarters = K // (4 * PER)
    c = gl.arange(0, cut.STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))[None, :, None, None]  # [1, STEPS, 1, 1]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))[None, None, :, None]  # [1, 1, LANES, 1]
    i = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))[None, None, None, :]  # [1, 1, 1, WORDS]
    q = (first[:, None, None, None] + c) * 4 + t  # [BN, STEPS, LANES, 1]
    inside = live[:, None, None, None]
    if not EVEN:
        inside = inside & (q < quarters)
    v = gl.load((from_w + first * 16)[:, None, None, None] + (c * 16 + t * 4 + i), mask=inside, other=0)  # [BN, STEPS, LANES, WORDS]
    if ONE:
        group = first * STEP // coding.BLOCK_K if coding.BLOCK_K > 0 else first * 0
        some = live if EVEN else live & (first * 4 < quarters)
    else:
        from_s, from_z = from_s[:, None, None, None], from_z[:, None, None, None]
        group = q * (4 * PER) // coding.BLOCK_K
        some = inside
    s = gl.load(from_s + group * at_s.stride_k, mask=some, other=0)  # [BN], or [BN, STEPS, LANES, 1]
    z = gl.load(from_z + group * at_z.stride_k, mask=some, other=0) if coding.ZERO else s  # as s
    return v, s, z


@gluon.jit
def load_tokens(from_x, first, live, K, EVEN: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """Inputs [WARPS, STEPS, LANES, EACH, 8] from step ``first`` of each part on: what a thread has of the products of a step."""
    WARPS: gl.constexpr = gl.num_warps()
    PER: gl.constexpr = coding.PER
    EACH: gl.constexpr = 4 if coding.GROUP else PER // 2
    STEPS: gl.constexpr = cut.STEPS // 2 if coding.GROUP else cut.STEPS
    L: gl.constexpr = gl.SliceLayout(3, shared_layout(STEPS, EACH, WARPS))
    L4: gl.constexpr = gl.SliceLayout(4, L)
    c = gl.arange(0, STEPS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L4))))[None, :, None, None, None]  # [1, STEPS, 1, 1, 1]
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4))))[None, None, :, None, None]  # [1, 1, LANES, 1, 1]
    v = gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :, None]  # [1, 1, 1, EACH, 1]
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L)))))[None, None, None, None, :]
    if coding.GROUP:  # a column has a word of the eight in 128 inputs
        k = c * 128 + j // 4 * 64 + t * 16 + j % 4 * 4 + v  # [1, STEPS, LANES, EACH, 8]
    else:  # and here half of one of four
        k = c * (16 * PER) + t * (4 * PER) + j * EACH + v  # as above
    LW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, L4)))
    first = gl.convert_layout(first * (16 * PER), LW, assert_trivial=True)[:, None, None, None, None]  # [WARPS, 1, 1, 1, 1]
    inside = gl.convert_layout(live, LW, assert_trivial=True)[:, None, None, None, None]
    if not EVEN:
        inside = inside & (first + k < K)
    from_x = gl.convert_layout(from_x, LW, assert_trivial=True)[:, None, None, None, None]  # [WARPS, 1, 1, 1, 1]
    return gl.load(from_x + (first + k), mask=inside, other=1.0 if coding.GROUP else 0.0)  # a group of zeros may have no codes


@gluon.constexpr_function
def crossed(coding):
    """Whether weights come in the order of ``unpack.unpacked`` that saves a permutation for each two."""
    return coding.PER == 8 and not (coding.KIND == "range" and coding.WIDE)


@gluon.jit
def packed(x, STEPS: gl.constexpr, CROSSED: gl.constexpr):
    """Words [WARPS, STEPS, LANES, 8, 1 or 2] of a thread's inputs [WARPS, STEPS, LANES, EACH, 8]: two of 16 bits, or four bytes."""
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = x.dtype.primitive_bitwidth == 8
    MORE: gl.constexpr = 1 if BYTES else x.type.shape[3] // 2
    x = x.permute((0, 1, 2, 4, 3))  # [WARPS, STEPS, LANES, 8, EACH]
    if BYTES:
        even, odd = x.to(gl.uint8, bitcast=True).to(gl.int32).reshape([WARPS, STEPS, 4, 8, 1, 2, 2]).split()
        a, c = even.split()  # [WARPS, STEPS, LANES, 8, 1]
        b, d = odd.split()
        v = a | (b << 8) | (c << 16) | (d << 24)
    else:
        x = x.to(gl.uint16, bitcast=True).to(gl.int32)
        if CROSSED:
            x = x.reshape([WARPS, STEPS, 4, 8, 2, MORE]).permute((0, 1, 2, 3, 5, 4))
        else:
            x = x.reshape([WARPS, STEPS, 4, 8, MORE, 2])
        low, high = x.split()  # [WARPS, STEPS, LANES, 8, MORE]
        v = low | (high << 16)
    return v


@gluon.jit
def columns_of(x, mma: gl.constexpr, STEPS: gl.constexpr, PER: gl.constexpr, CROSSED: gl.constexpr):
    """The right operand [WARPS, K, 8] of a thread's inputs [WARPS, STEPS, LANES, EACH, 8]: zeros but where a column is the owner."""
    WARPS: gl.constexpr = gl.num_warps()
    BYTES: gl.constexpr = x.dtype.primitive_bitwidth == 8
    AT: gl.constexpr = STEPS // 2 if BYTES else STEPS
    v = packed(x, AT, CROSSED)  # [WARPS, AT, LANES, 8, MORE]
    MORE: gl.constexpr = v.type.shape[4]
    L: gl.constexpr = shared_layout(AT, MORE, WARPS)
    v = gl.convert_layout(v.permute((0, 1, 2, 4, 3)), gl.SliceLayout(3, L), assert_trivial=True).expand_dims(3)
    j = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, L))))))
    g = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, gl.SliceLayout(5, L))))))
    v = gl.where(g[None, None, None, :, None, None] == j[None, None, None, None, None, :], v, 0)  # [WARPS, AT, LANES, 8, MORE, 8]
    if BYTES:  # owners are (step, word)
        even = gl.join(v.to(gl.int8), (v >> 16).to(gl.int8))
        odd = gl.join((v >> 8).to(gl.int8), (v >> 24).to(gl.int8))
        b = gl.join(even, odd).to(gl.float8e4nv, bitcast=True).reshape([WARPS, AT, 4, 2, 4, 8, 4])
        b = b.permute((0, 1, 3, 4, 2, 6, 5))  # [WARPS, AT, 2, WORDS, LANES, 4, 8]
    else:  # (word, half)
        b = gl.join(v.to(gl.int16), (v >> 16).to(gl.int16)).to(gl.bfloat16, bitcast=True)
        b = b.permute((0, 1, 2, 3, 4, 6, 5)).reshape([WARPS, STEPS, 4, 4, PER, 8]).permute((0, 1, 3, 2, 4, 5))
    return gl.convert_layout(b.reshape([WARPS, STEPS * 16 * PER, 8]), gl.DotOperandLayout(1, mma, PER), assert_trivial=True)


@gluon.jit
def row_tops(from_x, live, K, cut: gl.constexpr):
    """The largest [WARPS] of all inputs of each part's row, float32; of nobody's 1, which has codes."""
    WARPS: gl.constexpr = gl.num_warps()
    TOPS: gl.constexpr = cut.TOPS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    LW: gl.constexpr = gl.SliceLayout(1, L)
    from_x = gl.convert_layout(from_x, LW, assert_trivial=True)[:, None]  # [WARPS, 1]
    live = gl.convert_layout(live, LW, assert_trivial=True)
    k = gl.arange(0, 256, gl.SliceLayout(0, L))[None, :]  # [1, 256]
    top = gl.zeros([WARPS, 256], gl.float32, L)
    for i in gl.static_range(TOPS):
        v = gl.load(from_x + (k + i * 256), mask=live[:, None] & (k + i * 256 < K), other=0.0)  # [WARPS, 256]
        top = larger(top, gl.abs(v.to(gl.float32)))
    return gl.where(live, gl.reduce(top, 1, larger), 1.0)


@gluon.jit
def add_product(acc, v, s, z, x, tops, mma: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """acc [WARPS, 16, 8] plus the product of what was loaded, in parts by columns. tops [WARPS]: of rows, WHOLE."""
    WARPS: gl.constexpr = gl.num_warps()
    PER: gl.constexpr = coding.PER
    STEPS: gl.constexpr = cut.STEPS
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma, PER)
    if coding.GROUP:
        x = x.to(gl.float32)
        if not coding.WHOLE:
            tops = gl.reduce(gl.reduce(gl.reduce(gl.reduce(gl.abs(x), 3, larger), 3, larger), 2, larger), 1, larger)  # [WARPS]
        by, divisor = scale_and_divisor(tops, coding)  # [WARPS]
        LX: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, x.type.layout))))
        far = gl.convert_layout(divisor, LX, assert_trivial=True)
        x = as_codes(quotient(x, far[:, None, None, None, None]), coding)
        a = codes_in(v).reshape([WARPS, 16, STEPS * 64])  # [WARPS, 16, K]
        a = gl.convert_layout(a, LEFT, assert_trivial=True)
        products = mma_v2(a, columns_of(x, mma, STEPS, PER, False), gl.zeros_like(acc))  # [WARPS, 16, 8]
        of = gl.convert_layout(as_number(s, coding).reshape([WARPS, 16]), gl.SliceLayout(2, mma), assert_trivial=True)  # [WARPS, 16]
        by = gl.convert_layout(by, gl.SliceLayout(1, gl.SliceLayout(2, mma)), assert_trivial=True)  # [WARPS]
        acc = acc + products * (of * by[:, None])[:, :, None]
    else:
        if len(s.shape) == 1:
            s, z = s[:, None, None, None], z[:, None, None, None]
        CROSSED: gl.constexpr = crossed(coding)
        a = in_order(unpacked(v, s, z, coding, CROSSED), STEPS, PER).reshape([WARPS, 16, STEPS * 16 * PER])
        acc = mma_v2(gl.convert_layout(a, LEFT, assert_trivial=True), columns_of(x, mma, STEPS, PER, CROSSED), acc)  # [WARPS, 16, 8]
    return acc


@gluon.jit
def first_loads(
    from_w, from_s, from_z, at_s, at_z, from_x, step, step_x, live, live_x, K, LATE: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr
):
    """Words, scales and zeros, and tokens, of the first turns of :func:`part_sums`; and what these divide by, WHOLE."""
    AHEAD: gl.constexpr = cut.AHEAD
    given, tokens = (), ()
    for i in gl.static_range(AHEAD):
        given += (load_weights(from_w, from_s, from_z, at_s, at_z, step + i * cut.STRIDE, live, K, cut.EVEN, coding, cut),)
    after_previous(LATE)
    for i in gl.static_range(AHEAD):
        tokens += (load_tokens(from_x, step_x + i * cut.STRIDE, live_x, K, cut.EVEN, coding, cut),)
    tops = row_tops(from_x, live_x, K, cut) if coding.WHOLE else live_x
    return given, tokens, tops


@gluon.jit
def part_sums(
    given, tokens, tops, from_w, from_s, from_z, at_s, at_z, from_x, step, step_x, live, live_x, K, mma: gl.constexpr,
    coding: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """[WARPS, 16] float32: each part's sum of rows of weights times its inputs, from step ``step`` on, then every cut.STRIDE steps."""
    AHEAD: gl.constexpr = cut.AHEAD
    TURNS: gl.constexpr = cut.TURNS
    acc = gl.zeros([gl.num_warps(), 16, 8], gl.float32, mma)
    if TURNS <= AHEAD:
        for i in gl.static_range(TURNS):
            v, s, z = given[i]
            acc = add_product(acc, v, s, z, tokens[i], tops, mma, coding, cut)
    else:
        for turn in range(0, TURNS, AHEAD):
            for i in gl.static_range(AHEAD):
                v, s, z = given[0]
                x = tokens[0]
                at = (turn + (i + AHEAD)) * cut.STRIDE
                more = load_weights(from_w, from_s, from_z, at_s, at_z, step + at, live, K, False, coding, cut)
                acc = add_product(acc, v, s, z, x, tops, mma, coding, cut)
                given = given[1:] + (more,)
                tokens = tokens[1:] + (load_tokens(from_x, step_x + at, live_x, K, False, coding, cut),)
    return gl.sum(acc, 2)


@gluon.jit
def lone_rows(
    x, ids, weights, w_a, w_b, s_a, s_b, z_a, z_b, b_a, b_b, out, top_k, E, K, N, args, at_x, at_ids, at_weights, at_w, at_s, at_z, first_b,
    form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """out [S, N], by slots: tokens x [T, K] times a first projection and its activation. GATING "none": out [T, N], the weighted sums over
    each token's slots of rows x [S, K] times the last projection.

    Weights as of ``products.word_tiles``; ``weights``: of the routing.
    """
    SUM: gl.constexpr = form.GATING == "none"
    BOTH: gl.constexpr = form.GATING == "halves" or form.GATING == "interleaved"
    LATE: gl.constexpr = cut.PDL and SUM
    ACT: gl.constexpr = form.ACT
    after_previous(cut.PDL and not SUM)
    let_next_start(cut.PDL)
    WARPS: gl.constexpr = gl.num_warps()
    SLOTS: gl.constexpr = cut.SLOTS
    PIECES: gl.constexpr = WARPS // SLOTS
    dtype: gl.constexpr = x.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    L2: gl.constexpr = gl.SliceLayout(2, mma)
    LP: gl.constexpr = gl.SliceLayout(1, L2)
    LR: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, weight_layout(cut.STEPS, WARPS, 1))))
    block, token = gl.program_id(0), gl.program_id(2)
    which = token if SUM else token * top_k + gl.program_id(1)
    LY: gl.constexpr = gl.SliceLayout(1, piece_layout(SLOTS, PIECES, BOTH))
    part = gl.arange(0, WARPS, LP)  # [WARPS]
    r = gl.arange(0, 16 * WARPS, LR)  # [16 * WARPS]
    n, upper = features_of(r % 16, block, N, 16, form)  # [16 * WARPS]
    if SUM:
        alive = top_k > 0
        slot = part // PIECES
        e = gl.load(ids + which.to(gl.int64) * at_ids.row + slot.to(gl.int64) * at_ids.col, mask=slot < top_k, other=-1).to(gl.int64)
        live_x = (e >= 0) & (e < E)  # [WARPS]
        live = row_values(live_x, LR)  # [16 * WARPS]
        from_x = x + (which * top_k + slot).to(gl.int64) * at_x.row  # [WARPS]
        of = row_values(gl.where(live_x, e, 0), LR)  # [16 * WARPS]
    else:
        of = gl.load(ids + token.to(gl.int64) * at_ids.row + gl.program_id(1).to(gl.int64) * at_ids.col).to(gl.int64)
        alive = (of >= 0) & (of < E)
        of = gl.where(alive, of, 0)
        live_x = (part >= 0) & alive  # [WARPS]
        live = (r >= 0) & alive  # [16 * WARPS]
        from_x = x + token.to(gl.int64) * at_x.row + part * 0  # [WARPS]
    from_w, from_s, from_z = weight_rows(w_a, w_b, s_a, s_b, z_a, z_b, of, n, upper, at_w, at_s, at_z, first_b, form, coding)
    step, step_x = r // 16 % PIECES * cut.STEPS, part % PIECES * cut.STEPS
    own = of
    if SUM:
        own = slot_ids(ids, token, top_k, E, at_ids, SLOTS, LY)  # [SLOTS]
        slot = gl.arange(0, SLOTS, gl.SliceLayout(1, LY))
        by = gl.load(weights + token.to(gl.int64) * at_weights.row + slot.to(gl.int64) * at_weights.col, mask=own >= 0, other=0.0)
    if coding.BIAS:
        n, upper = features_of(gl.arange(0, 16, gl.SliceLayout(0, LY)), block, N, 16, form)
        at_bias = gl.where(own < 0, 0, own)[:, None] if SUM else of
        bias = biases(b_a, b_b, at_bias, n[None, :], upper[None, :], at_w, first_b, dtype, form, coding)  # [SLOTS or 1, 16]
    given, tokens, tops = first_loads(from_w, from_s, from_z, at_s, at_z, from_x, step, step_x, live, live_x, K, LATE, coding, cut)
    wait_for_block()
    if not alive:
        return
    y = part_sums(given, tokens, tops, from_w, from_s, from_z, at_s, at_z, from_x, step, step_x, live, live_x, K, mma, coding, cut)
    y = gl.sum(gl.convert_layout(y.reshape([SLOTS, PIECES, 16]), piece_layout(SLOTS, PIECES, BOTH)), 1)  # [SLOTS, 16]
    if coding.BIAS:
        y = y + bias
    y = rounded(y, dtype)
    if SUM:
        y = gl.where((own >= 0)[:, None], y * by.to(gl.float32)[:, None], 0.0)
        y = gl.sum(gl.convert_layout(y, slot_layout(SLOTS, WARPS)), 0)  # [16]
        f = block * 16 + gl.arange(0, 16, y.type.layout)
    else:
        y = y.reshape([16])
        if BOTH:
            gate, up = y.reshape([2, 8]).permute((1, 0)).split()  # [8]
            if form.UP_FIRST:
                gate, up = up, gate
            y = gated(gate, up, args[0], args[1], ACT, True)
            f = block * 8 + gl.arange(0, 8, y.type.layout)
        else:
            y = pointwise(y, ACT, True)
            f = block * 16 + gl.arange(0, 16, y.type.layout)
    gl.store(out + which.to(gl.int64) * N + f, y.to(out.dtype.element_ty), mask=f < N)  # [16], of both [8]


@gluon.jit
def row_values(v, L: gl.constexpr):
    """Values [WARPS] of parts for each of their rows."""
    WARPS: gl.constexpr = gl.num_warps()
    row = gl.arange(0, 16, gl.SliceLayout(0, v.type.layout.parent))[None, :]
    return gl.convert_layout(gl.where(row < 16, v[:, None], v[:, None]).reshape([16 * WARPS]), L, assert_trivial=True)


@gluon.jit
def slot_ids(ids, token, top_k, E, at_ids, SLOTS: gl.constexpr, L: gl.constexpr):
    """The experts [SLOTS] of a token, -1 for nobody."""
    slot = gl.arange(0, SLOTS, gl.SliceLayout(1, L))
    e = gl.load(ids + token.to(gl.int64) * at_ids.row + slot.to(gl.int64) * at_ids.col, mask=slot < top_k, other=-1).to(gl.int64)
    return gl.where(e < E, gl.maximum(e, -1), -1)
