"""Experts of a list that change places, are cut, replaced, copied or moved to another list while they are spread."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist import moved
from tests.dist.workers import Workers


@pytest.mark.parametrize("name", moved.MOVES)
def test_moved(two: Workers, name: str, tmp_path: Path) -> None:
    """All that follows goes by the module and not by its place."""
    for off in two.run(moved.moved, name, str(tmp_path)):
        assert {what: float(error) for what, error in off.items() if float(error) > 1e-5} == {}


def test_a_part_of_an_expert(two: Workers) -> None:
    for said in two.run(moved.pieces):
        assert len(said) == 3
        assert all("of a part of an expert of first, whose weights moefuse.parallelize has put into the list" in text for text in said)


def test_layers_that_differ_on_one_rank(two: Workers) -> None:
    """Nothing is put together of weights that are not of one layer, and nothing is changed."""
    for own, text in zip(("first", "second"), two.run(moved.other_orders), strict=True):
        assert text.startswith(f"8 {own}: rank 1 runs gathered 0.weight of second "), text
        assert ", where rank 0 runs gathered 0.weight of first " in text
