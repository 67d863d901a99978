"""What ranks send each other arrives in memory of its own, for any numbers of tokens: compiled code reads it as aligned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cpu.test_aligned import OVER_RANKS
from tests.dist import aligned
from tests.dist.workers import Workers


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    """Two on one host, where that matters, and one on another."""
    workers = Workers(3)
    yield workers
    workers.close()


WAYS: dict[str, dict[str, Any]] = {
    "allgather": {"bound": "exact"},
    "all_to_all": {"transport": "all_to_all"},
    "rails": {"transport": "all_to_all"},
    "all_reduce": {"tokens": "replicated"},
    "static": {"max_tokens": 1021},
}
COUNTS = [(1021, 7, 0), (1, 1021, 3)]


def test_aligned(three: Workers) -> None:
    seen: set[str] = set()
    for way, how in WAYS.items():
        for counts in COUNTS if way != "all_reduce" else [(1021,) * 3, (7,) * 3]:
            for ops, wrong in three.run(aligned.travelling, "aab" if way == "rails" else "aaa", counts, **how):
                assert wrong == [], way
                seen |= ops
    for ops, wrong in [*three.run(aligned.gathered), *three.run(aligned.gathered, experts="tp")]:
        assert wrong == []
        seen |= ops
    assert seen >= OVER_RANKS
