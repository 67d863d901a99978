"""Routing replay of experts on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.dist import layers, replayed
from tests.dist.workers import Workers

CASES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    # Each case says why it is there.
    "tokens travel by the ids that were given": (layers.Stacked, {}),
    "a list, exact splits": (layers.Listed, {"transport": "all_to_all"}),
    "slices, the same tokens": (layers.Stacked, {"experts": "tp", "tokens": "replicated"}),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(two: Workers, name: str) -> None:
    for out, worst, taken in two.run(replayed.trained, *CASES[name]):
        assert taken
        assert out <= 2e-6
        assert worst <= 5e-6
