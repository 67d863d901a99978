"""Rows [S, K] in sorted order times their experts' weights, with specialised warps: the first projection with its activation, the second
one, and the products of the grouped tier and of training.

A fixed grid walks over the tiles of ``device/routing.py``, each up to BM rows of one expert times the features of a block. The producer
copies rows and weights of each step of BK inputs by the tensor memory accelerator; two groups of four warps multiply (``ring.py``).

A block is BN columns of the sum. HALVES 2: half of them features of the gate and as many of the up projection, from two descriptors (which
may show one tensor), so that one product makes both and the activation finds them in one thread. The wait for a step's product comes one
step later, so the tensor cores always have two to do.

Rows behind a tile's end belong to other tiles or to nobody, columns behind the last feature to other weights: they make sums that are not
stored. Every sum has one order: no atomics, no split. (Tiles are counted by an atomic, which decides who makes one, not how.)

Persistent warp-specialised grouped products with alternating consumers are CUTLASS's ("ping-pong"); the code is our own.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from moefuse.kernels.triton.device.functions import after_previous, expert_base, expert_order, gated, let_next_start, pointwise, rounded
from moefuse.kernels.triton.hopper.ring import (
    SLOTS,
    advance,
    announce,
    barriers,
    columns,
    complete,
    draw,
    drawn,
    end_of_tiles,
    make_ring,
    multiply,
    release,
    skip,
    store_block,
    take,
)
from moefuse.kernels.triton.words.gluon_names import load_block, view_as


class Lists(NamedTuple):
    """What finishing a tile needs: biases, where they are, features of the stored weight, constants of the activation."""

    b_a: Any
    b_b: Any
    at_a: Any
    at_b: Any
    features: Any
    args: Any


@gluon.jit
def copy_weights(desc, steps, e, rows, col, k, bar, to, DESC: gl.constexpr):
    """Begin to copy weights of expert e: features from ``col``, inputs from ``k``. The forms are those of ``gemm.weight_tile``."""
    if DESC == "out-in":
        load_block(desc, [e * rows + col, k], bar, to)  # [WIDTH, BK]
    elif DESC == "in-out":
        load_block(desc, [e * rows + k, col], bar, to)  # [BK, WIDTH]
    else:
        step = gl.load(steps + e)  # []
        far, near = (step >> 30).to(gl.int32), (step & 0x3FFFFFFF).to(gl.int32)
        if DESC == "apart out-in":
            load_block(desc, [far, near, col, k], bar, to)  # [1, 1, WIDTH, BK]
        else:
            gl.static_assert(DESC == "apart in-out")
            load_block(desc, [far, near, k, col], bar, to)  # [1, 1, BK, WIDTH]


@gluon.jit
def tile_of(tiles, i, total, max_tiles, blocks, GROUP: gl.constexpr):
    """(expert, first row, rows, block of columns) of a tile; of one that is not there, nothing of use."""
    there = i < total
    i = gl.where(there, i, 0)
    place = tiles + i // blocks
    before = gl.where(there, gl.load(place + 3 * max_tiles), 0)
    count = gl.where(there, gl.load(place + 4 * max_tiles), 1)
    tile, block = expert_order(i, i // blocks, before, count, blocks, GROUP)
    at = tiles + tile
    return gl.load(at), gl.load(at + max_tiles), gl.load(at + 2 * max_tiles), block


@gluon.jit
def expect(bar, WEIGHTS: gl.constexpr, ROWS: gl.constexpr, live, PIECES: gl.constexpr):
    """The bytes of a step's copies: weights, and ROWS for each live piece of the rows; a tile of the list has one at least."""
    if PIECES == 1:
        mbarrier.expect(bar, WEIGHTS + ROWS)
    else:
        for n in gl.static_range(1, PIECES + 1):
            mbarrier.expect(bar, WEIGHTS + n * ROWS, pred=live == n)


@gluon.jit
def produce(
    x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, a_bufs, b_bufs, ring, max_tiles,
    blocks, K, at_a, at_b, form: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """The producer: takes tiles, announces them, and fills the ring with their steps. Pieces without a row are left as they are."""
    DESC: gl.constexpr = form.DESC
    STAGES: gl.constexpr = cut.STAGES
    PIECES: gl.constexpr = cut.PIECES
    M: gl.constexpr = cut.BM // cut.PIECES
    INPUTS: gl.constexpr = x_rows.block_type.shape[1]
    PARTS: gl.constexpr = cut.BK // INPUTS
    WIDTH: gl.constexpr = cut.BN // form.HALVES
    WEIGHTS: gl.constexpr = form.HALVES * w_a.block_type.nbytes
    ROWS: gl.constexpr = PARTS * x_rows.block_type.nbytes
    pieces = view_as(a_bufs, x_rows.dtype, [STAGES * PARTS * PIECES] + x_rows.block_type.shape, x_rows.layout)  # [.., M, INPUTS]
    views = view_as(b_bufs, w_a.dtype, [STAGES * form.HALVES] + w_a.block_type.shape, w_a.layout)
    total = gl.load(num_tiles) * blocks
    stage = 0
    phase = 1
    slot = 0
    slot_phase = 1
    i = gl.program_id(0)
    following = drawn(draw(num_tiles + 1))
    e, start, rows, block = tile_of(tiles, i, total, max_tiles, blocks, cut.GROUP)
    while i < total:
        slot, slot_phase = announce(ring, slot, slot_phase, e, start, rows, block)
        # What comes next is on its way while this tile's steps are: neither the number after the next nor the next tile is waited for.
        ticket = draw(num_tiles + 1)
        next_e, next_start, next_rows, next_block = tile_of(tiles, following, total, max_tiles, blocks, cut.GROUP)
        live = (rows + M - 1) // M
        for k in range(0, K, cut.BK):
            mbarrier.wait(ring.empty.index(stage), phase)
            bar = ring.full.index(stage)
            expect(bar, WEIGHTS, ROWS, live, PIECES)
            at_k = k // form.PACK
            copy_weights(w_a, steps_a, e, at_a.rows, at_a.first + block * WIDTH, at_k, bar, views.index(stage * form.HALVES), DESC)
            if form.HALVES == 2:
                copy_weights(w_b, steps_b, e, at_b.rows, at_b.first + block * WIDTH, at_k, bar, views.index(stage * 2 + 1), DESC)
            for n in gl.static_range(PARTS * PIECES):
                at = [start + n % PIECES * M, k + n // PIECES * INPUTS]
                load_block(x_rows, at, bar, pieces.index(stage * PARTS * PIECES + n), pred=n % PIECES < live)
            stage, phase = advance(stage, phase, STAGES)
        i, e, start, rows, block = following, next_e, next_start, next_rows, next_block
        following = drawn(ticket)
    end_of_tiles(num_tiles + 1)
    slot, slot_phase = announce(ring, slot, slot_phase, -1, 0, 0, 0)
    if cut.FORM == "pingpong":
        slot, slot_phase = announce(ring, slot, slot_phase, -1, 0, 0, 0)


@gluon.jit
def with_bias(acc, bias, e, at, first, features, dtype: gl.constexpr, TABLE: gl.constexpr):
    """acc [M, N] plus the biases of N features from ``first``; nothing behind the last feature."""
    n = first + gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, acc.type.layout))  # [N]
    base = expert_base(bias, e, at.bias_e, dtype, TABLE, False)
    v = gl.load(base + (at.first + n).to(gl.int64) * at.bias_n, mask=n < features, other=0.0)  # [N]
    return acc + v.to(gl.float32)[None, :]


@gluon.jit
def finished(acc, acc_b, e, col, lists, dtype: gl.constexpr, form: gl.constexpr):
    """What is stored [M, W] of sums, from column ``col`` of the output on: themselves, or their activation; rounded after each step.

    acc_b: the sums of the up projection where they are apart from the gate's.
    """
    ACT: gl.constexpr = form.ACT
    TABLE: gl.constexpr = form.BIAS_TABLE
    if form.BIAS:
        first = 2 * col if form.GATING == "interleaved" else col
        acc = with_bias(acc, lists.b_a, e, lists.at_a, first, lists.features, dtype, TABLE)
    if form.BIAS_B:
        acc_b = with_bias(acc_b, lists.b_b, e, lists.at_b, col, lists.features, dtype, TABLE)
    if ACT == "":
        r = acc.to(dtype)  # [M, W]
    elif form.GATING == "plain":
        r = pointwise(rounded(acc, dtype), ACT, True).to(dtype)
    elif form.GATING == "interleaved":
        gate, up = rounded(acc, dtype).reshape([acc.type.shape[0], acc.type.shape[1] // 2, 2]).split()  # [M, W]
        if form.UP_FIRST:
            gate, up = up, gate
        r = gated(gate, up, lists.args[0], lists.args[1], ACT, True).to(dtype)
    else:
        r = gated(rounded(acc, dtype), rounded(acc_b, dtype), lists.args[0], lists.args[1], ACT, True).to(dtype)
    return r


@gluon.jit
def store_tile(
    desc, buffers, acc, acc_b, e, start, rows, col, lists, SLOT: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr, form: gl.constexpr
):
    """Finish and store a tile of sums in PARTS blocks of columns, one after the other: that keeps few of them in registers twice."""
    dtype: gl.constexpr = desc.dtype
    if PARTS == 1:
        store_block(desc, buffers, finished(acc, acc_b, e, col, lists, dtype, form), SLOT, start, rows, col)
    else:
        HALF: gl.constexpr = WIDTH // 2
        left, right = columns(acc)  # half of the columns each
        left_b, right_b = left, right
        if form.HALVES == 2:
            left_b, right_b = columns(acc_b)
        store_tile(desc, buffers, left, left_b, e, start, rows, col, lists, SLOT, PARTS // 2, HALF, form)
        store_tile(desc, buffers, right, right_b, e, start, rows, col + HALF, lists, SLOT + PARTS // 2, PARTS // 2, HALF, form)


@gluon.jit
def finish(acc, out_rows, lists, o_bufs, e, start, rows, block, form: gl.constexpr, cut: gl.constexpr):
    """:func:`store_tile` of the sums of a tile."""
    OUT: gl.constexpr = cut.BN if form.GATING == "plain" else cut.BN // 2
    PARTS: gl.constexpr = cut.PARTS
    gate, up = acc, acc
    if form.HALVES == 2:
        gate, up = columns(acc)  # [M, BN / 2]
    store_tile(out_rows, o_bufs, gate, up, e, start, rows, block * OUT, lists, 0, PARTS, OUT, form)


@gluon.jit
def consume_shared(
    out_rows, lists, a_bufs, b_bufs, o_bufs, ring, steps, form: gl.constexpr, cut: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """Group G of two that share each tile: its rows from G * 64 on."""
    gl.static_assert(cut.PIECES == 2)
    OUT_IN: gl.constexpr = form.DESC == "out-in" or form.DESC == "apart out-in"
    STAGES: gl.constexpr = cut.STAGES
    M: gl.constexpr = cut.BM // cut.PIECES
    pieces = view_as(a_bufs, a_bufs.dtype, [STAGES * cut.PIECES, M, cut.BK], a_bufs.layout)  # [STAGES * PIECES, M, BK]
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    e, start, rows, block = take(ring, slot, slot_phase)
    while e >= 0:
        if rows <= M * G:
            stage, phase = release(ring, stage, phase, steps, STAGES)
        else:
            acc, stage, phase = multiply(pieces, b_bufs, ring, stage, phase, steps, False, OUT_IN, G)  # [M, BN]
            acc = complete(acc, ring, stage, steps, STAGES)
            finish(acc, out_rows, lists, o_bufs, e, start + M * G, gl.minimum(rows - M * G, M), block, form, cut)
        slot, slot_phase = advance(slot, slot_phase, SLOTS)
        e, start, rows, block = take(ring, slot, slot_phase)
    tma.store_wait(0)


@gluon.jit
def make_in_turn(
    out_rows, lists, a_bufs, b_bufs, o_bufs, ring, turn, steps, stage, phase, e, start, rows, block, form: gl.constexpr,
    cut: gl.constexpr, G: gl.constexpr,
):  # fmt: skip
    """Multiply and store a tile that is group G's, as high as the pieces of ``a_bufs`` are; (stage, phase) behind its steps."""
    OUT_IN: gl.constexpr = form.DESC == "out-in" or form.DESC == "apart out-in"
    STAGES: gl.constexpr = cut.STAGES
    acc, stage, phase = multiply(a_bufs, b_bufs, ring, stage, phase, steps, False, OUT_IN, 0)  # [M, BN]
    mbarrier.arrive(turn.index(1 - G))
    acc = complete(acc, ring, stage, steps, STAGES)
    finish(acc, out_rows, lists, o_bufs, e, start, rows, block, form, cut)
    return stage, phase


@gluon.jit
def consume_in_turn(
    out_rows, lists, a_bufs, b_bufs, o_bufs, ring, turn, steps, form: gl.constexpr, cut: gl.constexpr,
    G: gl.constexpr,
):  # fmt: skip
    """Group G of two that take tiles by turns."""
    STAGES: gl.constexpr = cut.STAGES
    M: gl.constexpr = cut.BM // cut.PIECES
    pieces = view_as(a_bufs, a_bufs.dtype, [STAGES * cut.PIECES, M, cut.BK], a_bufs.layout)  # [STAGES * PIECES, M, BK]
    stage = 0
    phase = 0
    parity = 1 if G == 0 else 0  # the first tile is group 0's: it does not wait for its first turn
    slot_phase = 0
    if G == 1:
        stage, phase = skip(stage, phase, steps, STAGES)
    # Two notes, two groups: each has a note of its own.
    gl.static_assert(SLOTS == 2)
    e, start, rows, block = take(ring, G, slot_phase)
    while e >= 0:
        mbarrier.wait(turn.index(G), parity)
        parity ^= 1
        if cut.PIECES == 1:
            stage, phase = make_in_turn(
                out_rows, lists, a_bufs, b_bufs, o_bufs, ring, turn, steps, stage, phase, e, start, rows, block, form, cut, G
            )
        else:
            if rows > M:
                stage, phase = make_in_turn(
                    out_rows, lists, a_bufs, b_bufs, o_bufs, ring, turn, steps, stage, phase, e, start, rows, block, form, cut, G
                )
            else:
                stage, phase = make_in_turn(
                    out_rows, lists, pieces, b_bufs, o_bufs, ring, turn, steps, stage, phase, e, start, rows, block, form, cut, G
                )
        stage, phase = skip(stage, phase, steps, STAGES)
        slot_phase ^= 1
        e, start, rows, block = take(ring, G, slot_phase)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["max_tiles", "blocks"])
def product_tiles(
    x_rows, w_a, w_b, b_a, b_b, out_rows, tiles, num_tiles, steps_a, steps_b, max_tiles, blocks, K, features, at_a, at_b,
    args, form: gl.constexpr, cut: gl.constexpr,
):  # fmt: skip
    """out [S, N], sorted rows: rows of x [S, K] times W_a^T (+ b_a), and of two halves the activation; rows of nobody are not written.

    Args:
        x_rows, out_rows: descriptors of rows; w_a, w_b: of weights. b_a, b_b: biases.
        steps_a, steps_b: int64 [E] for experts that are apart (``operands.steps_table``).
        tiles: int32 [5, max_tiles]; num_tiles: int32 [3] (``device/routing.py``).
        blocks: of columns; features: of the stored weight, past which there is no bias; args: constants of the activation.
    """
    after_previous(cut.PDL)
    let_next_start(cut.PDL)
    STAGES: gl.constexpr = cut.STAGES
    READERS: gl.constexpr = 1 if cut.FORM == "pingpong" else cut.PIECES
    OUT_IN: gl.constexpr = form.DESC == "out-in" or form.DESC == "apart out-in"
    dtype: gl.constexpr = x_rows.dtype
    plain: gl.constexpr = gl.NVMMASharedLayout(w_a.layout.swizzle_byte_width, 16, 2)
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, cut.BM, cut.BK], x_rows.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, cut.BN, cut.BK] if OUT_IN else [STAGES, cut.BK, cut.BN], plain)
    o_0 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)  # [BUFFERS, 1, 1, rows, W]
    o_1 = gl.allocate_shared_memory(dtype, [cut.BUFFERS] + out_rows.block_type.shape, out_rows.layout)  # [BUFFERS, 1, 1, rows, W]
    ring = make_ring(STAGES, READERS)
    lists = Lists(b_a, b_b, at_a, at_b, features, args)
    steps = (K + cut.BK - 1) // cut.BK
    # Tuples stay where they are used: in an assignment, constexprs in them would become tensors.
    if cut.FORM == "pingpong":
        turn = barriers(2, 1)
        fence_async_shared()  # the copy engine must see the barriers as they were initialised
        gl.warp_specialize([
            (consume_in_turn, (out_rows, lists, a_bufs, b_bufs, o_0, ring, turn, steps, form, cut, 0)),
            (consume_in_turn, (out_rows, lists, a_bufs, b_bufs, o_1, ring, turn, steps, form, cut, 1)),
            (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, a_bufs, b_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                       cut)),
        ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize([
            (consume_shared, (out_rows, lists, a_bufs, b_bufs, o_0, ring, steps, form, cut, 0)),
            (consume_shared, (out_rows, lists, a_bufs, b_bufs, o_1, ring, steps, form, cut, 1)),
            (produce, (x_rows, w_a, w_b, steps_a, steps_b, tiles, num_tiles, a_bufs, b_bufs, ring, max_tiles, blocks, K, at_a, at_b, form,
                       cut)),
        ], [4, 1], [cut.REGISTERS, cut.SPARE])  # fmt: skip
