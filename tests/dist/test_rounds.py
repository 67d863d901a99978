"""Inference with many tokens in rounds: as many on every rank, the same bits, and as much less memory as was said."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from tests.dist import equal, layers, rounds, scenes
from tests.dist.equal import Case
from tests.dist.workers import Workers
from tests.strategies import THOROUGH


def test_rounds_of_four_ranks(four: Workers) -> None:
    """500, 200, 256 and no tokens, at most 128 of each rank at once: four rounds for all."""
    for found in four.run(rounds.in_rounds):
        assert found.rounds == 4
        assert found.same
        assert found.worst <= 2e-6
        for peak, said in (found.small, found.whole):
            assert peak == pytest.approx(said, rel=0.1)


inference = functools.partial(Case, train=False, behind=scenes.BEHIND)
CASES = {
    "stacked": inference(layers.Stacked, (200, 3)),
    "a list, nothing on one rank": inference(layers.Listed, (0, 300)),
    "transposed, biases, dense, a table": inference(layers.Transposed, (5, 7), how={"placement": [1, 0, 1]}),
    "weight on the input, most tokens known": inference(layers.OnInput, (130, 7), how={"max_tokens": 131}),
    "slices": inference(layers.Stacked, (140, 7), how={"experts": "tp", "debug": True}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_one_op(two: Workers, name: str) -> None:
    for found in two.run(rounds.limited, CASES[name]):
        assert found.worst <= 2e-6, found
        assert (len(found.report.fused), found.report.skipped) == (2, []), found.report
        assert {op for op in found.ops if "ep_" in op} == {"moefuse.ep_experts.default"}
        assert found.ops["moefuse.ep_experts.default"] == 2
        assert all(fused.parallel.endswith(", in rounds") for fused in found.report.fused)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "case"),
    [
        (layers.Stacked, Case(layers.Stacked, (5, 7))),  # gradients: what is saved is saved
        (layers.Grouped, inference(layers.Grouped, (5, 7))),  # the user's own code between grouped products
        (layers.Shared, inference(layers.Shared, (6, 6), how={"tokens": "replicated"})),  # nothing arrives
    ],
)
def test_all_at_once(two: Workers, kind: type[nn.Module], case: Case) -> None:
    for found in two.run(rounds.limited, case):
        assert found.worst <= 2e-6, found
        assert ("moefuse.ep_experts.default" in found.ops) == case.train
        assert found.traveled == 2
        assert all(fused.parallel.endswith(", all tokens at once") == (kind is layers.Grouped) for fused in found.report.fused)


def test_through_inductor(two: Workers) -> None:
    """A rank without tokens goes its rounds, though nothing reads what it gets."""
    for found in two.run(rounds.limited, Case(layers.Stacked, (9, 0), train=False, behind="inductor" if THOROUGH else "front")):
        assert found.worst <= 2e-6, found
        assert found.ops["moefuse.ep_experts.default"] == 2


@pytest.mark.parametrize(("name", "ops"), [("slices", 2), ("exact splits", 0)])
def test_without_a_limit(two: Workers, name: str, ops: int) -> None:
    """One op, all tokens at once; not where the host waits for numbers of rows, which is what a graph then has to see."""
    cases = {**CASES, "exact splits": inference(layers.Stacked, (5, 7), how={"transport": "all_to_all"})}
    for found in two.run(equal.run, cases[name]):
        assert found.worst <= 2e-6, found
        assert found.ops.get("moefuse.ep_experts.default", 0) == ops
        assert all("round" not in fused.parallel for fused in found.report.fused)


def test_without_gradients_in_a_graph_that_has_some(two: Workers) -> None:
    """A teacher, and a layer's own second opinion: fused, though tokens want gradients in the graph around them."""
    for worst, report in two.run(rounds.without_gradients_inside):
        assert worst <= 2e-6
        assert "fused 2 of 2" in report, report
        assert "skipped" not in report, report
