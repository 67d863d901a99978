"""Adapters, and weights in few bits, on spread experts: tokens travel, no sum of weights is made, and nothing is gathered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given, strategies as st

from moefuse.passes.lower.spread import pays_to_round
from tests.dist import adapters, scenes
from tests.dist.workers import Workers
from tests.strategies import THOROUGH

CASES = {
    # name: (adapters before parallelize, behind which compiler, whether gradients are taken, whether by batched products)
    "trained, before": (True, scenes.BEHIND, True),
    "trained, behind": (False, scenes.BEHIND, True),
    "inference": (True, scenes.BEHIND, False),
    "trained, before, dense": (True, "aot_eager", True, True),
    "as written, before": (True, None, True),
    "as written, behind": (False, None, True),
}


@pytest.mark.parametrize("name", CASES)
def test_peft(two: Workers, name: str) -> None:
    """In eager mode weights are gathered and PEFT makes the sum, to the bit; compiled, each rank has its experts' part of the adapters."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    first, behind, grad, *dense = CASES[name]
    for off, grads, fused, skipped in two.run(adapters.adapted, first, behind, grad, *dense):
        assert off <= (1e-6 if behind else 0)
        assert all(error <= (2e-6 if behind else 0) for error in grads), grads
        assert len(grads) == (8 if grad else 0)
        assert (fused, skipped) == ([(4,)] if behind else [], [])


def test_scales_of_a_rank(two: Workers) -> None:
    """An expert's adapter is scaled by its rank, for the tokens of all."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    for said in two.run(adapters.scaled):
        assert said.startswith("PeerError: ")
        assert len(set(re.findall(r"ep_dispatch (\[\w{8}\])", said))) == 2, said


def test_merged(two: Workers) -> None:
    """Into gathered weights it would be lost, which is said; whole experts take it."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    for said, off in two.run(adapters.merged):
        assert "was written to, and is put together from all ranks each time it is read" in said
        assert off == 0


def test_frozen(two: Workers) -> None:
    """By the modules that they were in, as PEFT does it: all experts' at once, for they are one Parameter."""
    pytest.importorskip("peft", reason="PEFT is not installed")
    for default, other, inner in two.run(adapters.frozen):
        assert default
        assert not any(default)
        assert other
        assert all(other)
        assert inner == 1


@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_saved(two: Workers, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed")
    assert two.run(adapters.saved, str(tmp_path), kind) == [[], []]


def test_a_parametrisation_that_stays(two: Workers) -> None:
    """It would keep the weights of the call in which it was made: an error, in the next call or at once."""
    for within, outside in two.run(adapters.left_parametrised):
        assert "as a parametrization that stays" in within
        assert "as a parametrization that stays" in outside


FLOAT8: dict[str, tuple[dict[str, Any], tuple[int, int], bool]] = {
    "any number of tokens": ({}, (5, 7), True),
    "none on one rank": ({}, (6, 0), True),
    "exact splits": ({"transport": "all_to_all"}, (5, 7), True),
    "the same tokens, which do not travel": ({"tokens": "replicated"}, (6, 6), False),
    "nothing wants gradients, in other modes": ({"train": "one", "max_tokens": 9}, (5, 7), True),
    "at most": ({"max_tokens": 512}, (5, 7), True),
    "equally many": ({"max_tokens": "equal"}, (6, 6), True),
    "few": ({"max_tokens": 7, "pays": False}, (5, 7), False),
    "nobody knows how many": ({"pays": False}, (5, 7), False),
    "in training": ({"train": True}, (5, 7), False),
}


def test_when_it_pays_to_round_tokens() -> None:
    """Many on one host, where their number is said; fewer between hosts, and any number that is not said."""
    row = 4096
    assert [pays_to_round([n], row, 1) for n in (4095, 4096, "any", 8192)] == [False, True, False, True]
    assert [pays_to_round([n], row, 2) for n in (255, 256, "any", 8192)] == [False, True, True, True]
    assert [pays_to_round(most, row, 1) for most in ([8192, 16], ["any", 8192], [])] == [False, True, False]


HOW = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.sampled_from([9, 600, "equal"]),
        "transport": st.sampled_from(["all_to_all", "allgather"]),
        "placement": st.sampled_from(["round_robin", [1, 1, 0, 1], [0, 0, 0, 0]]),
        "tokens": st.sampled_from(["replicated", "sequence"]),
    },
)
COUNT = st.integers(0, 9)


def test_float8_drawn(two: Workers) -> None:
    """Any numbers of tokens, a rank without experts, all that may be said of tokens, and rows of what is hard to round."""

    @hypothesis.settings(max_examples=40 if THOROUGH else 3)
    @given(st.sampled_from(["Loop", "Batched", "Grouped"]), st.tuples(COUNT, COUNT), st.sampled_from([*adapters.ODD]), HOW)
    def holds(kind: str, counts: tuple[int, int], odd: str, how: dict[str, Any]) -> None:
        if how.get("tokens") == "replicated":
            how.pop("transport", None)
        if how.get("tokens") == "replicated" or how.get("max_tokens") == "equal":
            counts = (counts[0], counts[0])
        for found in two.run(adapters.held, kind, counts, odd=odd, **how):
            assert found.off <= 2.0**-7
            assert found.bits
            assert not found.skipped
            assert ["tokens in 8 bits" in said for said in found.said] == [how.get("tokens") != "replicated"] * len(found.said)

    holds()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FLOAT8)
@pytest.mark.parametrize("kind", ["Loop", "Batched", "Grouped"])
def test_float8(two: Workers, kind: str, case: str) -> None:
    """Scales are spread with the codes. Tokens travel rounded, as experts on one process round them, and give the same bits."""
    how, tokens, rounded = FLOAT8[case]
    for found in two.run(adapters.held, kind, tokens, **how):
        assert found.off <= 2.0**-7  # each rank's partial sum is rounded to bfloat16, and may be larger than the sum
        assert found.bits
        assert found.encodings == ["e4m3, blocks of 8x16, activations e4m3 per token and 16 inputs"]
        assert not found.skipped
        assert [said.endswith(", tokens in 8 bits") for said in found.said] == [rounded], found.said
