"""Frozen weights, evaluation, copies, other dtypes, averages of weights, autocast and scaled losses around experts that are spread."""

from __future__ import annotations

import pytest
from torch import nn

from tests.dist import drawn, layers, lives, scenes
from tests.dist.workers import Workers

FROZEN = {
    # Each case says why it is there.
    "some experts, before": (layers.Stacked, "first.down first.gate_up", True),
    "experts of a list, afterwards": (layers.Listed, "experts", False),
    "routers and what is around": (layers.Stacked, "router norm", False),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen(two: Workers, name: str) -> None:
    """Frozen Parameters have no gradient, the others that of one process; nothing waits for a collective that another rank left out."""
    for off, fused in two.run(lives.frozen, *FROZEN[name]):
        assert off <= 1e-6
        assert fused == 2


def test_evaluation_between_steps(two: Workers) -> None:
    assert max(two.run(lives.evaluated)) <= 1e-6


@pytest.mark.parametrize(("kind", "late"), [(layers.Stacked, False), (layers.Listed, True)])
def test_another_dtype(two: Workers, kind: type[nn.Module], late: bool) -> None:
    """torch cannot swap what compiled code knows; an optimizer would be left with the Parameters of before."""
    for off, said in two.run(lives.converted, kind, late):
        assert off <= 1e-13
        assert ("is in an optimizer (SGD) and in compiled code" in said) == late


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_a_copy(two: Workers, kind: type[nn.Module]) -> None:
    assert max(two.run(lives.copied, kind)) <= 1e-6


def test_the_mean_of_weights(two: Workers) -> None:
    assert max(two.run(lives.smoothed, layers.Listed)) <= 2e-6


@pytest.mark.parametrize("grads", ["sum", "mean"])
def test_a_bias_beside_slices_and_replicas(two: Workers, grads: str) -> None:
    """It is whole on every rank: what experts' gradients are multiplied by, for replicas that are averaged, is taken back of its own."""
    how = {"tokens": "replicated", "experts": ("dp", "tp"), "grads": grads}
    case = drawn.Drawn("biased", "softmax", "nothing", 2, 2, (5, 7), "uniform", how, "float64", "train", 1, (2, 1))
    for found in two.run(drawn.run, case, scenes.BEHIND):
        assert (found.wrong, found.fused, found.skipped) == ([], 1, [])


@pytest.mark.parametrize("mode", ["autocast", "mixed"])
def test_autocast(two: Workers, mode: str) -> None:
    """Experts in float32, or in bfloat16 behind a router in float32: fused, as exact as one process."""
    case = drawn.Drawn("loop", "softmax", "shared", 3, 2, (5, 7), "uniform", {"tokens": "distinct"}, "float32", mode, 1, (2,))
    for found in two.run(drawn.run, case):
        assert (found.wrong, found.fused, found.skipped) == ([], 1, [])


@pytest.mark.parametrize("around", ["fsdp", "an optimizer for each kind"])
def test_scaled_losses(two: Workers, around: str) -> None:
    """What is infinite on one rank is skipped on all of them: all of an optimizer's Parameters."""
    assert two.run(lives.scaled, around, "nowhere") == [([True, True], 8.0)] * 2
    assert two.run(lives.scaled, around, "experts") == [([False, around != "fsdp"], 4.0)] * 2


AGAIN = [
    ("reentrant", "auto"),
    ("reentrant", "all_to_all"),
    ("selective", "all_to_all"),
    ("selective", "gather"),
    ("checkpointed", "gather"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("mode", "transport"), [*AGAIN, ("micro-batches", "all_to_all")])
def test_computed_again(two: Workers, mode: str, transport: str) -> None:
    """Every way of checkpointing, and micro-batches of other sizes, with no tokens on one rank: as one process, fused on both."""
    case = drawn.Drawn(
        "loop", "softmax", "gated", 5, 2, (7, 0), "uniform", {"tokens": "distinct", "transport": transport}, "float32", mode, 1, (2,)
    )
    for found in two.run(drawn.run, case):
        assert (found.wrong, found.skipped) == ([], [])
        assert found.fused


def test_parameters_of_one_expert_are_those_of_all(two: Workers) -> None:
    """Who updates them expert by expert would do so for all of them each time."""
    for of_model, of_list, of_one in two.run(lives.told_of_one):
        assert of_model == of_list == []
        assert len(of_one) == 2  # modules with Parameters
        assert {text.partition(",")[0] for text in of_one} == {"parameters() of one expert of first has all experts' weights"}
