"""``plan.balance(copies=..)``: each rank computes the hottest experts for its own tokens, and nothing is ever read that is old."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.dist import copied, layers
from tests.dist.workers import Workers


@pytest.mark.parametrize(
    "how",
    [{}, {"max_tokens": 16}, {"transport": "all_to_all", "placement": "round_robin"}, {"tokens": "sequence"}],
    ids=str,
)
@pytest.mark.every_value
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.ByProjection, layers.Buffers])
def test_as_on_one_process(two: Workers, kind: type[nn.Module], how: dict[str, Any]) -> None:
    _check(two.run(copied.as_on_one_process, kind, how))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hosts", ["", "aabb"])
@pytest.mark.parametrize("how", [{"transport": "all_to_all"}, {"max_tokens": 16}], ids=str)
def test_four(four: Workers, hosts: str, how: dict[str, Any]) -> None:
    """An expert is the own one of one rank, and a copy on three; over hosts, too."""
    _check(four.run(copied.as_on_one_process, layers.Transposed, how, 8, hosts))


def _check(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert {what: off for what, off in one["off"].items() if not off <= 1e-5} == {}
        assert one["copied"] == [(0, 3)]
        assert one["again"] == 0, "other experts, as many: nothing is compiled anew"
        assert one["read"] == [True]
        assert one["more"] == 0, "without copies no byte more"
        assert one["old"] == 0, "nothing had been written"
        assert len(one["told"]) == 2, "load_state_dict and mul_"
        assert "experts of first have been written since the hottest were copied: tokens go to the ranks that have them" in one["told"][0]
        assert one["left"] == [()]
    assert len({one["said"] for one in found}) == 1 or "here" in found[0]["said"]


def test_steps_of_optimizers(two: Workers) -> None:
    """A fused one changes no version of what it writes; others are in histories."""
    for off in two.run(copied.stepped, {"fused": True}):
        assert max(off) <= 1e-5


def test_layers_that_have_copies_in_turns(two: Workers) -> None:
    """Which of them have any is in tables, and in no graph: nothing is compiled anew, also where copies are old."""
    for found in two.run(copied.in_turns):
        assert max(found["off"]) <= 1e-5
        assert found["copied"] == [[True, False], [False, True], [False, False], [True, True], [True, True]]
        assert found["graphs"] == 0


def test_one_rank_writes_alone(two: Workers) -> None:
    """Its copies on other ranks are old, and these cannot know: where ranks tell each other what they run, they are told."""
    for said in two.run(copied.written_by_one):
        assert "first" in said
        assert ", whose copies of hot experts are old with" in said


def test_refusals(two: Workers) -> None:
    for rank, (negative, boolean, other, layers_, copies, some, replicated, gathered, captured) in enumerate(two.run(copied.refusals)):
        assert negative == "copies=-1 is not legal; use a number of experts from 0 on"
        assert boolean.startswith("copies=True is not legal")
        assert other.startswith("copies=1.5 is not legal" if rank else "another rank refuses to balance")
        assert layers_ == "layers=-1 is not legal; use a number from 0 on, or None"
        assert copies.startswith(f"ranks call plan.balance with different arguments, this one with copies={1 + rank}, layers=None,")
        assert f"layers={1 + rank}" in some
        assert replicated == "every rank has all tokens of first, where copies of experts save nothing"
        assert gathered == "weights go to the tokens of first, where copies of experts save nothing"
        assert captured.startswith("a CUDA graph was captured of first, and knows where its experts are: make copies first")


def test_copies_that_gain_nothing(two: Workers) -> None:
    assert two.run(copied.little) == [[()] * 4] * 2
