"""The ring of stages between the warp that loads and the warps that multiply, and the turns of two groups that multiply.

One warp, the producer, copies the operands of one step after another into STAGES buffers, one after the other; consumers (four warps each)
multiply what is there and give the buffer back. Each stage has two barriers:

* ``full[s]``: the producer expects so many bytes, the copies complete it. Consumers wait for it before they read.
* ``empty[s]``: each reader arrives once its product is over. The producer waits for it before it overwrites.

A barrier counts phases; a wait names the parity of one, and is right only for the phase that is running or the one before it. So the
producer waits for ``empty`` with parity 1 at first (that passes: nothing was in use yet), consumers for ``full`` with 0, and both flip it
where the ring begins again.

FORM "pingpong": the groups take tiles by turns, group 0 the first; the ring has the steps of both in that order. ``turn[g]`` lets group g
begin: the other group arrives once it has *seen* its last step arrive, not before. That gives the tensor cores to one group while the other
stores. It is also what makes parities right: between two of its tiles a group leaves out the steps of the other, so a stage may have been
filled more than once since; but when its turn comes, all steps before its own have arrived, so each stage is in the phase before the one
that it waits for, or in that one.
FORM "shared": both groups multiply each step, half of the rows each; a stage is given back by both. There are no turns.

``tests/triton/test_ring.py`` runs a model of this protocol over random schedules: change both.

Never carry a value from before a loop into it under another name ("before = stage", then "stage += 1"): the front end of Triton 3.6 takes
it for a constant of the loop (``tests/triton/test_hopper_compiled.py`` watches for it). So what is counted here is made by functions.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma


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


FAR_ROW: gl.constexpr = gl.constexpr(1 << 30)
"""What descriptors of rows count up to (``layout.rows_descriptor``)."""


@gluon.jit
def store_block(desc, buffers, v, slot: gl.constexpr, at, rows, col):
    """Store v [M, W] at rows [at, at + rows), clipped there, from column ``col``, through a buffer that was stored the longest ago."""
    BUFFERS: gl.constexpr = buffers.type.shape[0]
    tma.store_wait(BUFFERS - 1)
    view = buffers.index(slot % BUFFERS)
    view.reshape(v.type.shape).store(v)
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [FAR_ROW, at + rows, FAR_ROW - rows, col], view)


@gluon.jit
def columns(v):
    """Left and right half of v [M, N]."""
    M: gl.constexpr = v.type.shape[0]
    N: gl.constexpr = v.type.shape[1]
    return v.reshape([M, 2, N // 2]).permute(0, 2, 1).split()
