"""Tensors that travel with the tokens (scales, ids of adapters, bytes) arrive in the order of the tokens, over every transport."""

from __future__ import annotations

import pytest
import torch

from tests.dist import travel
from tests.dist.workers import Workers


@pytest.mark.parametrize("transport", ["allgather", "all_to_all", "all_reduce"])
@pytest.mark.parametrize("counts", [(7, 5), (0, 12)], ids=["uneven", "none"])
def test_rows_stay_together(two: Workers, transport: str, counts: tuple[int, int]) -> None:
    """Forward and backward, for float32, float64, int64 and float8; without legal expert, with one twice, no tokens on a rank."""
    counts = (12, 12) if transport == "all_reduce" else counts
    number = torch.arange(12)
    ids = travel.ids_of(number)
    for rank, found in enumerate(two.run(travel.together, transport, counts)):
        wanted = number[travel.needs(ids, rank, 2)].tolist()
        assert found == [(n, n * (8 + 3 + 1 + 5)) for n in wanted]
