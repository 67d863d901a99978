"""Products of float8 codes with specialised warps: rows and weights have scales for each 128 inputs, or (WHOLE) for all of them.

The producer, the ring and what becomes of a tile's sums are those of ``products.py``; a step has 128 inputs, which are as many bytes as 64
of 16 bits. Each step is summed for itself, WHOLE too, for what tensor cores add up of float8 keeps some 14 bits. Both groups multiply each
step, half of the rows each: while one multiplies the sums of a step with their scales and adds them up, the tensor cores have the other's.
Two levels of sums are DeepGEMM's; the code is our own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moefuse.kernels.triton.device.functions import after_previous, expert_base, let_next_start
from moefuse.kernels.triton.hopper.products import Lists, finish, produce
from moefuse.kernels.triton.hopper.ring import SLOTS, advance, make_ring, release, take
from moefuse.kernels.triton.words.gluon_names import view_as
from moefuse.kernels.triton.words.unpack import as_number


@gluon.jit
def multiply_rounded(
    a_bufs, b_bufs, ring, stage, phase, steps, from_r, s_a, s_b, at_s, PIECE: gl.constexpr, form: gl.constexpr, cut: gl.constexpr,
    coding: gl.constexpr,
):  # fmt: skip
    """(sums [M, BN] of a tile, stage, phase). from_r [M]: where the scales of the rows begin; s_a, s_b: those of the two halves.

    WHOLE: of codes alone.
    """
    WHOLE: gl.constexpr = coding.GROUP == 0
    STAGES: gl.constexpr = b_bufs.type.shape[0]
    PIECES: gl.constexpr = a_bufs.type.shape[0] // STAGES
    M: gl.constexpr = a_bufs.type.shape[1]
    BN: gl.constexpr = b_bufs.type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 32])
    acc = gl.zeros([M, BN], gl.float32, layout)
    part = gl.zeros([M, BN], gl.float32, layout)
    for k in range(steps):
        if not WHOLE:
            of_r = gl.load(from_r + k)  # [M]
            of_a = as_number(gl.load(s_a + k * at_s.stride_k), coding)  # []
        mbarrier.wait(ring.full.index(stage), phase)
        part = warpgroup_mma(a_bufs.index(stage * PIECES + PIECE), b_bufs.index(stage).permute((1, 0)), part, use_acc=False, is_async=True)
        if form.HALVES == 2 and not WHOLE:
            of_b = as_number(gl.load(s_b + k * at_s.stride_k), coding)  # []
        part = warpgroup_mma_wait(0, deps=(part,))  # [M, BN]
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
        if WHOLE:
            acc = acc + part
        elif form.HALVES == 2:
            col = gl.arange(0, BN, gl.SliceLayout(0, layout))  # [BN]
            acc = acc + part * (of_r[:, None] * gl.where(col < BN // 2, of_a, of_b)[None, :])
        else:
            acc = acc + part * (of_r * of_a)[:, None]
    return acc, stage, phase


@gluon.jit
def scaled(
    acc, from_r, s_a, s_b, at_s, first_a, first_b, features, WIDTH: gl.constexpr, form: gl.constexpr, coding: gl.constexpr
):  # fmt: skip
    """acc [M, BN] times the scales of its rows and of its features, of which those of the two halves begin at first_a and first_b."""
    col = gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, acc.type.layout))  # [BN]
    upper = col >= WIDTH
    n = gl.minimum(gl.where(upper, first_b + col - WIDTH, first_a + col), features - 1)
    at = (n // coding.BLOCK_N if coding.BLOCK_N > 0 else n * 0).to(gl.int64) * at_s.stride_n
    s = gl.load(s_a + at)  # [BN]
    if form.HALVES == 2:
        s = gl.where(upper, gl.load(s_b + at), s)  # [BN]
    return acc * (gl.load(from_r)[:, None] * as_number(s, coding)[None, :])  # [M, BN]


@gluon.jit
def consume_rounded(
    out_rows, lists, x_scales, s_a, s_b, a_bufs, b_bufs, o_bufs, ring, steps, at_s, first_a, first_b, form: gl.constexpr,
    coding: gl.constexpr, cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Group G of two that share each tile: its rows from G * 64 on."""
    STAGES: gl.constexpr = cut.STAGES
    M: gl.constexpr = cut.BM // cut.PIECES
    WHOLE: gl.constexpr = coding.GROUP == 0
    WIDTH: gl.constexpr = cut.BN // form.HALVES
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cut.BN, 32])
    pieces = view_as(a_bufs, a_bufs.dtype, [STAGES * cut.PIECES, M, cut.BK], a_bufs.layout)  # [STAGES * PIECES, M, BK]
    r = gl.arange(0, M, gl.SliceLayout(1, layout))  # [M]
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    e, start, rows, block = take(ring, slot, slot_phase)
    while e >= 0:
        if rows <= M * G:
            stage, phase = release(ring, stage, phase, steps, STAGES)
        else:
            live = gl.minimum(rows - M * G, M)
            from_r = x_scales + (start + M * G + gl.minimum(r, live - 1)).to(gl.int64) * (1 if WHOLE else steps)  # [M]
            of_a = expert_base(s_a, e.to(gl.int64), at_s.stride_e, coding.SCALES, coding.APART, False)  # []
            of_b = expert_base(s_b, e.to(gl.int64), at_s.stride_e, coding.SCALES, coding.APART, False)  # []
            if not WHOLE:
                of_a += (first_a + block * WIDTH) // coding.BLOCK_N * at_s.stride_n
                of_b += (first_b + block * WIDTH) // coding.BLOCK_N * at_s.stride_n
            acc, stage, phase = multiply_rounded(pieces, b_bufs, ring, stage, phase, steps, from_r, of_a, of_b, at_s, G, form, cut, coding)
            if WHOLE:
                acc = scaled(
                    acc, from_r, of_a, of_b, at_s, first_a + block * WIDTH, first_b + block * WIDTH, lists.features, WIDTH, form, coding
                )
            finish(acc, out_rows, lists, o_bufs, e, start + M * G, live, block, form, cut)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        e, start, rows, block = take(ring, slot, slot_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "blocks"])
def rounded_products(
    x_rows, x_scales, w_a, w_b, s_a, s_b, b_a, b_b, out_rows, tiles, num_tiles, steps_a, steps_b, max_tiles, blocks, K, features,
    at_a, at_b, at_s, args, form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """out [S, N], sorted rows, as of ``products.product_tiles``: codes of rows [S, K] with scales [S, K / 128] or, WHOLE, [S, 1], times
    codes of weights.

    K is whole steps, but if WHOLE. s_a, s_b: scales of weights, stacked or as addresses.
    """
    after_previous(cut.PDL)
    let_next_start(cut.PDL)
    STAGES: gl.constexpr = cut.STAGES
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, cut.BM, cut.BK], shared)
    b_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, cut.BN, cut.BK], shared)
    o_0 = gl.allocate_shared_memory(out_rows.dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)  # [BUFFERS, 1, 1, rows, W]
    o_1 = gl.allocate_shared_memory(out_rows.dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)  # [BUFFERS, 1, 1, rows, W]
    ring = make_ring(STAGES, cut.PIECES)
    lists = Lists(b_a, b_b, at_a, at_b, features, args)
    steps = (K + cut.BK - 1) // cut.BK
    fence_async_shared()
    gl.warp_specialize([
        (consume_rounded, (out_rows, lists, x_scales, s_a, s_b, a_bufs, b_bufs, o_0, ring, steps, at_s, at_a.first, at_b.first, form,
                           coding, cut, 0)),
        (consume_rounded, (out_rows, lists, x_scales, s_a, s_b, a_bufs, b_bufs, o_1, ring, steps, at_s, at_a.first, at_b.first, form,
                           coding, cut, 1)),
        (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, a_bufs, b_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                   cut)),
    ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
