"""``plan.balance``: what a compiled model computes stays, whatever rank has an expert."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from tests.dist import balanced, layers
from tests.dist.workers import Workers


@pytest.mark.parametrize(
    "how",
    [{}, {"max_tokens": 16}, {"tokens": "replicated"}, {"transport": "all_to_all", "placement": "round_robin"}, {"transport": "gather"}],
    ids=str,
)
@pytest.mark.every_value
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.ByProjection, layers.ByModule])
def test_moved(two: Workers, kind: type[nn.Module], how: dict[str, Any]) -> None:
    found = two.run(balanced.moved, kind, how)
    assert found[0]["places"] == found[1]["places"]
    assert len({str(place) for place in found[0]["places"]}) > 2, "experts do move"
    for off in found:
        assert off.pop("graphs") == 0, "nothing is compiled anew"
        off.pop("places")
        assert {what: error for what, error in off.items() if error > 1e-5} == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [balanced.Once, balanced.Exact])
def test_bit_for_bit(two: Workers, kind: type[nn.Module]) -> None:
    """Every expert moves, twice; as on GPUs (tests/gpu/test_ranks.py)."""
    for wrong, off, moves in two.run(balanced.kept, kind, {}):
        assert wrong == 0
        assert off <= 1e-5
        assert moves == [[2] * balanced.E] * len(moves)


def test_by_measured_load(two: Workers) -> None:
    """Counts are of a rank's own tokens, the plan is of all; ``layers=1`` leaves the other layer to the next call."""
    found = two.run(balanced.by_measured_load, layers.Transposed)
    for one in found:
        assert sorted(one["load"]) == sorted(one["names"])
        assert all(sum(calls[0]) == 400 * layers.K for calls in one["load"].values())
        assert one["off"] < 1e-5
        assert (one["first"], one["then"]) == (1, 2)
        assert one["said"].count("ep=2 balanced, 3 of 6 experts here, allgather") == 2
    assert found[0]["load"] != found[1]["load"]
    assert found[0]["said"] == found[1]["said"]


def test_refusals(two: Workers) -> None:
    for rank, said in enumerate(two.run(balanced.refusals)):
        floats, many, grads, optimizer, nothing, third, none, one, moved, odd = said
        assert "the load of first has to be counts [calls, 6], integers from 0 on" in floats
        assert "the load of first has to be counts" in many
        assert "experts of first (of the model, or a deepcopy of it) have gradients, which stay where they are: " in grads
        assert "an optimizer (SGD) has experts, as of first, and its states do not move: balance is for inference" in optimizer
        assert nothing == "the load has no layer, and the plan first, second"
        assert third == "the load has third, and the plan first, second"
        assert none == "a load is a mapping of layers to counts, as moefuse.load_of gives it, and not NoneType"
        assert ("another rank refuses to balance" if rank else "the load of first has to be counts") in one
        assert moved == "True"
        assert "first has 5 experts on 2 ranks: balance needs equally many on each" in odd


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, more) for kind in (layers.Stacked, layers.Listed) for more in (({},), ({}, {"copies": 1}))),
        (layers.Stacked, ({}, {"copies": 2}, {})),
    ],
    ids=["moved", "then copied", "a list", "a list, then copied", "then copied, and gone"],
)
def test_states_from_before(two: Workers, kind: type[nn.Module], more: tuple[dict[str, Any], ...]) -> None:
    """A state_dict shares the weights' memory, where other experts are now, or were until there was room for copies somewhere else: loading
    it is an error; one that is full, or new, is loaded."""
    for said in two.run(balanced.states_from_before, kind, more):
        other = "some experts of first that other ranks hold are in the state, and some are not: what one rank had before plan.balance"
        held = "this state_dict was taken before plan.balance moved experts of first" if kind is layers.Stacked else other
        assert held in said["held"]
        assert other in said["copied"] if kind is layers.Listed else said["copied"] == ""
        assert (said["anew"], said["full"]) == ("", "")
        assert said["off"] < 1e-5


def test_loads_of_wrapped_models(two: Workers) -> None:
    """Counted in a model that stands in another one (DDP, PEFT, Sequential), or the other way round."""
    assert two.run(balanced.wrapped, layers.Stacked) == [[2, 2, 2, 0]] * 2


def test_one_rank_that_calls_something_else(two: Workers) -> None:
    """It is told in words of the layer, by all."""
    here, there = two.run(balanced.alone)
    assert "first: " in here, here
    assert "first" in there, there
