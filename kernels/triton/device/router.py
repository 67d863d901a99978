"""The K best of each row of a router's scores (``choose``), or all of a router behind its logits (``route``), in one launch.

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
    v = tl.load(rows + e.to(tl.int64)[None, :] * stride_e, mask=inside, other=0.0)  # [BT, BE]
    key = tl.where((e < E)[None, :], order_key(v, e[None, :], NARROW), -1)
    chosen = tl.zeros([BT, BK], tl.int32)
    for i in range(K):
        best = tl.max(key, 1)[:, None]
        chosen = tl.where(k[None, :] == i, 1023 - (best & 1023).to(tl.int32), chosen)
        key = tl.where(key == best, -1, key)
    live = (t < T)[:, None] & (k < K)[None, :]
    at = t[:, None] * K + k[None, :]
    tl.store(ids + at, chosen.to(tl.int64), mask=live)  # [BT, BK]
    # Read again, for their own bits: a key knows neither the sign of zero nor which NaN it was.
    tl.store(values + at, tl.load(rows + chosen.to(tl.int64) * stride_e, mask=live, other=0.0), mask=live)  # [BT, BK]


@triton.jit
def function_of(v, inside, NAME: tl.constexpr):
    """``apply`` of ``moefuse/ops/meaning/recipe.py`` along the last dimension of v, where ``inside``."""
    if NAME == "softmax":
        v = tl.where(inside, v, float("-inf"))
        p = tl.exp(v - tl.max(v, 1)[:, None])
        v = p / tl.sum(tl.where(inside, p, 0.0), 1)[:, None]
    elif NAME == "sigmoid":
        v = 1.0 / (1.0 + tl.exp(-v))
    else:
        tl.static_assert(NAME == "identity", "function without a formula here")
    return v


@triton.jit
def at_position(v, e, position):
    """Column ``position`` [BT] of v [BT, BE]."""
    return tl.sum(tl.where(e[None, :] == position[:, None], v, 0.0), 1)


@triton.jit
def group_ranks(choice, e, E, per, G: tl.constexpr, BEST: tl.constexpr, BT: tl.constexpr, BG: tl.constexpr):
    """[BT, BG]: the sum of the BEST greatest of each of G groups of ``per`` neighbours."""
    g = tl.arange(0, BG)
    rank = tl.zeros([BT, BG], tl.float32)
    for i in range(G):
        key = tl.where(((e // per == i) & (e < E))[None, :], order_key(choice, e[None, :], False), -1)
        total = tl.zeros([BT], tl.float32)
        for _ in range(BEST):
            best = tl.max(key, 1)
            total += at_position(choice, e, 1023 - (best & 1023).to(tl.int32))
            key = tl.where(key == best[:, None], -1, key)
        rank = tl.where(g[None, :] == i, total[:, None], rank)
    return rank


@triton.jit(do_not_specialize=["T"])
def route(
    logits, bias, weights, ids, T, E, stride_t, stride_e, stride_b,
    K: tl.constexpr, SCORE: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, LOWEST: tl.constexpr,
    BY_CHOICE: tl.constexpr, WEIGHT: tl.constexpr, RENORMALISE: tl.constexpr, EPS: tl.constexpr, LEAST: tl.constexpr, SCALE: tl.constexpr,
    BIAS: tl.constexpr, BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """weights, ids [T, K] from logits [T, E] by a ``Recipe`` of ``moefuse/ops/meaning/recipe.py``, all in float32."""
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    k = tl.arange(0, BK)
    column = (e < E)[None, :]
    at = logits + t[:, None] * stride_t + e.to(tl.int64)[None, :] * stride_e
    v = tl.load(at, mask=(t < T)[:, None] & column, other=0.0).to(tl.float32)  # [BT, BE]
    scores = function_of(v, column, SCORE)
    choice = scores
    if BIAS:
        choice += tl.load(bias + e.to(tl.int64) * stride_b, mask=e < E, other=0.0).to(tl.float32)[None, :]  # [BE]
    if G:
        g = tl.arange(0, BG)
        rank = group_ranks(choice, e, E, E // G, G, BEST, BT, BG)
        group_key = tl.where((g < G)[None, :], order_key(rank, g[None, :], False), -1)
        kept = tl.zeros([BT, BE], tl.int1)
        for _ in range(KEPT):
            best = tl.max(group_key, 1)
            kept = kept | ((e // (E // G))[None, :] == (1023 - (best & 1023).to(tl.int32))[:, None])
            group_key = tl.where(group_key == best[:, None], -1, group_key)
        choice = tl.where(kept, choice, float("-inf") if LOWEST else 0.0)
    key = tl.where(column, order_key(choice, e[None, :], False), -1)
    chosen = tl.zeros([BT, BK], tl.int32)
    w = tl.zeros([BT, BK], tl.float32)
    for i in range(K):
        best = tl.max(key, 1)
        position = 1023 - (best & 1023).to(tl.int32)
        chosen = tl.where(k[None, :] == i, position[:, None], chosen)
        w = tl.where(k[None, :] == i, at_position(choice if BY_CHOICE else scores, e, position)[:, None], w)
        key = tl.where(key == best[:, None], -1, key)
    slot = (k < K)[None, :]
    w = function_of(w, slot, WEIGHT)
    if RENORMALISE:
        total = tl.sum(tl.where(slot, w, 0.0), 1) + EPS
        w = w / tl.where(total < LEAST, LEAST, total)[:, None]
    out = t[:, None] * K + k[None, :]
    tl.store(ids + out, chosen.to(tl.int64), mask=(t < T)[:, None] & slot)  # [BT, BK]
    tl.store(weights + out, (w * SCALE).to(weights.dtype.element_ty), mask=(t < T)[:, None] & slot)  # [BT, BK]
