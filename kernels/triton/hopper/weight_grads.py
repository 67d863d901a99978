"""Gradients of weights from sorted rows, with specialised warps: for each expert the product of two matrices over its rows.

A fixed grid walks over the tiles BM x BN of all experts' gradients, expert by expert; each sums BR rows a step. The producer copies both
factors by the tensor memory accelerator, clipped at the expert's last row (``layout.rows_descriptor``): what is behind counts as zeros,
whatever it holds. Two groups of four warps multiply by turns (``ring.py``), so that one stores while the other multiplies; with few rows to
an expert that is half of the work. A tile has one owner and one order: no atomics, no split over rows. An expert without rows gets zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moefuse.kernels.triton.device.functions import tile_order
from moefuse.kernels.triton.hopper.ring import FAR_ROW, advance, barriers, before, columns, skip


@gluon.jit
def rows_of(offsets, i, tiles):
    """(expert, its first row, the row behind its last) of tile i, of so many tiles for each expert."""
    e = i // tiles
    return e, gl.load(offsets + e).to(gl.int32), gl.load(offsets + e + 1).to(gl.int32)


@gluon.jit
def steps_of(offsets, i, tiles, BR: gl.constexpr):
    """Steps of tile i."""
    _, begin, end = rows_of(offsets, i, tiles)
    return (end - begin + BR - 1) // BR


@gluon.jit
def produce(g_rows, x_rows, offsets, a_bufs, b_bufs, full, empty, total, blocks_n, blocks_k, cut: gl.constexpr):
    """The producer: fills the ring with the steps of all tiles of this program."""
    STAGES: gl.constexpr = cut.STAGES
    BYTES: gl.constexpr = g_rows.block_type.nbytes + x_rows.block_type.nbytes
    stage = 0
    phase = 1
    for i in range(gl.program_id(0), total, gl.num_programs(0)):
        _, begin, end = rows_of(offsets, i, blocks_n * blocks_k)
        block_n, block_k = tile_order(i % (blocks_n * blocks_k), blocks_n, blocks_k, cut.GROUP)
        for row in range(begin, end, cut.BK):
            rows = gl.minimum(end - row, cut.BK)
            mbarrier.wait(empty.index(stage), phase)
            bar = full.index(stage)
            mbarrier.expect(bar, BYTES)
            tma.async_copy_global_to_shared(g_rows, [FAR_ROW, row + rows, FAR_ROW - rows, block_n * cut.BM], bar, a_bufs.index(stage))
            tma.async_copy_global_to_shared(x_rows, [FAR_ROW, row + rows, FAR_ROW - rows, block_k * cut.BN], bar, b_bufs.index(stage))
            stage, phase = advance(stage, phase, STAGES)


@gluon.jit
def store_columns(desc, buffers, v, e, n, k, SLOT: gl.constexpr, PARTS: gl.constexpr):
    """Store v [BM, W] as the gradient's rows from n and columns from k of expert e, in PARTS blocks of columns."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    HALF: gl.constexpr = v.type.shape[1] // 2
    if PARTS == 1:
        tma.store_wait(BUFFERS - 1)
        view = buffers.index(SLOT % BUFFERS)
        view.reshape(v.type.shape).store(v.to(desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [e, n, k], view)
    else:
        left, right = columns(v)
        store_columns(desc, buffers, left, e, n, k, SLOT, PARTS // 2)
        store_columns(desc, buffers, right, e, n, k + HALF, SLOT + PARTS // 2, PARTS // 2)


@gluon.jit
def consume(d_w, offsets, a_bufs, b_bufs, o_bufs, full, empty, turn, total, blocks_n, blocks_k, cut: gl.constexpr, G: gl.constexpr):
    """Group G of two that multiply by turns."""
    BM: gl.constexpr = cut.BM
    BN: gl.constexpr = cut.BN
    BR: gl.constexpr = cut.BK
    STAGES: gl.constexpr = cut.STAGES
    PARTS: gl.constexpr = cut.PARTS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    tiles = blocks_n * blocks_k
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    stage = 0
    phase = 0
    parity = 1 if G == 0 else 0  # the first tile is group 0's
    if G == 1:
        stage, phase = skip(stage, phase, steps_of(offsets, first, tiles, BR), STAGES)
        first += programs
    acc = gl.zeros([BM, BN], gl.float32, layout)
    for i in range(first, total, 2 * programs):
        e, begin, end = rows_of(offsets, i, tiles)
        block_n, block_k = tile_order(i % tiles, blocks_n, blocks_k, cut.GROUP)
        steps = (end - begin + BR - 1) // BR
        # What the other group does next, for the place in the ring after it.
        others = steps_of(offsets, gl.minimum(i + programs, total - 1), tiles, BR)
        mbarrier.wait(turn.index(G), parity)
        parity ^= 1
        for k in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a = a_bufs.index(stage).reshape([BR, BM]).permute((1, 0))
            b = b_bufs.index(stage).reshape([BR, BN])
            acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index(before(stage, STAGES)), pred=k > 0)
            stage, phase = advance(stage, phase, STAGES)
        mbarrier.arrive(turn.index(1 - G))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(before(stage, STAGES)), pred=steps > 0)
        store_columns(d_w, o_bufs, gl.where(steps > 0, acc, 0.0), e, block_n * BM, block_k * BN, 0, PARTS)
        stage, phase = skip(stage, phase, others, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["total", "blocks_n", "blocks_k"])
def weight_grad_products(g_rows, x_rows, d_w, offsets, total, blocks_n, blocks_k, cut: gl.constexpr):
    """d_w[e] [N, K] = sum over the rows of e of g[row]^T x[row], rounded once.

    Args:
        g_rows, x_rows: descriptors of g [S, N] and x [S, K] that clip rows; d_w: of the gradients [E, N, K].
        offsets: [E + 1]; total: tiles, blocks_n x blocks_k for each expert.
    """
    STAGES: gl.constexpr = cut.STAGES
    dtype: gl.constexpr = g_rows.dtype
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES] + g_rows.block_type.shape, g_rows.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES] + x_rows.block_type.shape, x_rows.layout)
    o_0 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + d_w.block_type.shape, d_w.layout)
    o_1 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + d_w.block_type.shape, d_w.layout)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 1)
    turn = barriers(2, 1)
    fence_async_shared()  # the copy engine must see the barriers as they were initialised
    gl.warp_specialize([
        (consume, (d_w, offsets, a_bufs, b_bufs, o_0, full, empty, turn, total, blocks_n, blocks_k, cut, 0)),
        (consume, (d_w, offsets, a_bufs, b_bufs, o_1, full, empty, turn, total, blocks_n, blocks_k, cut, 1)),
        (produce, (g_rows, x_rows, offsets, a_bufs, b_bufs, full, empty, total, blocks_n, blocks_k, cut)),
    ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
