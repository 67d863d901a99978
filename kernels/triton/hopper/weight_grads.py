"""Gradients of weights from sorted rows, with specialised warps: for each expert the product of two matrices over its rows.

A fixed grid walks over the tiles BM x BN of all experts' gradients, expert by expert; each sums BR rows a step. The producer copies both
factors by the tensor memory accelerator, clipped at the expert's last row (``layout.rows_descriptor``): what is behind counts as zeros,
whatever it holds. Two groups of four warps multiply by turns (``ring.py``), so that one stores while the other multiplies; with few rows to
an expert that is half of the work. A tile has one owner and one order: no atomics, no split over rows. An expert without rows gets zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moefuse.kernels.triton.device.functions import tile_order
from moefuse.kernels.triton.hopper.ring import (
    FAR_ROW,
    SLOTS,
    advance,
    announce,
    barriers,
    columns,
    complete,
    make_ring,
    multiply,
    skip,
    take,
)
from moefuse.kernels.triton.words.gluon_names import load_block, view_as, write_block


@gluon.jit
def rows_of(offsets, i, tiles):
    """(expert, its first row, the row behind its last) of tile i, of so many tiles for each expert."""
    e = i // tiles
    return e, gl.load(offsets + e).to(gl.int32), gl.load(offsets + e + 1).to(gl.int32)


@gluon.jit
def produce(g_rows, x_rows, offsets, a_bufs, b_bufs, ring, total, blocks_n, blocks_k, cut: gl.constexpr):
    """The producer: announces each tile of this program (expert, steps, steps of the tile before, place) and fills the ring."""
    STAGES: gl.constexpr = cut.STAGES
    PIECES: gl.constexpr = cut.PIECES
    M: gl.constexpr = cut.BM // cut.PIECES
    BYTES: gl.constexpr = PIECES * g_rows.block_type.nbytes + x_rows.block_type.nbytes
    g_views = view_as(a_bufs, g_rows.dtype, [STAGES * PIECES] + g_rows.block_type.shape, g_rows.layout)
    x_views = view_as(b_bufs, x_rows.dtype, [STAGES] + x_rows.block_type.shape, x_rows.layout)  # [STAGES, 1, 1, BK, BN]
    tiles = blocks_n * blocks_k
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    last = 0
    i = gl.program_id(0)
    e, begin, end = rows_of(offsets, i, tiles)
    while i < total:
        block_n, block_k = tile_order(i % tiles, blocks_n, blocks_k, cut.GROUP)
        steps = (end - begin + cut.BK - 1) // cut.BK
        slot, slot_phase = announce(ring, slot, slot_phase, e, steps, last, i % tiles)
        # The next tile is on its way while this one's steps are.
        next_e, next_begin, next_end = rows_of(offsets, gl.minimum(i + gl.num_programs(0), total - 1), tiles)
        for row in range(begin, end, cut.BK):
            rows = gl.minimum(end - row, cut.BK)
            mbarrier.wait(ring.empty.index(stage), phase)
            bar = ring.full.index(stage)
            mbarrier.expect(bar, BYTES)
            for n in gl.static_range(PIECES):
                at = block_n * cut.BM + n * M
                to = g_views.index(stage * PIECES + n)
                load_block(g_rows, [FAR_ROW, row + rows, FAR_ROW - rows, at], bar, to)  # [1, 1, BK, M]
            load_block(x_rows, [FAR_ROW, row + rows, FAR_ROW - rows, block_k * cut.BN], bar, x_views.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        last, i, e, begin, end = steps, i + gl.num_programs(0), next_e, next_begin, next_end
    slot, slot_phase = announce(ring, slot, slot_phase, -1, 0, 0, 0)
    if cut.FORM == "pingpong":
        slot, slot_phase = announce(ring, slot, slot_phase, -1, 0, 0, 0)


@gluon.jit
def store_columns(desc, buffers, v, e, n, k, SLOT: gl.constexpr, PARTS: gl.constexpr):
    """Store v [M, W] as the gradient's rows from n and columns from k of expert e, in PARTS blocks of columns."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    HALF: gl.constexpr = v.type.shape[1] // 2
    if PARTS == 1:
        tma.store_wait(BUFFERS - 1)
        view = buffers.index(SLOT % BUFFERS)  # [1, M, W]
        view.reshape(v.type.shape).store(v.to(desc.dtype))
        fence_async_shared()
        write_block(desc, [e, n, k], view)
    else:
        left, right = columns(v)  # [M, HALF]
        store_columns(desc, buffers, left, e, n, k, SLOT, PARTS // 2)
        store_columns(desc, buffers, right, e, n, k + HALF, SLOT + PARTS // 2, PARTS // 2)


@gluon.jit
def consume_shared(d_w, a_bufs, b_bufs, o_bufs, ring, blocks_n, blocks_k, cut: gl.constexpr, G: gl.constexpr):
    """Group G of two that share each tile."""
    STAGES: gl.constexpr = cut.STAGES
    PARTS: gl.constexpr = cut.PARTS
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    e, steps, _, place = take(ring, slot, slot_phase)
    while e >= 0:
        block_n, block_k = tile_order(place, blocks_n, blocks_k, cut.GROUP)
        acc, stage, phase = multiply(a_bufs, b_bufs, ring, stage, phase, steps, True, False, G)  # [M, BN]
        acc = complete(acc, ring, stage, steps, STAGES)
        n = block_n * cut.BM + G * (cut.BM // cut.PIECES)
        store_columns(d_w, o_bufs, acc, e, n, block_k * cut.BN, 0, PARTS)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        e, steps, _, place = take(ring, slot, slot_phase)
    tma.store_wait(0)


@gluon.jit
def consume_in_turn(d_w, a_bufs, b_bufs, o_bufs, ring, turn, blocks_n, blocks_k, cut: gl.constexpr, G: gl.constexpr):
    """Group G of two that take tiles by turns."""
    STAGES: gl.constexpr = cut.STAGES
    PARTS: gl.constexpr = cut.PARTS
    stage = 0
    phase = 0
    parity = 1 if G == 0 else 0  # the first tile is group 0's: it does not wait for its first turn
    slot_phase = 0
    gl.static_assert(SLOTS == 2)  # two notes, two groups
    e, steps, last, place = take(ring, G, slot_phase)
    while e >= 0:
        stage, phase = skip(stage, phase, last, STAGES)
        block_n, block_k = tile_order(place, blocks_n, blocks_k, cut.GROUP)
        mbarrier.wait(turn.index(G), parity)
        parity ^= 1
        acc, stage, phase = multiply(a_bufs, b_bufs, ring, stage, phase, steps, True, False, 0)  # [M, BN]
        mbarrier.arrive(turn.index(1 - G))
        acc = complete(acc, ring, stage, steps, STAGES)
        store_columns(d_w, o_bufs, acc, e, block_n * cut.BM, block_k * cut.BN, 0, PARTS)
        slot_phase ^= 1
        e, steps, last, place = take(ring, G, slot_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total", "blocks_n", "blocks_k"])
def weight_grad_products(g_rows, x_rows, d_w, offsets, total, blocks_n, blocks_k, cut: gl.constexpr):
    """d_w[e] [N, K] = sum over the rows of e of g[row]^T x[row], rounded once.

    Args:
        g_rows, x_rows: descriptors of g [S, N] and x [S, K] that clip rows; d_w: of the gradients [E, N, K].
        offsets: [E + 1]; total: tiles, blocks_n x blocks_k for each expert.
    """
    STAGES: gl.constexpr = cut.STAGES
    M: gl.constexpr = cut.BM // cut.PIECES
    READERS: gl.constexpr = cut.PIECES
    dtype: gl.constexpr = g_rows.dtype
    of_g: gl.constexpr = gl.NVMMASharedLayout(g_rows.layout.swizzle_byte_width, 16, 2)
    of_x: gl.constexpr = gl.NVMMASharedLayout(x_rows.layout.swizzle_byte_width, 16, 2)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES * cut.PIECES, cut.BK, M], of_g)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, cut.BK, cut.BN], of_x)
    o_0 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + d_w.block_type.shape, d_w.layout)  # [BUFFERS, 1, M, W]
    o_1 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + d_w.block_type.shape, d_w.layout)  # [BUFFERS, 1, M, W]
    ring = make_ring(STAGES, READERS)
    if cut.FORM == "pingpong":
        turn = barriers(2, 1)
        fence_async_shared()  # the copy engine must see the barriers as they were initialised
        gl.warp_specialize([
            (consume_in_turn, (d_w, a_bufs, b_bufs, o_0, ring, turn, blocks_n, blocks_k, cut, 0)),
            (consume_in_turn, (d_w, a_bufs, b_bufs, o_1, ring, turn, blocks_n, blocks_k, cut, 1)),
            (produce, (g_rows, x_rows, offsets, a_bufs, b_bufs, ring, total, blocks_n, blocks_k, cut)),
        ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize([
            (consume_shared, (d_w, a_bufs, b_bufs, o_0, ring, blocks_n, blocks_k, cut, 0)),
            (consume_shared, (d_w, a_bufs, b_bufs, o_1, ring, blocks_n, blocks_k, cut, 1)),
            (produce, (g_rows, x_rows, offsets, a_bufs, b_bufs, ring, total, blocks_n, blocks_k, cut)),
        ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
