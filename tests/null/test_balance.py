"""Balance by measured load: pure functions, for one to a thousand ranks."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, strategies as st

from moefuse.parallel.balance import ENOUGH, Work, balanced, chosen, hottest, moves, times, work_of
from moefuse.parallel.placement import Placement, linear, round_robin

NUMBERS = 3 * 2048 * 768
"""Of an expert of Qwen3-30B-A3B."""


@st.composite
def loads(draw: st.DrawFn) -> tuple[Placement, list[float]]:
    world, slots = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    counts = draw(st.lists(st.integers(0, 10_000), min_size=world * slots, max_size=world * slots))
    work = work_of(counts, draw(st.integers(1, 100)), NUMBERS, 2)
    return draw(st.sampled_from((linear, round_robin)))(world * slots, world), work


@given(loads())
def test_nobody_takes_longer_and_everybody_keeps_as_many(drawn: tuple[Placement, list[float]]) -> None:
    before, work = drawn
    after = balanced(before, work)
    assert max(times(after, work)) <= max(times(before, work)) * (1 + 1e-9)
    assert [len(rank) for rank in after.ranks] == [len(rank) for rank in before.ranks]
    for old, new in zip(before.ranks, after.ranks, strict=True):
        stay = set(old) & set(new)
        assert [e for e in old if e in stay] == [e if n in stay else None for e, n in zip(old, new, strict=True) if e in stay]
    assert balanced(after, work) is after, "it ends where no swap helps"


@given(loads(), st.randoms(use_true_random=False))
def test_moves_in_rings_give_the_placement(drawn: tuple[Placement, list[float]], rng: random.Random) -> None:
    """One ring after another, in any order, each of which leaves every other slot as it was."""
    before, work = drawn
    after = balanced(before, work)
    rings = moves(before, after)
    slots = dict(enumerate(before.order()))
    rng.shuffle(rings)
    for ring in rings:
        assert {move.source for move in ring} == {move.target for move in ring}
        slots |= {move.target: move.expert for move in ring}
    assert [slots[at] for at in range(after.experts)] == after.order()
    assert all(move.source // before.slots != move.target // before.slots for ring in rings for move in ring)


@pytest.mark.parametrize("world", [2, 4, 8, 32])
def test_the_worst_order(world: int) -> None:
    """Zipf(0.8) in sorted order, top 8 of 128: all hot experts on the first rank. Balanced within 5 %, as far as the hottest one allows."""
    work = _zipf(4096 * world)
    before, after = linear(128, world), balanced(linear(128, world), work)
    every = times(after, work)
    hottest = max(work)
    assert unbalance(before, work) > 1.1
    assert max(every) <= max(1.05 * sum(every) / world, 1.3 * hottest)


def test_where_all_experts_are_read_rows_count_too() -> None:
    """512 tokens a rank read every expert, and the rows come on top: measured, 1.2 times as long as balanced with Zipf(1.2)."""
    work = _zipf(512 * 2)
    assert unbalance(linear(128, 2), work) > 1.04
    assert unbalance(balanced(linear(128, 2), work), work) <= ENOUGH


def unbalance(placement: Placement, work: list[Work]) -> float:
    """How many times longer than on average the busiest rank takes; 1 is the best that there is."""
    every = times(placement, work)
    mean = sum(every) / len(every)
    return max(every) / mean if mean else 1.0


def _zipf(tokens: int) -> list[float]:
    weights = torch.arange(1, 129, dtype=torch.float64).pow(-0.8)
    gumbel = -torch.empty(tokens, 128, dtype=torch.float64).exponential_(generator=torch.Generator().manual_seed(0)).log()
    counts = (weights.log() + gumbel).topk(8).indices.flatten().bincount(minlength=128)
    return work_of(counts.tolist(), 1, NUMBERS, 2)


def test_few_tokens_are_reads() -> None:
    """With few tokens an expert that has one token takes nearly as long as one that has seven: rows alone would pair them otherwise."""
    counts = [7, 1, 1, 0]
    few = work_of(counts, 1, NUMBERS, 2)
    many = work_of([1000 * c for c in counts], 1, NUMBERS, 2)
    assert few[1] / few[0] > 0.6
    assert {frozenset(rank) for rank in balanced(linear(4, 2), many).ranks} == {frozenset({0, 3}), frozenset({1, 2})}
    assert many[1] / many[0] < 0.2


def test_nothing_was_chosen() -> None:
    work = work_of([0] * 8, 3, NUMBERS, 2)
    assert balanced(linear(8, 2), work).name == "linear"
    assert unbalance(linear(8, 2), work) == 1.0


def test_balanced_enough_stays() -> None:
    work = work_of([1000, 1001, 1000, 1003], 1, NUMBERS, 2)
    assert unbalance(linear(4, 2), work) <= ENOUGH
    assert balanced(linear(4, 2), work).name == "linear"


@pytest.mark.parametrize("world", [64, 1024])
def test_a_thousand_ranks_in_seconds(world: int) -> None:
    counts = [max(int(50_000 / (e + 1) ** 0.8), 1) for e in range(2048)]
    work = work_of(counts, 1, NUMBERS, 2)
    after = balanced(linear(2048, world), work)
    assert unbalance(after, work) < unbalance(linear(2048, world), work)


EXPERT = NUMBERS, 2


@given(loads(), st.integers(0, 6))
def test_copies_are_made_where_they_gain(drawn: tuple[Placement, list[float]], most: int) -> None:
    """Never slower by what is known of the load, and no rank has fewer experts."""
    placement, work = drawn
    counts = [int(1000 * us) for us in work]
    plain, found = (chosen(placement, counts, 1, EXPERT, copies=copies) for copies in (0, most))
    assert plain.copied == ()
    assert found.before == plain.before
    assert found.after <= plain.after
    assert found.copied in ((), hottest(counts, most))
    assert [len(rank) for rank in found.placement.ranks] == [len(rank) for rank in placement.ranks]


@pytest.mark.parametrize(("experts", "world", "share"), [(16, 2, 0.6), (16, 4, 0.4), (8, 8, 0.5), (128, 16, 0.1)])
def test_one_expert_with_more_than_a_rank_has(experts: int, world: int, share: float) -> None:
    """No placement divides it; with one copy all ranks have about as much as without it."""
    rest = int((1 - share) / (experts - 1) * 10**6)
    counts = [int(share * 10**6)] + [rest] * (experts - 1)
    plain, copied = (chosen(linear(experts, world), counts, 1, EXPERT, copies=copies) for copies in (0, 1))
    mean = sum(work_of(counts, 1, *EXPERT)) / world
    assert plain.after > 1.15 * mean
    assert copied.copied == (0,)
    assert copied.after < 1.1 * mean


def test_few_tokens_want_no_copies() -> None:
    """323 rows on each of two ranks take less than reading their expert does, of 16 (H = 5120, I = 8192)."""
    counts = [646] + [25] * 15
    large = 3 * 5120 * 8192, 2
    assert chosen(linear(16, 2), counts, 1, large, copies=1).copied == ()
    assert chosen(linear(16, 2), [8 * c for c in counts], 1, large, copies=1).copied == (0,)
    assert hottest([7, 1, 1, 0], 9) == (0, 1, 2)
