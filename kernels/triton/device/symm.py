"""Rows between GPUs of one host, through memory that each rank lets the others write (``moefuse/runtime/transports/symm.py``).

A transfer is two kernels on each rank with a barrier of all ranks between them: one *pushes* this rank's rows into the buffers of those
that need them, one *takes* what has come out of a rank's own buffer. Whoever sends knows from ids who needs a row; stores to a peer wait
for nothing, where loads from it take the link's latency one after another (ids, then rows): pushing was measured to be faster than pulling.
Few rows are taken by few programs, which come to the barrier themselves (WAITS). More programs would hold the device against what others
may be waiting for, NCCL's kernels for instance; in front of them the barrier is a kernel of one program. There are two sets of buffers. A
rank may write to a set again when all have taken what was in it: they have, once they came to the barrier of the transfer in between.
Transfers are counted on the device, so that a CUDA graph may be replayed between other calls: ``turn`` is [next, current]; pushes read the
first and write the second, takes the other way round. ``flags`` [3, 64] of a rank: how many transfers each rank has pushed, and M as each
has it, of the last two transfers: a rank is at most one ahead.

P ranks, M the most rows of any; row t of rank r arrives as r * M + t. ``took`` [P * M]: whether this rank has an expert of a row; ``to``
[T]: the ranks that have one of a token, a bit each. ``bases`` [P]: where each rank's memory is; a rank's own rows go through no buffer.
"""

import triton
import triton.language as tl


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _next(turn):
    """The transfer that begins, for a push."""
    now = tl.load(turn)  # []
    if tl.program_id(0) == 0:
        tl.store(turn + 1, now)
    return now


@triton.jit
def _current(turn):
    """The transfer that has come, for a take."""
    now = tl.load(turn + 1)  # []
    if tl.program_id(0) == 0:
        tl.store(turn, now + 1)
    return now


@triton.jit(do_not_specialize=["M", "rank"])
def barrier(bases, turn, flags, M, rank, at_flags, patience, WORLD: tl.constexpr, BW: tl.constexpr, TIMED: tl.constexpr):
    """One program, between a push and a take."""
    _meet(bases, tl.load(turn + 1), flags, M, rank, at_flags, patience, WORLD, BW, TIMED)


@triton.jit(do_not_specialize=["rank"])
def tell(bases, rank, at_came, EACH: tl.constexpr, WORLD: tl.constexpr, BW: tl.constexpr):
    """One program, behind what was sent beside: 1 in every other rank's place for this one, the first of EACH."""
    r = tl.arange(0, BW)
    other = (r < WORLD) & (r != rank)
    theirs = (tl.load(bases + r, mask=other, other=0) + at_came).to(tl.pointer_type(tl.int32))  # [BW]
    tl.atomic_xchg(theirs + rank * EACH, tl.zeros([BW], tl.int32) + 1, mask=other, sem="release", scope="sys")


@triton.jit
def wait_for(came, patience, TIMED: tl.constexpr):
    """One program: what another rank sends beside has come, of which it told ``came`` [1]. It is 0 again before that rank hears of anything
    later that this one does."""
    seen = tl.load(came, volatile=True)  # []
    if TIMED:
        begin = tl.extra.cuda.globaltimer()
    while seen == 0:
        seen = tl.load(came, volatile=True)  # []
        if TIMED:  # noqa: SIM102 (one is of the compiler, one of the device)
            if tl.extra.cuda.globaltimer() - begin > patience:
                _trap()
    tl.atomic_xchg(came, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["M", "rank"])
def barrier_of_its_own(bases, turn, flags, M, rank, at_flags, patience, WORLD: tl.constexpr, BW: tl.constexpr, TIMED: tl.constexpr):
    """One program, for a transfer that other kernels push or take, which do not count it."""
    now = tl.load(turn)  # []
    _meet(bases, now, flags, M, rank, at_flags, patience, WORLD, BW, TIMED)
    tl.store(turn + 1, now)
    tl.store(turn, now + 1)


@triton.jit
def _meet(bases, now, flags, M, rank, at_flags, patience, WORLD: tl.constexpr, BW: tl.constexpr, TIMED: tl.constexpr):
    """The first program tells all ranks that this one has pushed; every program waits until they all have.

    TIMED (CUDA): after ``patience`` nanoseconds the device traps, for there is no other way out of a wait for a rank that is gone. It does
    so at once where another rank has another M, and rows are not where this one looks for them.
    """
    r = tl.arange(0, BW)
    count = now + 1
    at_most = 64 + (count & 1) * 64
    if tl.program_id(0) == 0:
        theirs = (tl.load(bases + r, mask=r < WORLD, other=0) + at_flags).to(tl.pointer_type(tl.int32))  # [BW]
        tl.store(theirs + at_most + rank, tl.zeros([BW], tl.int32) + M, mask=r < WORLD)
        tl.atomic_xchg(theirs + rank, tl.zeros([BW], tl.int32) + count, mask=r < WORLD, sem="release", scope="sys")
    seen = tl.load(flags + r, mask=r < WORLD, other=0, volatile=True)  # [BW]
    if TIMED:
        begin = tl.extra.cuda.globaltimer()
    while tl.max(tl.where(r < WORLD, count - seen, 0), 0) > 0:
        seen = tl.load(flags + r, mask=r < WORLD, other=0, volatile=True)  # [BW]
        if TIMED:  # noqa: SIM102 (one is of the compiler, one of the device)
            if tl.extra.cuda.globaltimer() - begin > patience:
                _trap()
    tl.atomic_add(flags + r, tl.zeros([BW], tl.int32), mask=r < WORLD, sem="acquire", scope="sys")
    if TIMED:
        theirs_most = tl.load(flags + at_most + r, mask=r < WORLD, other=M, volatile=True)  # [BW]
        if tl.max(tl.where(theirs_most != M, 1, 0), 0) > 0:
            _trap()


@triton.jit
def _trap():
    tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _set(bases, r, now, set_bytes):
    """Rank r's set of this transfer."""
    base = tl.multiple_of(tl.load(bases + r).to(tl.pointer_type(tl.uint8)), 256)  # []
    return base + (now & 1).to(tl.int64) * set_bytes


@triton.jit
def _other(j, M, rank):
    """(t, r) of the j-th row of those that the other ranks have, or are for."""
    r = j // M
    return j % M, tl.where(r >= rank, r + 1, r)


@triton.jit
def _wide(n):
    """A row's number, of which products are offsets."""
    return tl.full([], 1, tl.int64) * n


@triton.jit
def _each(j, WORLD: tl.constexpr):
    """(t, r) of a program: rows of all ranks in turns, so that a rank's own are copied while others' are on their way."""
    return j // WORLD, j % WORLD


@triton.jit
def _copy(source, target, live, F: tl.constexpr, B: tl.constexpr):
    """One row; zeros where it is not ``live``."""
    for start in range(0, F, B):
        o = start + tl.arange(0, B)
        tl.store(target + o, tl.load(source + o, mask=(o < F) & live, other=0), mask=o < F)  # [B]


@triton.jit
def _copy_scaled(source, target, live, scale, F: tl.constexpr, B: tl.constexpr, SCALED: tl.constexpr):
    """One row times ``scale``, in float32."""
    if not SCALED:
        _copy(source, target, live, F, B)
    else:
        for start in range(0, F, B):
            o = start + tl.arange(0, B)
            value = tl.load(source + o, mask=(o < F) & live, other=0).to(tl.float32) * scale  # [B]
            tl.store(target + o, value.to(target.dtype.element_ty), mask=o < F)


@triton.jit(do_not_specialize=["T", "M", "rank"])
def push_tokens(
    x, w, ids, place, bases, turn, out_x, out_w, local, took, to, T, M, E, slots, rank, set_bytes, at_w, at_ids, K,
    TABLE: tl.constexpr, WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr,
    BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """A program for each row and rank: token x [T, FX], routing weights w [T, FW] and its experts' numbers on that rank, -1 from T on.

    This rank's own go where they are wanted: ``out_x``, ``out_w``, ``local``, ``took``; with them ``to``, who has one of a token's experts.
    """
    t, r = _each(tl.program_id(0).to(tl.int64), WORLD)
    now = _next(turn)
    k = tl.arange(0, BK)
    e = tl.load(ids + t * K + k, mask=(k < K) & (t < T), other=-1).to(tl.int64)  # [BK]
    if TABLE:
        inside = (e >= 0) & (e < E)
        slot = tl.load(place + e, mask=inside, other=-1).to(tl.int64)  # [BK]
        inside = inside & (slot >= 0)
        here = inside & (slot // slots == r)
        e = tl.where(here, slot - r * slots, -1)
    else:
        here = e >= 0
        e = tl.where(here, e, -1)
    live = tl.max(here.to(tl.int32), 0) > 0
    here_x = rank * M + t
    if r == rank:
        tl.store(local + here_x * K + k, e, mask=k < K)  # [BK]
        tl.store(took + here_x, live.to(tl.int32))  # []
        if t < T:
            if TABLE:
                bits = tl.reduce(tl.where(inside, tl.full([BK], 1, tl.int64) << (slot // slots), 0), 0, _either)
            else:
                bits = tl.where(live, tl.full([], -1, tl.int64), 0)
            tl.store(to + t, bits)  # []
        _copy(x + t * FX, out_x + here_x * FX, live, FX, BX)
        if WEIGHTS:
            _copy(w + t * FW, out_w + here_x * FW, live, FW, BW)
    else:
        base = _set(bases, r, now, set_bytes)
        tl.store((base + at_ids).to(tl.pointer_type(tl.int32)) + here_x * K + k, e.to(tl.int32), mask=k < K)  # [BK]
        if live:
            _copy(x + t * FX, base.to(tl.pointer_type(x.dtype.element_ty)) + here_x * FX, live, FX, BX)
            if WEIGHTS:
                _copy(w + t * FW, (base + at_w).to(tl.pointer_type(w.dtype.element_ty)) + here_x * FW, live, FW, BW)


@triton.jit(do_not_specialize=["M", "N", "rank"])
def take_tokens(
    bases, turn, flags, x, w, local, took, M, N, rank, at_flags, patience, set_bytes, at_w, at_ids, K,
    WAITS: tl.constexpr, WORLD: tl.constexpr, BP: tl.constexpr, TIMED: tl.constexpr,
    WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr, BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """N rows of other ranks: what has come of each; zeros and -1 where this rank has none of its experts."""
    if WAITS:
        _meet(bases, tl.load(turn + 1), flags, M, rank, at_flags, patience, WORLD, BP, TIMED)
    base = _set(bases, rank, _current(turn), set_bytes)
    k = tl.arange(0, BK)
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        t, r = _other(_wide(n), M, rank)
        j = r * M + t
        e = tl.load((base + at_ids).to(tl.pointer_type(tl.int32)) + j * K + k, mask=k < K, other=-1)  # [BK]
        live = tl.max(e, 0) >= 0
        tl.store(local + j * K + k, e, mask=k < K)  # [BK]
        tl.store(took + j, live.to(tl.int32))  # []
        _copy(base.to(tl.pointer_type(x.dtype.element_ty)) + j * FX, x + j * FX, live, FX, BX)
        if WEIGHTS:
            _copy((base + at_w).to(tl.pointer_type(w.dtype.element_ty)) + j * FW, w + j * FW, live, FW, BW)


@triton.jit(do_not_specialize=["T", "M", "rank"])
def push_rows(
    rows, bases, to, turn, out, T, M, rank, scale, set_bytes, at,
    F: tl.constexpr, B: tl.constexpr, WORLD: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """A program for each row and rank: row t of ``rows`` [T, F] to rank r, if it is one of ``to`` [T]; own ones into ``out`` [P * M, F]."""
    t, r = _each(tl.program_id(0).to(tl.int64), WORLD)
    now = _next(turn)
    live = ((tl.load(to + t, mask=t < T, other=0) >> r) & 1) > 0  # []
    here = rank * M + t
    if r == rank:
        _copy_scaled(rows + t * F, out + here * F, live, scale, F, B, SCALED)
    elif live:
        base = _set(bases, r, now, set_bytes) + at
        _copy_scaled(rows + t * F, base.to(tl.pointer_type(rows.dtype.element_ty)) + here * F, live, scale, F, B, SCALED)


@triton.jit(do_not_specialize=["T", "N", "first", "rank"])
def push_beside(rows, bases, to, T, N, first, rank, at, F: tl.constexpr, B: tl.constexpr):
    """Of T rows those that are in ``to`` [T], to N rows of others, from row ``first`` on, by any number of programs; nothing is counted."""
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        t, r = _other(_wide(n), T, rank)
        if ((tl.load(to + t) >> r) & 1) > 0:
            base = tl.multiple_of(tl.load(bases + r).to(tl.pointer_type(tl.uint8)), 256) + at  # []
            _copy(rows + t * F, base.to(tl.pointer_type(rows.dtype.element_ty)) + (first + t) * F, True, F, B)


@triton.jit(do_not_specialize=["M", "N", "rank"])
def take_rows(
    bases, took, turn, flags, out, M, N, rank, at_flags, patience, set_bytes, at,
    WAITS: tl.constexpr, WORLD: tl.constexpr, BP: tl.constexpr, TIMED: tl.constexpr, F: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """N rows of other ranks into ``out`` [P * M, F]; zeros where ``took`` is not set."""
    if WAITS:
        _meet(bases, tl.load(turn + 1), flags, M, rank, at_flags, patience, WORLD, BP, TIMED)
    base = _set(bases, rank, _current(turn), set_bytes) + at
    for n in range(tl.program_id(0), N, tl.num_programs(0)):
        t, r = _other(_wide(n), M, rank)
        j = r * M + t
        _copy(base.to(tl.pointer_type(out.dtype.element_ty)) + j * F, out + j * F, tl.load(took + j) > 0, F, B)


@triton.jit(do_not_specialize=["M", "rank"])
def push_back(rows, bases, took, turn, M, rank, set_bytes, at, F: tl.constexpr, B: tl.constexpr):
    """A program for each row of another rank: what this one has for it, of ``rows`` [P * M, F], if it ``took`` it."""
    t, r = _other(tl.program_id(0).to(tl.int64), M, rank)
    j = r * M + t
    now = _next(turn)
    if tl.load(took + j) > 0:
        base = _set(bases, r, now, set_bytes) + at
        _copy(rows + j * F, base.to(tl.pointer_type(rows.dtype.element_ty)) + (rank * M + t) * F, True, F, B)


@triton.jit(do_not_specialize=["M", "rank", "T"])
def take_sums(
    own, bases, to, turn, flags, out, M, rank, T, at_flags, patience, scale, set_bytes, at,
    WAITS: tl.constexpr, WORLD: tl.constexpr, BP: tl.constexpr, TIMED: tl.constexpr, WIDE: tl.constexpr, F: tl.constexpr, B: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """What the ranks of ``to`` have sent for each token, this one's in ``own`` [P * M, F], or APART [T, F]: added in order in WIDE, times
    ``scale``, rounded once."""
    if WAITS:
        _meet(bases, tl.load(turn + 1), flags, M, rank, at_flags, patience, WORLD, BP, TIMED)
    came = (_set(bases, rank, _current(turn), set_bytes) + at).to(tl.pointer_type(out.dtype.element_ty))
    for n in range(tl.program_id(0), T, tl.num_programs(0)):
        t = _wide(n)
        who = tl.load(to + t)  # []
        for start in range(0, F, B):
            o = start + tl.arange(0, B)
            total = tl.zeros([B], WIDE)
            for r in tl.static_range(WORLD):
                live = (((who >> r) & 1) > 0) & (o < F)
                if r == rank:
                    here = t if APART else r * M + t
                    total += tl.load(own + here * F + o, mask=live, other=0).to(WIDE)  # [B]
                else:
                    total += tl.load(came + (r * M + t) * F + o, mask=live, other=0).to(WIDE)  # [B]
            tl.store(out + t * F + o, (total * scale).to(out.dtype.element_ty), mask=o < F)  # [B]
