"""Rows between GPUs of one host, through memory that each rank lets the others read (``moefuse/runtime/transports/symm.py``).

A transfer is two kernels on each rank with a barrier of all ranks between them: one *puts* rows into a buffer of its own, one *pulls*
from those of the others what this rank needs. (Waiting inside of the pull would hold the device against what others may be waiting for,
NCCL's kernels for instance; and a signal from each put instead of the barrier was measured to be no faster.) There are two sets of
buffers. A rank may write to a set again when all have read it: they have, once they came to the barrier of the transfer in between.
Transfers are counted on the device, so that a CUDA graph may be replayed between other calls: ``turn`` is [next, current]; puts read the
first and write the second, pulls the other way round.

P ranks, M the most rows of any; row t of rank r arrives as r * M + t. ``took`` [P * M]: whether this rank has an expert of a row; ``to``
[T]: the ranks that have one of a token, a bit each. ``bases`` [P]: where each rank's memory is; a rank's own rows are read where they are.
"""

import triton
import triton.language as tl


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _mine(memory, turn, set_bytes):
    """This rank's set, for writing."""
    now = tl.load(turn)
    if tl.program_id(0) == 0:
        tl.store(turn + 1, now)
    return memory + (now & 1).to(tl.int64) * set_bytes


@triton.jit
def _now(turn):
    """The current transfer, for a pull."""
    now = tl.load(turn + 1)
    if tl.program_id(0) == 0:
        tl.store(turn, now + 1)
    return now


@triton.jit
def _theirs(bases, r, now, set_bytes):
    """Rank r's set, for reading."""
    base = tl.multiple_of(tl.load(bases + r).to(tl.pointer_type(tl.uint8)), 256)
    return base + (now & 1).to(tl.int64) * set_bytes


@triton.jit
def _copy(source, target, live, F: tl.constexpr, B: tl.constexpr):
    """One row; zeros where it is not ``live``."""
    for start in range(0, F, B):
        o = start + tl.arange(0, B)
        tl.store(target + o, tl.load(source + o, mask=(o < F) & live, other=0), mask=o < F)


@triton.jit(do_not_specialize=["T", "M"])
def put_tokens(
    x, w, ids, place, memory, turn, to, T, M, E, slots, set_bytes, at_w, at_ids, K,
    TABLE: tl.constexpr, WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr,
    BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Program t < M: token x [T, FX], routing weights w [T, FW] and ids [T, K] (of no expert from T on), and who has one of its experts."""
    t = tl.program_id(0).to(tl.int64)
    live = t < T
    base = _mine(memory, turn, set_bytes)
    k = tl.arange(0, BK)
    e = tl.load(ids + t * K + k, mask=(k < K) & live, other=-1).to(tl.int64)  # [BK]
    tl.store((base + at_ids).to(tl.pointer_type(tl.int64)) + t * K + k, e, mask=k < K)
    if TABLE:
        inside = (e >= 0) & (e < E)
        rank = tl.load(place + e, mask=inside, other=0).to(tl.int64) // slots
        bits = tl.reduce(tl.where(inside, tl.full([BK], 1, tl.int64) << rank, 0), 0, _either)
    else:
        bits = tl.full([], (1 << WORLD) - 1, tl.int64)
    if live:
        tl.store(to + t, bits)
        _copy(x + t * FX, base.to(tl.pointer_type(x.dtype.element_ty)) + t * FX, live, FX, BX)
        if WEIGHTS:
            _copy(w + t * FW, (base + at_w).to(tl.pointer_type(w.dtype.element_ty)) + t * FW, live, FW, BW)


@triton.jit(do_not_specialize=["T", "M", "rank"])
def pull_tokens(
    own_x, own_w, own_ids, bases, place, turn, x, w, ids, took, T, M, E, slots, rank, set_bytes, at_w, at_ids, K,
    TABLE: tl.constexpr, WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr,
    BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program r * M + t: that row of rank r, if this rank has one of its experts, and the local numbers of these; else zeros and -1."""
    j = tl.program_id(0).to(tl.int64)
    t, r = j % M, j // M
    now = _now(turn)
    k = tl.arange(0, BK)
    if r == rank:
        e = tl.load(own_ids + t * K + k, mask=(k < K) & (t < T), other=-1).to(tl.int64)  # [BK]
        live = _local(e, ids + j * K, place, took + j, E, slots, rank, K, TABLE, BK)
        _copy(own_x + t * FX, x + j * FX, live, FX, BX)
        if WEIGHTS:
            _copy(own_w + t * FW, w + j * FW, live, FW, BW)
    else:
        base = _theirs(bases, r, now, set_bytes)
        e = tl.load((base + at_ids).to(tl.pointer_type(tl.int64)) + t * K + k, mask=k < K, other=-1)
        live = _local(e, ids + j * K, place, took + j, E, slots, rank, K, TABLE, BK)
        _copy(base.to(tl.pointer_type(x.dtype.element_ty)) + t * FX, x + j * FX, live, FX, BX)
        if WEIGHTS:
            _copy((base + at_w).to(tl.pointer_type(w.dtype.element_ty)) + t * FW, w + j * FW, live, FW, BW)


@triton.jit
def _local(e, ids, place, took, E, slots, rank, K, TABLE: tl.constexpr, BK: tl.constexpr):
    """Writes the local numbers of experts e [BK], -1 for others'; whether there is one."""
    if TABLE:
        inside = (e >= 0) & (e < E)
        local = tl.load(place + e, mask=inside, other=-1).to(tl.int64) - rank * slots
        here = inside & (local >= 0) & (local < slots)
    else:
        local = e
        here = e >= 0
    k = tl.arange(0, BK)
    tl.store(ids + k, tl.where(here, local, -1), mask=k < K)
    live = tl.max(here.to(tl.int32), 0) > 0
    tl.store(took, live.to(tl.int32))
    return live


@triton.jit(do_not_specialize=["N", "M", "rank"])
def put_rows(rows, took, memory, turn, N, M, rank, set_bytes, at, SOME: tl.constexpr, F: tl.constexpr, B: tl.constexpr):
    """Program j: row j of ``rows`` [N, F]. SOME: N is P * M, and only those rows go that others have asked for (``took``)."""
    j = tl.program_id(0).to(tl.int64)
    base = _mine(memory, turn, set_bytes)
    live = j < N
    if SOME:
        live = (tl.load(took + j, mask=live, other=0) > 0) & (j // M != rank)
    if live:
        _copy(rows + j * F, (base + at).to(tl.pointer_type(rows.dtype.element_ty)) + j * F, True, F, B)


@triton.jit(do_not_specialize=["N", "M", "rank"])
def pull_rows(own, bases, took, turn, out, N, M, rank, set_bytes, at, F: tl.constexpr, B: tl.constexpr):
    """Program r * M + t: that row of rank r into ``out`` [P * M, F], this rank's from ``own`` [N, F]; zeros where ``took`` is not set."""
    j = tl.program_id(0).to(tl.int64)
    t, r = j % M, j // M
    now = _now(turn)
    live = tl.load(took + j) > 0
    if r == rank:
        _copy(own + t * F, out + j * F, live & (t < N), F, B)
    else:
        base = _theirs(bases, r, now, set_bytes)
        _copy((base + at).to(tl.pointer_type(out.dtype.element_ty)) + t * F, out + j * F, live, F, B)


@triton.jit(do_not_specialize=["M", "rank", "T"])
def pull_sums(
    own, bases, to, turn, out, M, rank, T, set_bytes, at,
    WORLD: tl.constexpr, WIDE: tl.constexpr, F: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Program t: what the ranks of ``to`` computed for token t, this one's in ``own`` [P * M, F]: added in order in WIDE, rounded once."""
    t = tl.program_id(0).to(tl.int64)
    now = _now(turn)
    who = tl.load(to + t, mask=t < T, other=0)
    j = rank * M + t
    for start in range(0, F, B):
        o = start + tl.arange(0, B)
        total = tl.zeros([B], WIDE)
        for r in range(WORLD):
            live = (((who >> r) & 1) > 0) & (o < F)
            if r == rank:
                total += tl.load(own + j * F + o, mask=live, other=0).to(WIDE)
            else:
                base = _theirs(bases, r, now, set_bytes) + at
                total += tl.load(base.to(tl.pointer_type(out.dtype.element_ty)) + j * F + o, mask=live, other=0).to(WIDE)
        tl.store(out + t * F + o, total.to(out.dtype.element_ty), mask=(o < F) & (t < T))
