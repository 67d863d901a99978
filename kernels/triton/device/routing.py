"""From expert ids to sorted rows on the device: the arrays that the tiled GEMMs work on.

Glossary, all int32, in one buffer (``layout.Workspace`` says where each begins); S = T*K slots, slot = t*K + k:

* order [S]: slot numbers stably sorted by expert, slots with an invalid id last; position [S]: its inverse, where the combine wants it;
* offsets [E + 1]: rows [offsets[e], offsets[e + 1]) of the order belong to expert e; offsets[E] counts the valid slots;
* tiles [5, max_tiles]: expert, first row and rows of each tile of up to BM rows, experts in order; how many tiles of its expert come
  before it, and how many there are; num_tiles[0] of them are filled.
  num_tiles [3] ends with two counters of ``hopper/ring.py``, which are 0 between launches.

Nothing here depends on the routing but the contents: sizes are upper bounds, so a CUDA graph replays with any routing. The sort is a
counting sort: the rank of a slot among equal ids is a prefix count, so the order is stable and equal from run to run.
"""

import triton
import triton.language as tl

from moefuse.kernels.triton.device.functions import after_previous, index, let_next_start


@triton.jit
def load_keys(ids, s, at_ids, S, E, top_k, FLAT: tl.constexpr):
    """Expert of slots s, E for every slot that is invalid or past the end. FLAT: ids [T, K] is contiguous."""
    inside = s < S
    at = ids + s if FLAT else ids + (s // top_k).to(tl.int64) * at_ids.row + (s % top_k).to(tl.int64) * at_ids.col
    raw = tl.load(at, mask=inside, other=-1).to(tl.int64)  # [BS]
    return tl.where(inside & (raw >= 0) & (raw < E), raw, E).to(tl.int32)


@triton.jit
def write_tiles(tiles, max_tiles, e, first_tile, first_row, rows, BM: tl.constexpr):
    """Tile entries of expert e."""
    count = (rows + BM - 1) // BM
    for j in range(0, count, 32):
        i = j + tl.arange(0, 32)
        live = i < count
        tl.store(tiles + first_tile + i, tl.zeros([32], tl.int32) + e, mask=live)  # [32]
        tl.store(tiles + max_tiles + first_tile + i, first_row + i * BM, mask=live)
        tl.store(tiles + 2 * max_tiles + first_tile + i, tl.minimum(rows - i * BM, BM), mask=live)
        tl.store(tiles + 3 * max_tiles + first_tile + i, i, mask=live)
        tl.store(tiles + 4 * max_tiles + first_tile + i, tl.zeros([32], tl.int32) + count, mask=live)


@triton.jit
def write_count(num_tiles, count):
    """The number of tiles, and counters at 0."""
    tl.store(num_tiles, count)  # []
    tl.store(num_tiles + 1, 0)
    tl.store(num_tiles + 2, 0)


@triton.jit(do_not_specialize=["S", "max_tiles"])
def sort_once(
    ids, order, position, offsets, tiles, num_tiles, at_ids, S, E, top_k, max_tiles,
    FLAT: tl.constexpr, INVERSE: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Everything in one launch, for S <= BS slots: program e reads all ids and finds the slots of expert e (program E the invalid ones)."""
    after_previous(PDL)
    let_next_start(PDL)
    e = tl.program_id(0)
    bins = tl.arange(0, BE)
    slot = tl.arange(0, BS)
    key = load_keys(ids, slot, at_ids, S, E, top_k, FLAT)
    counts = tl.histogram(key, BE)
    tiles_of = tl.where(bins < E, (counts + BM - 1) // BM, 0)
    row = tl.sum(tl.where(bins < e, counts, 0))
    first_tile = tl.sum(tl.where(bins < e, tiles_of, 0))
    tl.store(offsets + e, row)  # []
    if e == E:
        write_count(num_tiles, tl.sum(tiles_of))
    else:
        write_tiles(tiles, max_tiles, e, first_tile, row, tl.sum(tl.where(bins == e, counts, 0)), BM)
    mine = ((key == e) & (slot < S)).to(tl.int32)
    row += tl.cumsum(mine, 0) - mine
    tl.store(order + row, slot, mask=mine != 0)  # [BS]
    if INVERSE:
        tl.store(position + slot, row, mask=mine != 0)  # [BS]


@triton.jit(do_not_specialize=["S"])
def count_chunks(ids, counts, at_ids, S, E, top_k, FLAT: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, PDL: tl.constexpr):
    """counts [C, BE]: how often each expert occurs in each chunk of BS slots (first of three kernels for many slots)."""
    after_previous(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    key = load_keys(ids, chunk * BS + tl.arange(0, BS), at_ids, S, E, top_k, FLAT)
    tl.store(counts + chunk * BE + tl.arange(0, BE), tl.histogram(key, BE))  # [BE]


@triton.jit(do_not_specialize=["C"])
def scan_chunks(counts, totals, C, BC: tl.constexpr, BE: tl.constexpr, COLS: tl.constexpr, PDL: tl.constexpr):
    """Turn counts into counts of the chunks before, and totals [BE] over all (second of three)."""
    after_previous(PDL)
    let_next_start(PDL)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    carry = tl.zeros([COLS], tl.int32)
    for c in range(0, C, BC):
        row = c + tl.arange(0, BC)
        at = counts + row[:, None] * BE + col[None, :]
        n = tl.load(at, mask=row[:, None] < C, other=0)  # [BC, COLS]
        before = tl.cumsum(n, 0) - n + carry[None, :]
        tl.store(at, before, mask=row[:, None] < C)  # [BC, COLS]
        carry += tl.sum(n, 0)
    tl.store(totals + col, carry)  # [COLS]


@triton.jit(do_not_specialize=["S", "max_tiles"])
def place_chunks(
    ids, counts, totals, order, position, offsets, tiles, num_tiles, at_ids, S, E, top_k, max_tiles,
    FLAT: tl.constexpr, INVERSE: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each chunk writes its slots to their rows; the chunks share the work of writing offsets and tiles (last of three)."""
    after_previous(PDL)
    let_next_start(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BE)
    total = tl.load(totals + bins)  # [BE]
    # The padding of the last chunk is in bin E, which nothing comes after.
    total_valid = tl.where(bins < E, total, 0)
    tiles_of = (total_valid + BM - 1) // BM
    for e in range(chunk, E + 1, tl.num_programs(0)):
        row = tl.sum(tl.where(bins < e, total_valid, 0))
        tl.store(offsets + e, row)  # []
        first_tile = tl.sum(tl.where(bins < e, tiles_of, 0))
        if e == E:
            write_count(num_tiles, first_tile)
        else:
            write_tiles(tiles, max_tiles, e, first_tile, row, tl.sum(tl.where(bins == e, total_valid, 0)), BM)
    i = tl.arange(0, BS)
    slot = chunk * BS + i
    key = load_keys(ids, slot, at_ids, S, E, top_k, FLAT)
    # Smaller experts, this expert in earlier chunks, this expert earlier in this chunk (32 slots at a time, to stay in registers).
    row = tl.load(counts + chunk * BE + key) + tl.gather(tl.cumsum(total_valid, 0) - total_valid, key, 0)  # [BS]
    for j in range(0, BS, 32):
        before = j + tl.arange(0, 32)
        other = tl.gather(key, before, 0)
        row += tl.sum(((other[None, :] == key[:, None]) & (before[None, :] < i[:, None])).to(tl.int32), 1)
    tl.store(order + row, slot, mask=slot < S)  # [BS]
    if INVERSE:
        tl.store(position + slot, row, mask=slot < S)  # [BS]


@triton.jit
def spread_rows(
    x, weights, position, offsets, xs, E, H, top_k, at_x, at_weights,
    SCALE: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """xs [S, H] as of :func:`sort_rows`, from ``position``: each program reads a token's features once and writes them K times."""
    after_previous(PDL)
    let_next_start(PDL)
    t = tl.program_id(0).to(tl.int64)
    count = tl.load(offsets + E)  # []
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col >= 0 if EVEN else col < H
    v = tl.load(x + t * at_x.row + index(col, WIDE) * at_x.col, mask=inside, other=0.0)  # [BLOCK]
    for k in range(top_k):
        row = tl.load(position + t * top_k + k)  # []
        value = v
        if SCALE:
            scale = tl.load(weights + t * at_weights.row + k * at_weights.col).to(tl.float32)  # []
            value = (v.to(tl.float32) * scale).to(x.dtype.element_ty)
        tl.store(xs + row.to(tl.int64) * H + col, value, mask=inside & (row < count))  # [BLOCK]


@triton.jit
def sort_rows(
    x, weights, order, offsets, xs, E, H, top_k, at_x, at_weights,
    SCALE: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """xs [S, H]: token rows in sorted order, ROWS of them per program, times the routing weight with SCALE. Invalid slots are left out."""
    after_previous(PDL)
    let_next_start(PDL)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = r < tl.load(offsets + E)  # []
    slot = tl.load(order + r, mask=live, other=0)  # [ROWS]
    token = (slot // top_k).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = live[:, None] if EVEN else live[:, None] & (col[None, :] < H)
    v = tl.load(x + token[:, None] * at_x.row + index(col, WIDE)[None, :] * at_x.col, mask=mask, other=0.0)  # [ROWS, BLOCK]
    if SCALE:
        from_weights = weights + token * at_weights.row + (slot % top_k).to(tl.int64) * at_weights.col
        scale = tl.load(from_weights, mask=live, other=0.0).to(tl.float32)  # [ROWS]
        v = (v.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty)
    tl.store(xs + r.to(tl.int64)[:, None] * H + col[None, :], v, mask=mask)  # [ROWS, BLOCK]
