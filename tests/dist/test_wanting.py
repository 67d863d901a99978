"""What one rank alone wants gradients of: right, or a PeerError on all ranks; nobody hangs, and no process ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist import faults, wanting
from tests.dist.workers import Workers

HOW: dict[str, dict[str, Any]] = {
    "any number": {},
    "exact splits": {"transport": "all_to_all"},
    "most known": {"max_tokens": 8},
    "equal": {"max_tokens": "equal"},
    "same tokens": {"tokens": "replicated"},
    "slices": {"experts": "tp"},
}
CASES: list[Any] = [("tokens", how) for how in HOW if how not in ("most known", "equal")]
CASES += [pytest.param("tokens", how, marks=pytest.mark.thorough) for how in ("most known", "equal")]
CASES += [("router", "most known"), ("experts", "most known"), ("router or tokens", "exact splits")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "how"), CASES)
def test_right(two: Workers, name: str, how: str) -> None:
    assert max(two.run(wanting.trained, name, HOW[how])) <= 1e-6


def test_without_compiling(two: Workers) -> None:
    assert max(two.run(wanting.trained, "tokens", {}, None)) <= 1e-6


@pytest.mark.parametrize("how", ["any number", "exact splits"])
@pytest.mark.parametrize("name", wanting.APART)
def test_nothing_to_send_back_on_one_rank(two: Workers, name: str, how: str) -> None:
    for text, again in two.run(wanting.apart, name, HOW[how]):
        assert text.startswith("PeerError: first: rank 1 runs ep_dispatch of first with float32[8], int64[2] ("), text
        assert ", where rank 0 runs ep_dispatch with gradients of first with float32[8], int64[2] (" in text
        assert again


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["any number", "exact splits"])
def test_no_backward_pass_on_one_rank(two: Workers, how: str) -> None:
    for text, seconds, again in two.run(wanting.no_backward, HOW[how]):
        assert text.startswith("PeerError: first: "), text
        assert seconds < 2 * faults.LATE + 5
        assert again.startswith("PeerError: first: "), again
