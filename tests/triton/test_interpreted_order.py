"""The order in which kernels with specialised warps take tiles (``device/functions.expert_order``), interpreted: every tile with every
block once, and tiles of an expert that share a block next to each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

from moefuse.kernels.triton.device.functions import expert_order


@triton.jit
def orders(out, before, count, blocks, GROUP: tl.constexpr):
    i = tl.program_id(0)
    t = i // blocks
    tile, block = expert_order(i, t, tl.load(before + t), tl.load(count + t), blocks, GROUP)
    tl.store(out + 2 * i, tile)
    tl.store(out + 2 * i + 1, block)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.sampled_from((1, 2, 3, 4, 8)))
def test_every_tile_and_block_once(tiles_of: list[int], blocks: int, group: int) -> None:
    """Experts without tiles too; no group is larger than it may be, and groups of an expert differ by what rounding makes."""
    before = [j for n in tiles_of for j in range(n)]
    count = [n for n in tiles_of for _ in range(n)]
    expert = [e for e, n in enumerate(tiles_of) for _ in range(n)]
    total = len(before) * blocks
    if not total:
        return
    out = torch.full((total, 2), -1, dtype=torch.int32)
    orders[(total,)](out, torch.tensor(before, dtype=torch.int32), torch.tensor(count, dtype=torch.int32), blocks, group)
    found = [tuple(pair) for pair in out.tolist()]
    assert sorted(found) == [(t, b) for t in range(len(before)) for b in range(blocks)]
    runs: list[list[int]] = []
    for k, (tile, block) in enumerate(found):
        if k and (expert[tile], block) == (expert[found[k - 1][0]], found[k - 1][1]) and tile == found[k - 1][0] + 1:
            runs[-1].append(tile)
        else:
            runs.append([tile])
    assert max(map(len, runs)) <= (group if blocks > 1 else max(tiles_of))
    if blocks > 1:
        for e, n in enumerate(tiles_of):
            sizes = {len(run) for run in runs if expert[run[0]] == e}
            assert sum(len(run) for run in runs if expert[run[0]] == e) == n * blocks
            assert not sizes or max(sizes) == -(-n // -(-n // group)), "tiles of an expert share weights as often as the group allows"
