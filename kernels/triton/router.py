"""The K best of each row of a router's scores, in one launch.

One warp has a row, or several where rows are short, in registers. Each value becomes a key: its bits in an order that integers have, and
below them its position counted from the end, so that no two keys of a row are equal and of equal values the first one wins. K rounds take
the greatest key and strike it out. For as few as a router chooses this is less code than a sort, and less work; nothing meets in shared
memory and nothing depends on the order in which programs run.
"""

import triton
import triton.language as tl


@triton.jit
def order_key(v, position, NARROW: tl.constexpr):
    """Integers >= 0 in the order of v, NaN first, equal ones by position; the low 10 bits are 1023 - position.

    NARROW: v comes from 16 bits, so in float32 its last 13 are zero, and 19 + 10 bits fit 32.
    """
    bits = v.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # What follows the sign orders numbers above zero; the complement orders those below. -0.0 counts as 0.0.
    signed = tl.where((bits < 0) & (size != 0), ~size, size)
    signed = tl.where(size > 0x7F800000, 0x7FFFFFFF, signed)
    if NARROW:
        key = ((signed >> 13) + (1 << 18)) << 10
    else:
        key = (signed.to(tl.int64) + (1 << 31)) << 10
    return key | (1023 - position)


@triton.jit(do_not_specialize=["T"])
def choose(
    scores, values, ids, T, E, stride_t, stride_e, K: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """values, ids [T, K]: the K greatest of each row of scores [T, E], greatest first."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    k = tl.arange(0, BK)
    inside = (t < T)[:, None] & (e < E)[None, :]
    rows = scores + t[:, None] * stride_t
    v = tl.load(rows + e.to(tl.int64)[None, :] * stride_e, mask=inside, other=0.0)
    key = tl.where((e < E)[None, :], order_key(v, e[None, :], NARROW), -1)
    chosen = tl.zeros([BT, BK], tl.int32)
    for i in range(K):
        best = tl.max(key, 1)[:, None]
        chosen = tl.where(k[None, :] == i, 1023 - (best & 1023).to(tl.int32), chosen)
        key = tl.where(key == best, -1, key)
    live = (t < T)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    tl.store(ids + at, chosen.to(tl.int64), mask=live)
    # Read again, for their own bits: a key knows neither the sign of zero nor which NaN it was.
    tl.store(values + at, tl.load(rows + chosen.to(tl.int64) * stride_e, mask=live, other=0.0), mask=live)
