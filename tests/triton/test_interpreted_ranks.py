"""Local numbers of experts and sums over ranks, in Triton's interpreter against what they mean (``moefuse/runtime/ranks.py``)."""

from __future__ import annotations

import pytest
import torch

from moefuse.runtime import ranks


@pytest.mark.parametrize("shape", [(0, 2), (1, 1), (3, 2), (700, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_local_ids(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Ids out of range on both sides, more than a block of them, none; a rank's share in the middle of the slots."""
    from moefuse.kernels.triton.provide import ranks as kernels

    source = torch.Generator().manual_seed(0)
    ids = torch.randint(-2, 9, shape, generator=source, dtype=dtype)
    place = torch.tensor([4, 0, 1, 5, 2, 3, 6], dtype=torch.int32)
    found, wanted = kernels.local_ids(ids, place, 2, 3), ranks.local_ids(ids, place, 2, 3)
    assert found.dtype == wanted.dtype
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("world", "most", "tokens"), [(1, 3, 3), (3, 4, 2), (2, 2, 0), (4, 0, 0)])
def test_sum_ranks(dtype: torch.dtype, world: int, most: int, tokens: int) -> None:
    """Bitwise: in the order of ranks, in the accumulation dtype; padding behind a rank's tokens is NaN, and nobody reads it.

    Integers in bfloat16, for Triton's interpreter does not round as devices do.
    """
    from moefuse.kernels.triton.provide import ranks as kernels

    parts = torch.randn(world, most, 5, 3, generator=torch.Generator().manual_seed(1))
    parts = ((parts * 8).round() if dtype == torch.bfloat16 else parts).to(dtype)
    parts[:, tokens:] = float("nan")
    parts = parts.flatten(0, 1)
    found, wanted = kernels.sum_ranks(parts, world, tokens), ranks.sum_ranks(parts, world, tokens)
    assert found.dtype == dtype
    assert torch.equal(found, wanted)
