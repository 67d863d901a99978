"""Models of transformers with ``gradient_checkpointing_enable``, whose attention may draw random numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import recomputed
from tests.dist.workers import Workers

CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    # Each case says why it is there: (use_reentrant, arguments of parallelize).
    "as people call it": (False, {}),
    "another way into backward, which knows how many rows came": (True, {"transport": "all_to_all"}),
    "slices, without numbers of tokens in the graph": (False, {"tokens": "replicated", "experts": "tp"}),
}


@pytest.mark.thorough
@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_gradients(two: Workers, name: str) -> None:
    for losses, worst, fused in two.run(recomputed.trained, *CASES[name]):
        assert losses <= 1e-6
        assert worst <= 2e-6
        assert fused.startswith("fused 2 of 2 MoE layers")
