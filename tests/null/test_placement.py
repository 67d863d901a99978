"""Where experts live: pure functions, against counting by hand, up to a thousand ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from moefuse import ParallelError
from moefuse.parallel.placement import Placement, linear, placed, round_robin

SIZES = st.tuples(st.integers(1, 512), st.integers(1, 1024))


@given(SIZES)
def test_a_table_is_the_inverse_of_what_the_ranks_hold(size: tuple[int, int]) -> None:
    experts, world = size
    for found in (linear(experts, world), round_robin(experts, world)):
        slots = {}
        for rank, held in enumerate(found.ranks):
            for local, expert in enumerate(held):
                slots[expert] = rank * found.slots + local
        assert found.table() == [slots[e] for e in range(experts)]
        assert (found.experts, found.world) == (experts, world)


@given(SIZES)
def test_blocks_are_those_of_a_dtensor(size: tuple[int, int]) -> None:
    """A checkpoint of ours is one of torch's: ``Shard(0)`` cuts as ``torch.chunk`` does."""
    experts, world = size
    chunks = [tuple(c.tolist()) for c in torch.arange(experts).chunk(world)]
    assert linear(experts, world).ranks == (*chunks, *[()] * (world - len(chunks)))
    assert linear(experts, world).in_order


@pytest.mark.parametrize(("experts", "world", "counts"), [(60, 8, [8] * 7 + [4]), (7, 2, [4, 3]), (128, 4, [32] * 4)])
def test_remainders(experts: int, world: int, counts: list[int]) -> None:
    assert [len(held) for held in linear(experts, world).ranks] == counts


def test_round_robin() -> None:
    found = round_robin(7, 3)
    assert found.ranks == ((0, 3, 6), (1, 4), (2, 5))
    assert (found.slots, found.table(), found.in_order) == (3, [0, 3, 6, 1, 4, 7, 2], False)


def test_blocks_of_other_sizes_are_not_those_of_a_dtensor() -> None:
    """In order, three and one: ``Shard(0)`` of four would be two and two, so a checkpoint of it would be another model."""
    assert not placed([0, 0, 0, 1], 4, 2).in_order
    assert placed([0, 0, 1, 1], 4, 2).in_order


def test_what_people_read() -> None:
    assert str(linear(8, 2)) == "0-3 | 4-7"
    assert str(round_robin(8, 2)) == "round robin"
    assert str(placed([0, 1, 0, 0], 4, 2)) == "0, 2-3 | 1"


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ("blocks", "placement='blocks' is not legal; use 'linear', 'round_robin', or a rank for each expert"),
        ([0, 1, 2, 0], "placement names rank 2, and the mesh has ranks 0 to 1"),
        ([0, 1, 1], "placement is for 3 experts on 2 ranks; there are 4 on 2"),
        (linear(4, 4), "placement is for 4 experts on 4 ranks; there are 4 on 2"),
    ],
    ids=["name", "rank", "count", "world"],
)
def test_errors(placement: str | list[int] | Placement, text: str) -> None:
    with pytest.raises(ParallelError, match=text.replace("(", r"\(")):
        placed(placement, 4, 2)


def test_no_cover() -> None:
    with pytest.raises(ParallelError, match=r"holds every expert once: of 4 experts, \[1, 2\] are missing or doubled"):
        Placement("explicit", ((0, 2), (2, 3)))
