"""Rows between GPUs of one host, through memory that each rank lets the others read (``moefuse/runtime/transports/symm.py``).

A transfer is two kernels with a barrier of all ranks between them: every rank *puts* rows into a buffer of its own, and *pulls* from
those of the others what it needs. There are two sets of buffers. A rank may write to a set again when all have read it: they have, once
they came to the barrier of the transfer in between. Which set it is, is counted on the device, ``turn`` [2], so that a CUDA graph may be
replayed between other calls: ``put`` kernels read turn[0] and write turn[1], ``pull`` kernels the other way round.

P ranks, M the most rows of any; row t of rank r arrives as r * M + t. ``took`` [P * M]: whether this rank has an expert of a row; ``to``
[T]: the ranks that have one of a token, a bit each. Pointers of peers are in ``bases`` [P].
"""

import triton
import triton.language as tl


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _mine(buffer, turn, set_bytes):
    """This rank's set, for writing."""
    now = tl.load(turn)
    if tl.program_id(0) == 0:
        tl.store(turn + 1, now)
    return buffer + (now & 1).to(tl.int64) * set_bytes


@triton.jit
def _theirs(bases, turn, r, set_bytes):
    """Rank r's set, for reading."""
    now = tl.load(turn + 1)
    if tl.program_id(0) == 0:
        tl.store(turn, now + 1)
    return tl.load(bases + r).to(tl.pointer_type(tl.uint8)) + (now & 1).to(tl.int64) * set_bytes


@triton.jit
def _copy(source, target, live, F: tl.constexpr, B: tl.constexpr):
    """One row; zeros where it is not ``live``."""
    for start in range(0, F, B):
        o = start + tl.arange(0, B)
        tl.store(target + o, tl.load(source + o, mask=(o < F) & live, other=0), mask=o < F)


@triton.jit(do_not_specialize=["T", "M"])
def put_tokens(
    x, w, ids, place, buffer, turn, to, T, M, E, slots, set_bytes, at_w, at_ids, K,
    TABLE: tl.constexpr, WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr,
    BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Program t < M: token x [T, FX], routing weights w [T, FW] and ids [T, K] (of no expert from T on), and who has one of its experts."""
    t = tl.program_id(0).to(tl.int64)
    live = t < T
    base = _mine(buffer, turn, set_bytes)
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


@triton.jit(do_not_specialize=["M", "rank"])
def pull_tokens(
    bases, place, turn, x, w, ids, took, M, E, slots, rank, set_bytes, at_w, at_ids, K,
    TABLE: tl.constexpr, WEIGHTS: tl.constexpr, FX: tl.constexpr, FW: tl.constexpr,
    BX: tl.constexpr, BW: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Program r * M + t: that row of rank r, if this rank has one of its experts, and the local numbers of these; else zeros and -1."""
    j = tl.program_id(0).to(tl.int64)
    t = j % M
    base = _theirs(bases, turn, j // M, set_bytes)
    k = tl.arange(0, BK)
    e = tl.load((base + at_ids).to(tl.pointer_type(tl.int64)) + t * K + k, mask=k < K, other=-1)  # [BK]
    if TABLE:
        inside = (e >= 0) & (e < E)
        local = tl.load(place + e, mask=inside, other=-1).to(tl.int64) - rank * slots
        here = inside & (local >= 0) & (local < slots)
    else:
        local = e
        here = e >= 0
    tl.store(ids + j * K + k, tl.where(here, local, -1), mask=k < K)
    live = tl.max(here.to(tl.int32), 0) > 0
    tl.store(took + j, live.to(tl.int32))
    _copy(base.to(tl.pointer_type(x.dtype.element_ty)) + t * FX, x + j * FX, live, FX, BX)
    if WEIGHTS:
        _copy((base + at_w).to(tl.pointer_type(w.dtype.element_ty)) + t * FW, w + j * FW, live, FW, BW)


@triton.jit(do_not_specialize=["N"])
def put_rows(rows, took, buffer, turn, N, set_bytes, at, SOME: tl.constexpr, F: tl.constexpr, B: tl.constexpr):
    """Program j: row j of ``rows`` [N, F]; with SOME only where ``took`` is set."""
    j = tl.program_id(0).to(tl.int64)
    base = _mine(buffer, turn, set_bytes)
    live = j < N
    if SOME:
        live = tl.load(took + j, mask=live, other=0) > 0
    if live:
        _copy(rows + j * F, (base + at).to(tl.pointer_type(rows.dtype.element_ty)) + j * F, True, F, B)


@triton.jit(do_not_specialize=["M"])
def pull_rows(bases, took, turn, out, M, set_bytes, at, F: tl.constexpr, B: tl.constexpr):
    """Program r * M + t: that row of rank r into ``out`` [P * M, F]; zeros where ``took`` is not set."""
    j = tl.program_id(0).to(tl.int64)
    base = _theirs(bases, turn, j // M, set_bytes)
    _copy((base + at).to(tl.pointer_type(out.dtype.element_ty)) + (j % M) * F, out + j * F, tl.load(took + j) > 0, F, B)


@triton.jit(do_not_specialize=["M", "rank", "T"])
def pull_sums(bases, to, turn, out, M, rank, T, set_bytes, at, WORLD: tl.constexpr, WIDE: tl.constexpr, F: tl.constexpr, B: tl.constexpr):
    """Program t: what the ranks of ``to`` computed for token t, added in their order in WIDE, rounded once. out [T, F]."""
    t = tl.program_id(0).to(tl.int64)
    who = tl.load(to + t, mask=t < T, other=0)
    for start in range(0, F, B):
        o = start + tl.arange(0, B)
        total = tl.zeros([B], WIDE)
        for r in range(WORLD):
            base = _theirs(bases, turn, r, set_bytes) + at
            live = ((who >> r) & 1) > 0
            row = base.to(tl.pointer_type(out.dtype.element_ty)) + (rank * M + t) * F
            total += tl.load(row + o, mask=(o < F) & live, other=0).to(WIDE)
        tl.store(out + t * F + o, total.to(out.dtype.element_ty), mask=(o < F) & (t < T))
