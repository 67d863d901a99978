"""Moving sorted rows: what the grouped GEMMs read and write, given the ``order`` and ``offsets`` of ``moefuse/runtime/routing.py``.

order [S] and offsets [E + 1] are int64 here, as the ops pass them on; ``routing.py`` writes them (a store takes the type of its tensor).
Rows from offsets[E] on belong to slots with an invalid id: they are dead.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import expert_base
from moefuse.kernels.triton.device.routing import write_count, write_tiles


@triton.jit
def expert_of(row, offsets, E, BE: tl.constexpr):
    """Expert of each of the rows [BR]; E for dead ones."""
    bins = tl.arange(0, BE)
    ends = tl.load(offsets + 1 + bins, mask=bins < E, other=0x7FFFFFFF).to(tl.int32)  # [BE]
    return tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)


@triton.jit(do_not_specialize=["max_tiles"])
def list_tiles(offsets, tiles, num_tiles, max_tiles, E, BE: tl.constexpr, BM: tl.constexpr):
    """tiles [5, max_tiles] and num_tiles [3] of ``routing.py`` for offsets that are known; program e writes those of expert e."""
    e = tl.program_id(0)
    bins = tl.arange(0, BE)
    begin = tl.load(offsets + bins, mask=bins < E, other=0).to(tl.int32)  # [BE]
    rows = tl.load(offsets + bins + 1, mask=bins < E, other=0).to(tl.int32) - begin  # [BE]
    tiles_of = (rows + BM - 1) // BM
    first_tile = tl.sum(tl.where(bins < e, tiles_of, 0))
    if e == 0:
        write_count(num_tiles, tl.sum(tiles_of))
    write_tiles(tiles, max_tiles, e, first_tile, tl.sum(tl.where(bins == e, begin, 0)), tl.sum(tl.where(bins == e, rows, 0)), BM)


@triton.jit(do_not_specialize=["N", "scale"])
def scaled(values, out, N, scale, B: tl.constexpr):
    """out [N] = values times ``scale``, in float32."""
    n = tl.program_id(0) * B + tl.arange(0, B)
    v = tl.load(values + n, mask=n < N, other=0.0).to(tl.float32) * scale  # [B]
    tl.store(out + n, v.to(out.dtype.element_ty), mask=n < N)


@triton.jit(do_not_specialize=["S"])
def gather_rows(x, order, offsets, out, S, E, top_k, N, at_x, LIVE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """out [S, N]: the token of each row; LIVE: dead ones are not written."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    if LIVE:
        S = tl.load(offsets + E)  # []
    token = tl.load(order + row, mask=row < S, other=0) // top_k  # [BR]
    mask = (row < S)[:, None] & (n < N)[None, :]
    v = tl.load(x + token[:, None] * at_x.row + n.to(tl.int64)[None, :] * at_x.col, mask=mask, other=0.0)  # [BR, BN]
    tl.store(out + row.to(tl.int64)[:, None] * N + n[None, :], v, mask=mask)  # [BR, BN]


@triton.jit(do_not_specialize=["S"])
def gather_in_order(x, order, out, S, top_k, N, at_x, GATHER: tl.constexpr, APART: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr):
    """out [S, N]: the token of each row, or row s of x, with features in the order in which ``hopper/packed.py`` multiplies them.

    Of 64 features each of four threads has 16 that follow each other, and tensor cores take two pairs of each thread in turns: of 4
    the first two and the last two, or, with APART, the even and the odd.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    mask = (row < S)[:, None] & (n < N)[None, :]
    if GATHER:
        of = tl.load(order + row, mask=row < S, other=0) // top_k  # [BR]
    else:
        of = row.to(tl.int64)
    v = tl.load(x + of[:, None] * at_x.row + n.to(tl.int64)[None, :] * at_x.col, mask=mask, other=0.0)  # [BR, BN]
    v = tl.reshape(v, [BR, BN // 64, 4, 4, 2, 2])
    if APART:
        v = tl.permute(v, (0, 1, 3, 5, 2, 4))
    else:
        v = tl.permute(v, (0, 1, 3, 4, 2, 5))
    tl.store(out + row.to(tl.int64)[:, None] * N + n[None, :], tl.reshape(v, [BR, BN]), mask=mask)  # [BR, BN]


@triton.jit(do_not_specialize=["S"])
def vector_rows(
    v, offsets, out, S, E, N, at_v, TABLE: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """out [S, N]: the vector of each row's expert, zeros for dead rows."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    e = expert_of(row, offsets, E, BE)
    live = e < E
    base = expert_base(v, tl.where(live, e, 0), at_v.row, out.dtype.element_ty, TABLE, False)
    mask = live[:, None] & (n < N)[None, :]
    value = tl.load(base[:, None] + n.to(tl.int64)[None, :] * at_v.col, mask=mask, other=0.0)  # [BR, BN]
    tl.store(out + row.to(tl.int64)[:, None] * N + n[None, :], value, mask=(row < S)[:, None] & (n < N)[None, :])  # [BR, BN]


@triton.jit(do_not_specialize=["S"])
def clear_dead(out, offsets, S, E, N, stride_or, BR: tl.constexpr, BN: tl.constexpr):
    """Zeros in the dead rows of out [S, N]; nothing else is touched."""
    dead = tl.load(offsets + E)  # []
    first = tl.program_id(0) * BR
    if first + BR > dead:
        row = first + tl.arange(0, BR)
        rows = (row >= dead) & (row < S)
        for n0 in range(0, N, BN):
            n = n0 + tl.arange(0, BN)
            at = out + row.to(tl.int64)[:, None] * stride_or + n[None, :]
            tl.store(at, tl.zeros([BR, BN], out.dtype.element_ty), mask=rows[:, None] & (n < N)[None, :])  # [BR, BN]


@triton.jit(do_not_specialize=["S"])
def invert(order, position, S, BR: tl.constexpr):
    """position [S]: the row of each slot."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    slot = tl.load(order + row, mask=row < S, other=0)  # [BR]
    tl.store(position + slot, row, mask=row < S)  # [BR]


@triton.jit
def slot_row(y, position, weights, dead, t, k, n, top_k, N, at_y, at_weights, SCALE: tl.constexpr, wide: tl.constexpr):
    """weights[t, k] times the row of y of slot (t, k); zeros for a dead one, which is not read."""
    row = tl.load(position + t * top_k + k).to(tl.int64)  # []
    live = row < dead
    v = tl.load(y + row * at_y.row + n.to(tl.int64) * at_y.col, mask=live & (n < N), other=0.0).to(wide)  # [BN]
    if SCALE:
        v *= tl.load(weights + t * at_weights.row + k * at_weights.col, mask=live, other=0.0).to(wide)  # []
    return v


@triton.jit
def sum_rows(
    y, position, offsets, weights, out, top_k, E, N, at_y, at_weights, SCALE: tl.constexpr, BN: tl.constexpr, KNOWN: tl.constexpr
):  # fmt: skip
    """out [T, N] = sum over k of weights[t, k] * y[row of slot (t, k)], slot 0 first. Dead rows and their weights are not read.

    KNOWN: K, whose rows are then all in flight at once; or 0 for a loop.
    """
    wide: tl.constexpr = tl.float64 if y.dtype.element_ty == tl.float64 else tl.float32
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    dead = tl.load(offsets + E)  # []
    total = tl.zeros([BN], wide)
    if KNOWN:
        for k in tl.static_range(KNOWN):
            total += slot_row(y, position, weights, dead, t, k, n, top_k, N, at_y, at_weights, SCALE, wide)
    else:
        for k in range(top_k):
            total += slot_row(y, position, weights, dead, t, k, n, top_k, N, at_y, at_weights, SCALE, wide)
    tl.store(out + t * N + n, total.to(out.dtype.element_ty), mask=n < N)  # [BN]
