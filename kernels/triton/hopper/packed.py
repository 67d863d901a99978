"""Products of weights in few bits with rows of 16 bits, with specialised warps: those who multiply unpack weights in their registers.

The producer, the ring and what becomes of a tile's sums are those of ``products.py``, but weights are the left operand: ``wgmma`` takes it
from registers, where the words of a step become numbers (``words/unpack.py``). So nothing unpacked is written anywhere, and while one group
of warps unpacks, the tensor cores have the other's step. A tile has 256 features, 64 and 64 for each group (of the gate and of the up
projection, whose outputs then are in the same thread), and up to 128 rows.

Four threads have a row of weights, each a quarter of the codes of a step's 64 inputs, so inputs have another order than in memory, and rows
are copied in that order beforehand (``device/rows.gather_in_order``); the first product stores its outputs so. A sum has one order only.

Left operands that are converted in registers are what Marlin and CUTLASS's mixed products do; the code is our own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from moefuse.kernels.triton.device.functions import after_previous, expert_base, let_next_start
from moefuse.kernels.triton.hopper.products import Lists, finished, produce
from moefuse.kernels.triton.hopper.ring import SLOTS, advance, before, make_ring, store_block, take
from moefuse.kernels.triton.words.products import halves
from moefuse.kernels.triton.words.unpack import unpacked


@gluon.constexpr_function
def words_layout(each):
    """Of words [64, 4 * each]: four threads have a row."""
    reg = [[0, i] for i in halves(each)] + [[8, 0]]
    lane = [[0, each], [0, 2 * each]] + [[i, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[16, 0], [32, 0]], [], [64, 4 * each])


@gluon.constexpr_function
def numbers_layout(each):
    """The same of [64, 4, each]."""
    reg = [[0, 0, i] for i in halves(each)] + [[8, 0, 0]]
    lane = [[0, 1, 0], [0, 2, 0]] + [[i, 0, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[16, 0, 0], [32, 0, 0]], [], [64, 4, each])


@gluon.jit
def operand_of(words, s, z, layout: gl.constexpr, coding: gl.constexpr):
    """The left operand [64, 64] of the words of a step, with scales and zeros [64, 4, 1] as they are held."""
    W: gl.constexpr = 16 // coding.PER
    L: gl.constexpr = words_layout(W)
    v = words.load(L).reshape([64, 4, W])
    w = unpacked(v, s, z, coding).reshape([64, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([64, 64])
    return gl.convert_layout(w, gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def in_order(v):
    """v [M, 64], whose features are the next product's inputs: in its order."""
    M: gl.constexpr = v.type.shape[0]
    return v.reshape([M, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([M, 64])


@gluon.jit
def numbers_of(base, e, first, at, features, dtype: gl.constexpr, BLOCK_N: gl.constexpr, APART: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the scales or zeros [64, 1, 1] of 64 features from ``first`` on begin."""
    n = first + gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    n = gl.minimum(n, features - 1)
    row = n // BLOCK_N if BLOCK_N > 0 else n * 0
    return (expert_base(base, e.to(gl.int64), at.stride_e, dtype, APART, False) + row * at.stride_n)[:, None, None]


@gluon.jit
def numbers_at(place, step, at, LAYOUT: gl.constexpr, BLOCK_K: gl.constexpr):
    """Scales or zeros [64, 4, 1] of a step."""
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    group = (step * 64 + q * 16) // BLOCK_K if BLOCK_K > 0 else q * 0
    return gl.load(place + group * at.stride_k)


@gluon.jit
def multiply_packed(
    x_bufs, words, ring, stage, phase, steps, s_a, s_b, z_a, z_b, at_s, at_z, A: gl.constexpr, B: gl.constexpr, L: gl.constexpr,
    coding: gl.constexpr,
):  # fmt: skip
    """(sums [64, M] of two blocks of features, stage, phase): blocks A and B of four of each stage's words, with the rows' inputs.

    One block is unpacked while the product of the other runs, so a stage is given back one product into the next step. x_bufs: pieces of
    the rows, of which the first of each stage is meant.
    """
    STAGES: gl.constexpr = words.type.shape[0] // 4
    PIECES: gl.constexpr = x_bufs.type.shape[0] // STAGES
    M: gl.constexpr = x_bufs.type.shape[1]
    BLOCK_K: gl.constexpr = coding.BLOCK_K
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    acc_a = gl.zeros([64, M], gl.float32, layout)
    acc_b = gl.zeros([64, M], gl.float32, layout)
    by_a, by_b = numbers_at(s_a, 0, at_s, L, BLOCK_K), numbers_at(s_b, 0, at_s, L, BLOCK_K)
    less_a, less_b = by_a, by_b
    if coding.ZERO:
        less_a, less_b = numbers_at(z_a, 0, at_z, L, BLOCK_K), numbers_at(z_b, 0, at_z, L, BLOCK_K)
    for k in range(steps):
        after = gl.minimum(k + 1, steps - 1)
        next_a, next_b = numbers_at(s_a, after, at_s, L, BLOCK_K), numbers_at(s_b, after, at_s, L, BLOCK_K)
        next_less_a, next_less_b = next_a, next_b
        if coding.ZERO:
            next_less_a, next_less_b = numbers_at(z_a, after, at_z, L, BLOCK_K), numbers_at(z_b, after, at_z, L, BLOCK_K)
        mbarrier.wait(ring.full.index(stage), phase)
        x = x_bufs.index(stage * PIECES).permute((1, 0))
        a = operand_of(words.index(stage * 4 + A), by_a, less_a, layout, coding)
        acc_a = warpgroup_mma(a, x, acc_a, is_async=True)
        acc_a, acc_b = warpgroup_mma_wait(1, deps=(acc_a, acc_b))
        mbarrier.arrive(ring.empty.index(before(stage, STAGES)), pred=k > 0)
        b = operand_of(words.index(stage * 4 + B), by_b, less_b, layout, coding)
        acc_b = warpgroup_mma(b, x, acc_b, is_async=True)
        acc_a, acc_b = warpgroup_mma_wait(1, deps=(acc_a, acc_b))
        stage, phase = advance(stage, phase, STAGES)
        by_a, by_b, less_a, less_b = next_a, next_b, next_less_a, next_less_b
    acc_b = warpgroup_mma_wait(0, deps=(acc_b,))
    mbarrier.arrive(ring.empty.index(before(stage, STAGES)))
    return acc_a, acc_b, stage, phase


@gluon.jit
def make_packed(
    out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s, at_z,
    form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Multiply and store group G's features of a tile, as high as the pieces of x_bufs are; (stage, phase) behind its steps."""
    BOTH: gl.constexpr = form.HALVES == 2
    FIRST: gl.constexpr = G if BOTH else 2 * G
    SECOND: gl.constexpr = G + 2 if BOTH else 2 * G + 1
    L: gl.constexpr = numbers_layout(16 // coding.PER)
    dtype: gl.constexpr = out_rows.dtype
    col = block * (cut.BN // form.HALVES) + FIRST * 64
    col_b = col if BOTH else col + 64
    from_a = numbers_of(s_a, e, lists.at_a.first + col, at_s, lists.features, coding.SCALES, coding.BLOCK_N, coding.APART, L)
    from_b = numbers_of(s_b, e, lists.at_b.first + col_b, at_s, lists.features, coding.SCALES, coding.BLOCK_N, coding.APART, L)
    zero_a, zero_b = from_a, from_b
    if coding.ZERO:
        zero_a = numbers_of(z_a, e, lists.at_a.first + col, at_z, lists.features, coding.ZEROS, coding.BLOCK_N, coding.APART, L)
        zero_b = numbers_of(z_b, e, lists.at_b.first + col_b, at_z, lists.features, coding.ZEROS, coding.BLOCK_N, coding.APART, L)
    acc_a, acc_b, stage, phase = multiply_packed(
        x_bufs, words, ring, stage, phase, steps, from_a, from_b, zero_a, zero_b, at_s, at_z, FIRST, SECOND, L, coding
    )
    if BOTH:
        v = finished(acc_a.permute((1, 0)), acc_b.permute((1, 0)), e, col, lists, dtype, form)
        store_block(out_rows, o_bufs, in_order(v), 0, start, rows, col)
    else:
        v = finished(acc_a.permute((1, 0)), acc_a, e, col, lists, dtype, form)
        w = finished(acc_b.permute((1, 0)), acc_b, e, col_b, lists, dtype, form)
        if form.ACT != "":
            v, w = in_order(v), in_order(w)
        store_block(out_rows, o_bufs, v, 0, start, rows, col)
        store_block(out_rows, o_bufs, w, 1, start, rows, col_b)
    return stage, phase


@gluon.jit
def consume_packed(
    out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_bufs, ring, steps, at_s, at_z, form: gl.constexpr, coding: gl.constexpr,
    cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Group G of two that share the features of each tile. One with no row in its second piece is multiplied without it."""
    STAGES: gl.constexpr = cut.STAGES
    WORDS: gl.constexpr = 64 // coding.PER
    words = w_bufs._reinterpret(gl.int32, [STAGES * 4, 64, WORDS], gl.NVMMASharedLayout(4 * WORDS, 32, 2))
    pieces = x_bufs._reinterpret(x_bufs.dtype, [STAGES * cut.PIECES, cut.piece, cut.BK], x_bufs.layout)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    e, start, rows, block = take(ring, slot, slot_phase)
    while e >= 0:
        if cut.PIECES == 1:
            stage, phase = make_packed(
                out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s, at_z,
                form, coding, cut, G,
            )  # fmt: skip
        else:
            if rows > cut.piece:
                stage, phase = make_packed(
                    out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s,
                    at_z, form, coding, cut, G,
                )  # fmt: skip
            else:
                stage, phase = make_packed(
                    out_rows, lists, s_a, s_b, z_a, z_b, pieces, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s,
                    at_z, form, coding, cut, G,
                )  # fmt: skip
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        e, start, rows, block = take(ring, slot, slot_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "blocks"])
def packed_products(
    x_rows, w_a, w_b, s_a, s_b, z_a, z_b, b_a, b_b, out_rows, tiles, num_tiles, steps_a, steps_b, max_tiles, blocks, K, features,
    at_a, at_b, at_s, at_z, args, form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """out [S, N], sorted rows, as of ``products.product_tiles``: rows [S, K], inputs in their order, times weights that are unpacked.

    K is whole steps of 64. w_a, w_b: descriptors of storage; s_a ... z_b: scales and zeros, stacked or as addresses. Outputs of an
    activation are in the order in which the next product reads them, all others in their own.
    """
    after_previous(cut.PDL)
    let_next_start(cut.PDL)
    STAGES: gl.constexpr = cut.STAGES
    x_bufs = gl.allocate_shared_memory(x_rows.dtype, [STAGES, cut.BM, cut.BK], x_rows.layout)
    plain: gl.constexpr = gl.NVMMASharedLayout(w_a.layout.swizzle_byte_width, w_a.layout.element_bitwidth, 2)
    INNER: gl.constexpr = cut.BK // form.PACK
    w_bufs = gl.allocate_shared_memory(w_a.dtype, [STAGES, cut.BN, INNER], plain)
    o_0 = gl.allocate_shared_memory(out_rows.dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)
    o_1 = gl.allocate_shared_memory(out_rows.dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)
    ring = make_ring(STAGES, 2)
    lists = Lists(b_a, b_b, at_a, at_b, features, args)
    steps = K // cut.BK
    fence_async_shared()
    gl.warp_specialize([
        (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_0, ring, steps, at_s, at_z, form, coding, cut, 0)),
        (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_1, ring, steps, at_s, at_z, form, coding, cut, 1)),
        (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, x_bufs, w_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                   cut)),
    ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
