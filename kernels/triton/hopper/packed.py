"""Products of quantised weights with rows of 16 bits, with specialised warps: those who multiply unpack weights in their registers.

The producer and the ring are those of ``products.py``, but weights are the left operand: ``wgmma`` takes it from registers, where the words
of a step become numbers (``words/unpack.py``). So nothing unpacked is written anywhere, and while one group of warps unpacks, the tensor
cores have the step of another. Each of GROUPS groups has 64 rows of weights: 64 features, or of two projections 8 and 8 by turns, whose
outputs then are in the same thread; a tile has the features of all groups and up to 256 rows, and is multiplied as low as its rows allow.

Four threads have a row of weights, each a quarter of the codes of a step's 64 inputs, so inputs have another order than in memory, and rows
are copied in that order beforehand (``device/rows.gather_in_order``); the first product stores its outputs so. A sum has one order only.

ptxas lets products run beside other instructions only if none is under way where a loop begins again. So a step has two products, where
shared memory has room for 128 inputs: the second half is unpacked beside the first product.

Left operands that are converted in registers are what Marlin and CUTLASS's mixed products do; the code is our own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moefuse.kernels.triton.device.functions import after_previous, expert_base, gated, let_next_start, pointwise, rounded
from moefuse.kernels.triton.hopper.products import Lists, produce
from moefuse.kernels.triton.hopper.ring import SLOTS, advance, make_ring, store_block, take
from moefuse.kernels.triton.words.gluon_names import view_as
from moefuse.kernels.triton.words.products import halves
from moefuse.kernels.triton.words.unpack import unpacked


@gluon.constexpr_function
def words_layout(each, parts):
    """The layout of words [4, 8, parts * 4 * each], a warp for each first index: four threads have a row of each part."""
    reg = [[0, 0, i] for i in halves(each)] + [[0, 0, 4 * each * i] for i in halves(parts)]
    lane = [[0, 0, each], [0, 0, 2 * each]] + [[0, i, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[1, 0, 0], [2, 0, 0]], [], [4, 8, parts * 4 * each])


@gluon.constexpr_function
def turns_layout(each, parts):
    """The layout of words [4, 16, parts * 4 * each] of 8 and 8 rows by turns."""
    reg = [[0, 0, i] for i in halves(each)] + [[0, 0, 4 * each * i] for i in halves(parts)] + [[0, 1, 0]]
    lane = [[0, 0, each], [0, 0, 2 * each]] + [[0, 2 * i, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[1, 0, 0], [2, 0, 0]], [], [4, 16, parts * 4 * each])


@gluon.constexpr_function
def numbers_layout(each):
    """The layout of words [64, 4, each]: the rows of a product, of which a thread has two."""
    reg = [[0, 0, i] for i in halves(each)] + [[8, 0, 0]]
    lane = [[0, 1, 0], [0, 2, 0]] + [[i, 0, 0] for i in halves(8)]
    return gl.DistributedLinearLayout(reg, lane, [[16, 0, 0], [32, 0, 0]], [], [64, 4, each])


@gluon.jit
def words_of(words, stage, G: gl.constexpr, form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """A group's words [64, PARTS * 4 * W] of a stage."""
    W: gl.constexpr = 16 // coding.PER
    PARTS: gl.constexpr = cut.BK // 64
    L: gl.constexpr = words_layout(W, PARTS)
    if form.GATING == "interleaved":
        rows = words.index(stage * (cut.BN // 128) + G // 2).slice(16 * (G % 2), 16, dim=1).load(turns_layout(W, PARTS))
        first, second = rows.reshape([4, 8, 2, PARTS * 4 * W]).permute((0, 1, 3, 2)).split()  # [4, 8, PARTS * 4 * W]
    elif form.HALVES == 2:
        BLOCKS: gl.constexpr = cut.BN // 128
        at = stage * 2 * BLOCKS + G // 2
        first = words.index(at).slice(8 * (G % 2), 8, dim=1).load(L)  # [4, 8, PARTS * 4 * W]
        second = words.index(at + BLOCKS).slice(8 * (G % 2), 8, dim=1).load(L)  # [4, 8, PARTS * 4 * W]
    else:
        rows = words.index(stage * (cut.BN // 64) + G)  # [4, 16, PARTS * 4 * W]
        first = rows.slice(0, 8, dim=1).load(L)  # [4, 8, PARTS * 4 * W]
        second = rows.slice(8, 8, dim=1).load(L)  # [4, 8, PARTS * 4 * W]
    return gl.join(first, second).permute((0, 3, 1, 2)).reshape([64, PARTS * 4 * W])


@gluon.jit
def operand_of(v, s, z, layout: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """The left operand [64, 64] of words [64, 4 * W], with scales and zeros [64, 4, 1] as they are held."""
    W: gl.constexpr = 16 // coding.PER
    v = gl.convert_layout(v.reshape([64, 4, W]), numbers_layout(W), assert_trivial=True)  # [64, 4, W]
    w = unpacked(v, s, z, coding).reshape([64, 4, 4, 2, 2])
    if cut.APART:
        w = w.permute((0, 2, 4, 1, 3))
    else:
        w = w.permute((0, 2, 3, 1, 4))
    return gl.convert_layout(w.reshape([64, 64]), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def in_order(v, APART: gl.constexpr):
    """v [64, N] or half of it [4, 8, N], whose features are the next product's inputs: [features, N] in its order."""
    N: gl.constexpr = v.type.shape[len(v.type.shape) - 1]
    BOTH: gl.constexpr = len(v.type.shape) == 2
    P: gl.constexpr = 4 if BOTH else 2
    v = v.reshape([4, P, 2, 2, N])
    if APART:
        v = v.permute((1, 3, 0, 2, 4))
    else:
        v = v.permute((1, 2, 0, 3, 4))
    return v.reshape([16 * P, N])


@gluon.jit
def features_of(r, block, G: gl.constexpr, form: gl.constexpr, cut: gl.constexpr):
    """The outputs of rows r of a group, and whether a row is of the up projection (1) or of the gate (0)."""
    BOTH: gl.constexpr = form.GATING == "halves" or form.GATING == "interleaved"
    if BOTH:
        n, upper = block * (cut.BN // 2) + G // 2 * 64 + r // 16 * 16 + G % 2 * 8 + r % 8, r // 8 % 2
    else:
        n, upper = block * cut.BN + G * 64 + r, r * 0
    return n, upper


@gluon.jit
def numbers_of(
    base_a, base_b, e, block, at, lists, dtype: gl.constexpr, L: gl.constexpr, G: gl.constexpr, form: gl.constexpr, coding: gl.constexpr,
    cut: gl.constexpr,
):  # fmt: skip
    """Where the scales or zeros [64, 1, 1] of a group's rows begin."""
    n, upper = features_of(gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L))), block, G, form, cut)
    base = expert_base(base_a, e.to(gl.int64), at.stride_e, dtype, coding.APART, False)
    if form.GATING == "interleaved":
        n = 2 * n + upper
    n_a = gl.minimum(n + lists.at_a.first, lists.features - 1)
    if form.HALVES == 2:
        other = expert_base(base_b, e.to(gl.int64), at.stride_e, dtype, coding.APART, False)
        base = gl.where(upper == 0, base, other)
        n_a = gl.where(upper == 0, n_a, gl.minimum(n + lists.at_b.first, lists.features - 1))
    row = n_a // coding.BLOCK_N if coding.BLOCK_N > 0 else n_a * 0
    return (base + row * at.stride_n)[:, None, None]


@gluon.jit
def numbers_at(place, step, at, L: gl.constexpr, BLOCK_K: gl.constexpr):
    """Scales or zeros [64, 4, 1] of 64 inputs."""
    q = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]  # [1, 4, 1]
    group = (step * 64 + q * 16) // BLOCK_K if BLOCK_K > 0 else q * 0
    return gl.load(place + group * at.stride_k)  # [64, 4, 1]


@gluon.jit
def numbers_of_step(place, step, steps, at, L: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr):
    """Scales or zeros [64, 4, 1] of a step's first 64 inputs, and of its second 64."""
    step = gl.minimum(step, steps - 1) * (cut.BK // 64)
    first = numbers_at(place, step, at, L, coding.BLOCK_K)  # [64, 4, 1]
    second = first
    if cut.BK == 128 and coding.BLOCK_K % 128 != 0:
        second = numbers_at(place, step + 1, at, L, coding.BLOCK_K)
    return first, second


@gluon.jit
def multiply_packed(
    x_bufs, words, ring, stage, phase, steps, s, z, at_s, at_z, G: gl.constexpr, form: gl.constexpr, coding: gl.constexpr,
    cut: gl.constexpr,
):  # fmt: skip
    """(sums [64, M] of a group's rows of weights, stage, phase). x_bufs: pieces of M rows, of which the first of each part is meant."""
    STAGES: gl.constexpr = cut.STAGES
    PARTS: gl.constexpr = cut.BK // 64
    M: gl.constexpr = x_bufs.type.shape[1]
    PIECES: gl.constexpr = x_bufs.type.shape[0] // (STAGES * PARTS)
    L: gl.constexpr = numbers_layout(16 // coding.PER)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, M, 16])
    acc = gl.zeros([64, M], gl.float32, layout)
    by, by_2 = numbers_of_step(s, 0, steps, at_s, L, coding, cut)
    less, less_2 = by, by_2
    if coding.ZERO:
        less, less_2 = numbers_of_step(z, 0, steps, at_z, L, coding, cut)
    for k in range(steps):
        next_by, next_by_2 = numbers_of_step(s, k + 1, steps, at_s, L, coding, cut)
        next_less, next_less_2 = next_by, next_by_2
        if coding.ZERO:
            next_less, next_less_2 = numbers_of_step(z, k + 1, steps, at_z, L, coding, cut)
        mbarrier.wait(ring.full.index(stage), phase)
        v = words_of(words, stage, G, form, coding, cut)  # [64, PARTS * 4 * W]
        x = x_bufs.index(stage * PARTS * PIECES).permute((1, 0))  # [64, M]
        if PARTS == 1:
            acc = warpgroup_mma(operand_of(v, by, less, layout, coding, cut), x, acc, is_async=True)
        else:
            # The second half is unpacked while the product of the first runs.
            first, second = v.reshape([64, 2, v.type.shape[1] // 2]).permute((0, 2, 1)).split()  # [64, 4 * W]
            acc = warpgroup_mma(operand_of(first, by, less, layout, coding, cut), x, acc, is_async=True)
            x = x_bufs.index(stage * PARTS * PIECES + PIECES).permute((1, 0))  # [64, M]
            acc = warpgroup_mma(operand_of(second, by_2, less_2, layout, coding, cut), x, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))  # [64, M]
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
        by, by_2, less, less_2 = next_by, next_by_2, next_less, next_less_2
    return acc, stage, phase


@gluon.jit
def biases(lists, e, block, dtype: gl.constexpr, L: gl.constexpr, G: gl.constexpr, form: gl.constexpr, cut: gl.constexpr):
    """Biases [64, 1] of a group's rows, float32; nothing behind the last feature."""
    n, upper = features_of(gl.arange(0, 64, L), block, G, form, cut)
    base = expert_base(lists.b_a, e, lists.at_a.bias_e, dtype, form.BIAS_TABLE, False)
    if form.GATING == "interleaved":
        n = 2 * n + upper
    n_a = n + lists.at_a.first
    if form.HALVES == 2:
        base = gl.where(upper == 0, base, expert_base(lists.b_b, e, lists.at_b.bias_e, dtype, form.BIAS_TABLE, False))
        n_a = gl.where(upper == 0, n_a, n + lists.at_b.first)
    v = gl.load(base + n_a.to(gl.int64) * lists.at_a.bias_n, mask=n_a < lists.features, other=0.0)  # [64]
    return v.to(gl.float32)[:, None]


@gluon.jit
def make_packed(
    out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s, at_z,
    form: gl.constexpr, coding: gl.constexpr, cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Multiply and store a group's features of a tile, as high as the pieces of x_bufs are; (stage, phase) behind its steps."""
    ACT: gl.constexpr = form.ACT
    BOTH: gl.constexpr = form.GATING == "halves" or form.GATING == "interleaved"
    OUT: gl.constexpr = 32 if BOTH else 64
    L: gl.constexpr = numbers_layout(16 // coding.PER)
    M: gl.constexpr = x_bufs.type.shape[1]
    dtype: gl.constexpr = out_rows.dtype
    s = numbers_of(s_a, s_b, e, block, at_s, lists, coding.SCALES, L, G, form, coding, cut)  # [64, 1, 1]
    z = numbers_of(z_a, z_b, e, block, at_z, lists, coding.ZEROS, L, G, form, coding, cut) if coding.ZERO else s  # [64, 1, 1]
    acc, stage, phase = multiply_packed(x_bufs, words, ring, stage, phase, steps, s, z, at_s, at_z, G, form, coding, cut)  # [64, M]
    if form.BIAS:
        acc = acc + biases(lists, e, block, dtype, gl.SliceLayout(1, acc.type.layout), G, form, cut)
    acc = rounded(acc, dtype)
    if BOTH:
        gate, upper = acc.reshape([4, 2, 8, M]).permute((0, 2, 3, 1)).split()  # [4, 8, M]
        if form.UP_FIRST:
            gate, upper = upper, gate
        v = in_order(gated(gate, upper, lists.args[0], lists.args[1], ACT, True).to(dtype), cut.OUT_APART)  # [32, M]
    elif ACT != "":
        v = in_order(pointwise(acc, ACT, True).to(dtype), cut.OUT_APART)  # [64, M]
    else:
        v = acc.to(dtype)  # [64, M]
    store_block(out_rows, o_bufs, v.permute((1, 0)), 0, start, rows, block * (cut.GROUPS * OUT) + G * OUT)
    return stage, phase


@gluon.jit
def consume_packed(
    out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_bufs, ring, steps, at_s, at_z, form: gl.constexpr, coding: gl.constexpr,
    cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Group G of those that share the features of each tile. High tiles whose second half is empty are multiplied without it."""
    STAGES: gl.constexpr = cut.STAGES
    LOW: gl.constexpr = cut.BM // 2 if cut.BM >= 128 else 0
    lower = view_as(x_bufs, x_bufs.dtype, [2 * x_bufs.type.shape[0], cut.BM // 2, 64], x_bufs.layout)
    WORDS: gl.constexpr = cut.BK // coding.PER
    ROWS: gl.constexpr = 128 if form.GATING == "interleaved" else 64
    words = view_as(w_bufs, gl.int32, [STAGES * cut.BN // ROWS, 4, ROWS // 4, WORDS], gl.NVMMASharedLayout(4 * WORDS, 32, 3))
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    e, start, rows, block = take(ring, slot, slot_phase)
    while e >= 0:
        if LOW == 0 or rows > LOW:
            stage, phase = make_packed(
                out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s, at_z,
                form, coding, cut, G,
            )  # fmt: skip
        else:
            stage, phase = make_packed(
                out_rows, lists, s_a, s_b, z_a, z_b, lower, words, o_bufs, ring, stage, phase, steps, e, start, rows, block, at_s, at_z,
                form, coding, cut, G,
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
    x_bufs = gl.allocate_shared_memory(x_rows.dtype, [STAGES * (cut.BK // 64), cut.BM, 64], x_rows.layout)
    plain: gl.constexpr = gl.NVMMASharedLayout(w_a.layout.swizzle_byte_width, w_a.layout.element_bitwidth, 2)
    w_bufs = gl.allocate_shared_memory(w_a.dtype, [STAGES, cut.BN, cut.BK // form.PACK], plain)
    OUT: gl.constexpr = [1] + out_rows.block_type.shape
    o_0 = gl.allocate_shared_memory(out_rows.dtype, OUT, out_rows.layout)  # [1, 1, 1, BM, 32 or 64]
    o_1 = gl.allocate_shared_memory(out_rows.dtype, OUT, out_rows.layout)
    ring = make_ring(STAGES, cut.GROUPS)
    lists = Lists(b_a, b_b, at_a, at_b, features, args)
    steps = K // cut.BK
    fence_async_shared()
    # Tuples stay where they are used: in an assignment, constexprs in them would become tensors.
    if cut.GROUPS == 2:
        gl.warp_specialize([
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_0, ring, steps, at_s, at_z, form, coding, cut, 0)),
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_1, ring, steps, at_s, at_z, form, coding, cut, 1)),
            (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, x_bufs, w_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                       cut)),
        ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
    else:
        o_2 = gl.allocate_shared_memory(out_rows.dtype, OUT, out_rows.layout)
        o_3 = gl.allocate_shared_memory(out_rows.dtype, OUT, out_rows.layout)
        gl.warp_specialize([
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_0, ring, steps, at_s, at_z, form, coding, cut, 0)),
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_1, ring, steps, at_s, at_z, form, coding, cut, 1)),
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_2, ring, steps, at_s, at_z, form, coding, cut, 2)),
            (consume_packed, (out_rows, lists, s_a, s_b, z_a, z_b, x_bufs, w_bufs, o_3, ring, steps, at_s, at_z, form, coding, cut, 3)),
            (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, x_bufs, w_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                       cut)),
        ], [4, 4, 4, 1], [cut.REGISTERS, cut.REGISTERS, cut.REGISTERS, cut.SPARE])  # fmt: skip
