"""Histories of a spread model, in any order: at each point it computes what one process does."""

from __future__ import annotations

import pytest

from tests.dist import histories
from tests.dist.workers import Workers
from tests.strategies import THOROUGH

LENGTH = 10


@pytest.mark.parametrize("seed", range(60 if THOROUGH else 2))
def test_histories(two: Workers, seed: int) -> None:
    for done, off in two.run(histories.run, seed, LENGTH):
        assert not done, f"{off} off: {done}"
