"""The ring of stages between the warp that loads and the warps that multiply, their tiles, and the turns of two groups that multiply.

One warp, the producer, copies the operands of one step after another into STAGES buffers, one after the other; consumers (groups of four
warps) multiply what is there and give the buffer back. Each stage has two barriers:

* ``full[s]``: the producer expects so many bytes, the copies complete it. Consumers wait for it before they read.
* ``empty[s]``: each reader arrives once its product is over. The producer waits for it before it overwrites.

A barrier counts phases; a wait names the parity of one, and is right only for the phase that is running or the one before it. So the
producer waits for ``empty`` with parity 1 at first (that passes: nothing was in use yet), consumers for ``full`` with 0, and both flip it
where the ring begins again.

Which tiles a program makes is found while it runs: the first is its own number, each further one the next that nobody has, by a counter
(:func:`draw`). So all programs are near each other in the order of tiles, however long each of their tiles takes, and find the weights
and rows of their neighbours in the L2; with tiles shared out beforehand they drift apart (up to 1.6 times as long). The producer announces
each tile to its consumers through SLOTS notes, with barriers of their own (``announced``, ``taken``), which work like ``full`` and
``empty``. A note without an expert is the end.

FORM "pingpong": the groups take tiles by turns, group 0 the first; ring and notes have those of both in that order. ``turn[g]`` lets
group g begin: the other group arrives once it has *seen* its last step arrive, not before. That gives the tensor cores to one group while
the other stores. It is also what makes parities right: between two of its tiles a group leaves out the steps of the other, so a stage may
have been filled more than once since; but when its turn comes, all steps before its own have arrived, so each stage is in the phase before
the one that it waits for, or in that one. A tile of two pieces of rows with no row in the second is multiplied without it.
FORM "shared": both groups multiply each step, half of the rows each; a stage is given back by both. There are no turns. A group without
rows in a tile waits for each step and gives it back.

``tests/triton/test_ring.py`` runs a model of this protocol over random schedules: change both.

Never carry a value from before a loop into it under another name ("before = stage", then "stage += 1"): the front end of Triton 3.6 takes
it for a constant of the loop (``tests/triton/test_hopper_compiled.py`` watches for it). So what is counted here is made by functions.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from moefuse.kernels.triton.words.gluon_names import write_block


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """(stage, phase) of the next step."""
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def skip(stage, phase, steps, STAGES: gl.constexpr):
    """(stage, phase) so many steps on."""
    to = stage + steps
    return to % STAGES, phase ^ ((to // STAGES) & 1)


@gluon.jit
def before(stage, STAGES: gl.constexpr):
    """The stage of the step before."""
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which takes so many arrivals for a phase."""
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


SLOTS: gl.constexpr = gl.constexpr(2)
"""Notes of tiles that a program has."""


class Ring(NamedTuple):
    """The barriers of the stages, and the notes (``book``: SLOTS of four numbers) with theirs."""

    full: Any
    empty: Any
    book: Any
    announced: Any
    taken: Any


@gluon.jit
def make_ring(STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring whose stages and notes so many groups read, each of them."""
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, READERS)
    book = gl.allocate_shared_memory(gl.int32, [SLOTS, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Ring(full, empty, book, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.jit
def draw(counters):
    """Begin to take the next tile that no program has: what :func:`drawn` makes a number of, later, so that nobody waits for memory."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    one = lane * 0 + 1  # [32]
    return gl.atomic_add(counters + lane * 0, one, mask=lane == 0, sem="relaxed")  # [32]


@gluon.jit
def drawn(ticket):
    """The number of a tile that was drawn; the first ones belong to the programs by their own numbers."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.num_programs(0) + gl.sum(gl.where(lane == 0, ticket, 0), 0)


@gluon.jit
def end_of_tiles(counters):
    """Once for each program that found no more: the last one of all puts the counters back to 0, for the next launch."""
    others = gl.atomic_add(counters + 1, 1, sem="acq_rel")
    if others == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def announce(ring, slot, phase, first, second, third, fourth):
    """Write a note once the slot's last one was taken; (slot, phase) of the next one. For the producer, which is one warp."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    i = gl.arange(0, 4, layout)
    mbarrier.wait(ring.taken.index(slot), phase)
    ring.book.index(slot).store(gl.where(i == 0, first, gl.where(i == 1, second, gl.where(i == 2, third, fourth))).to(gl.int32))
    mbarrier.arrive(ring.announced.index(slot))
    return advance(slot, phase, SLOTS)


@gluon.jit
def take(ring, slot, phase):
    """The four numbers of a note. For a consumer, which is four warps."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 4, layout)
    mbarrier.wait(ring.announced.index(slot), phase)
    note = ring.book.index(slot).load(layout)  # [4]
    first = gl.sum(gl.where(i == 0, note, 0), 0)
    second = gl.sum(gl.where(i == 1, note, 0), 0)
    third = gl.sum(gl.where(i == 2, note, 0), 0)
    fourth = gl.sum(gl.where(i == 3, note, 0), 0)
    mbarrier.arrive(ring.taken.index(slot))
    return first, second, third, fourth


@gluon.jit
def release(ring, stage, phase, steps, STAGES: gl.constexpr):
    """Give back the stages of a tile that has nothing for this group, as they come; (stage, phase) behind them."""
    for _ in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def multiply(a_bufs, b_bufs, ring, stage, phase, steps, A_T: gl.constexpr, B_T: gl.constexpr, PIECE: gl.constexpr):
    """(sums [M, BN] of a tile, stage, phase): each stage is given back when the product of the next one has begun.

    Buffers hold [M, BK] and [BK, BN], or with A_T and B_T their transposes; of a, several pieces for each stage, of which this is number
    PIECE. The last product still runs: see :func:`complete`.
    """
    STAGES: gl.constexpr = b_bufs.type.shape[0]
    PIECES: gl.constexpr = a_bufs.type.shape[0] // STAGES
    M: gl.constexpr = a_bufs.type.shape[2 if A_T else 1]
    BN: gl.constexpr = b_bufs.type.shape[1 if B_T else 2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    acc = gl.zeros([M, BN], gl.float32, layout)
    for k in range(steps):
        mbarrier.wait(ring.full.index(stage), phase)
        a = a_bufs.index(stage * PIECES + PIECE)  # [M, BK], with A_T [BK, M]
        b = b_bufs.index(stage)  # [BK, BN], with B_T [BN, BK]
        if A_T:
            a = a.permute((1, 0))
        if B_T:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, use_acc=k > 0, is_async=True)  # [M, BN]
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(ring.empty.index(before(stage, STAGES)), pred=k > 0)
        stage, phase = advance(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def complete(acc, ring, stage, steps, STAGES: gl.constexpr):
    """The sums once the last product is over, and its stage given back."""
    acc = warpgroup_mma_wait(0, deps=(acc,))  # [M, BN]
    mbarrier.arrive(ring.empty.index(before(stage, STAGES)), pred=steps > 0)
    return acc


FAR_ROW: gl.constexpr = gl.constexpr(1 << 30)
"""What descriptors of rows count up to (``layout.rows_descriptor``)."""


@gluon.jit
def store_block(desc, buffers, v, slot: gl.constexpr, at, rows, col):
    """Store v [M, W] at rows [at, at + rows), clipped there, from column ``col``, through a buffer that was stored the longest ago."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    M: gl.constexpr = v.type.shape[0]
    tma.store_wait(BUFFERS - 1)
    view = buffers.index(slot % BUFFERS)  # [1, 1, rows, W]
    # What is behind M rows is not stored.
    view.reshape([buffers.type.shape[3], v.type.shape[1]]).slice(0, M, dim=0).store(v)
    fence_async_shared()
    write_block(desc, [FAR_ROW, at + rows, FAR_ROW - rows, col], view)


@gluon.jit
def columns(v):
    """Left and right half of v [M, N]."""
    M: gl.constexpr = v.type.shape[0]
    N: gl.constexpr = v.type.shape[1]
    return v.reshape([M, 2, N // 2]).permute(0, 2, 1).split()  # [M, N / 2]
