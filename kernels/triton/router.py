"""The K best of each row of a router's scores, in one launch.

One warp has a row, or several where rows are short, in registers. Each value becomes a key: its bits in an order that integers have, and
below them its position counted from the end, so that no two keys of a row are equal and of equal values the first one wins. K rounds take
the greatest key and strike it out. For as few as a router chooses this is less code than a sort, and less work; nothing meets in shared
memory and nothing depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton import grouped_plan as plan
from moefuse.kernels.triton.config import power_of_two
from moefuse.kernels.triton.grouped_plan import on_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS = 1024
"""A row has to fit the registers of one warp; its position takes 10 bits of a key."""
MAX_CHOSEN = 32
_ELEMENTS = 512
"""Scores of a program where rows are short: 16 in a thread."""


def supports(scores: Tensor, k: int) -> str | None:
    """None, or why the kernel does not take a call of ``moefuse::topk``. Looks at dtypes and sizes only."""
    if scores.dtype not in DTYPES:
        return f"no kernel for {scores.dtype}"
    if scores.shape[-1] > MAX_EXPERTS:
        return f"{scores.shape[-1]} experts, the kernel takes {MAX_EXPERTS}"
    return f"{k} experts per token, the kernel takes {MAX_CHOSEN}" if k > MAX_CHOSEN else None


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


@on_device
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk``."""
    shape = (*scores.shape[:-1], k)
    rows = scores if scores.dim() == 2 else scores.reshape(-1, scores.shape[-1])
    values = torch.empty(shape, dtype=scores.dtype, device=scores.device)
    ids = torch.empty(shape, dtype=torch.int64, device=scores.device)
    tokens, experts = rows.shape
    if tokens and k:
        be = power_of_two(experts)
        bt = min(max(_ELEMENTS // be, 1), power_of_two(tokens), 8)
        rest = (tokens, experts, *rows.stride(), k, bt, be, power_of_two(k), scores.dtype != torch.float32)
        plan.launch(choose, (-(-tokens // bt),), (rows, values, ids), rest, warps=1)
    return values, ids
