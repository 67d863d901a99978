"""What is done to rows of several ranks beside their transport: the numbers of local experts, and sums in the order of ranks."""

import triton
import triton.language as tl


@triton.jit
def local_ids(ids, place, out, N, E, slots, first, TABLE: tl.constexpr, B: tl.constexpr):
    """B of N ids: the number of an expert among the ``slots`` from slot ``first`` on; -1 for one that is not there."""
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    e = tl.load(ids + at, mask=at < N, other=-1).to(tl.int64)  # [B]
    if TABLE:
        inside = (e >= 0) & (e < E)
        local = tl.load(place + e, mask=inside, other=-1).to(tl.int64) - first  # [B]
        e = tl.where(inside & (local >= 0) & (local < slots), local, -1)
    tl.store(out + at, e, mask=at < N)  # [B]


@triton.jit(do_not_specialize=["M"])
def sum_ranks(parts, out, M, F, WORLD: tl.constexpr, WIDE: tl.constexpr, B: tl.constexpr):
    """Program (t, b): block b of row t of ``out`` [T, F], the sum of rows r * M + t of ``parts`` [P * M, F], in order in WIDE."""
    t = tl.program_id(0).to(tl.int64)
    o = tl.program_id(1) * B + tl.arange(0, B)
    total = tl.zeros([B], WIDE)
    for r in tl.static_range(WORLD):
        total += tl.load(parts + (r * M + t) * F + o, mask=o < F, other=0).to(WIDE)  # [B]
    tl.store(out + t * F + o, total.to(out.dtype.element_ty), mask=o < F)  # [B]
