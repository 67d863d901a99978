"""Dropout inside experts that are spread over ranks, in training.

A rank draws for the rows that come to its experts, of whatever rank they are: that must be one draw for each row, kept until backward, and
nothing in eval. No comparison with one process sees it, for its numbers are others. So these tests read off the output what was dropped,
and have one process drop the same.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.cpu.dropout_case import Hit, Masked, P, Sorted
from tests.dist import dropped
from tests.dist.dropped import Case, Joined
from tests.dist.workers import Workers

EXACT = {"transport": "all_to_all"}
SAME = {"tokens": "replicated"}
CASES = {
    # Each case says why it is there.
    "a list of modules": Case(),
    "generators that people have set alike": Case(Joined, seeds=(1, 1)),
    "nothing on one rank, a loop over experts that were hit": Case(Hit, (120, 0)),
    "exact splits": Case(how=EXACT),
    "exact splits, nothing on the other rank": Case(Sorted, (0, 120), how=EXACT),
    "a table": Case(Joined, how={"placement": [1, 0, 0, 1]}),
    "computed again in backward": Case(checkpointed=True),
    "computed again in backward, exact splits": Case(Joined, checkpointed=True, how=EXACT),
    "most tokens known, every expert on every token": Case(Masked, how={"max_tokens": 125}),
    "weights that travel": Case(how={"transport": "gather"}),
    "the same tokens, and the same generator": Case(how=SAME, seeds=(1, 1)),
    "the same tokens, a generator for each rank": Case(Joined, how=SAME),
    "through Inductor": Case(Joined, behind="inductor"),
    "through Inductor, exact splits": Case(Hit, how=EXACT, behind="inductor"),
}


def holds(case: Case, ranks: list[dropped.Found]) -> None:
    """Zero or 1 / (1 - p) times what one process computes, with the gradients of just that; and no two rows are drawn alike."""
    assert max(found.worst for found in ranks) <= 1e-12, ranks
    rows = torch.cat([found.kept for found in (ranks[:1] if case.same else ranks)])
    assert abs(rows.double().mean() - (1 - P)) < 0.04  # 2880 draws at most, of four times their deviation
    assert len(rows.unique(dim=0)) == len(rows)
    if case.same:
        assert ranks[0].kept.equal(ranks[1].kept)
        assert ranks[0].state.equal(ranks[1].state) or case.seeds[0] != case.seeds[1]  # what they draw next is the same again


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_each_element_is_dropped_or_kept(two: Workers, name: str) -> None:
    """Fused: a rank draws for rows of all ranks."""
    ranks = two.run(dropped.run, CASES[name])
    for found in ranks:
        assert (len(found.report.fused), found.report.skipped) == (1, []), found.report
    holds(CASES[name], ranks)


def test_slices_are_gathered(two: Workers) -> None:
    """Of slices of experts only their sum is a row to drop something of: each rank runs whole experts on its own tokens, and says why."""
    case = Case(how={"experts": "tp"}, spread_in_eval=True)
    ranks = two.run(dropped.run, case)
    for found in ranks:
        assert [s.code for s in found.report.skipped] == ["experts-gathered"], found.report
        assert "`dropout` is of the sum over all hidden units" in found.report.skipped[0].message
    holds(case, ranks)


def test_slices_are_refused_where_they_would_be_gathered(two: Workers) -> None:
    """``parallelize`` of a model in training sees it beforehand."""
    for ok, said in two.try_to(dropped.run, Case(how={"experts": "tp"})):
        assert not ok
        assert "ParallelError: 0: `dropout` is of the sum over all hidden units" in said
        assert "use experts='ep'" in said


def test_eager_gathers(two: Workers) -> None:
    """What is not compiled draws as it is written, for a rank's own tokens."""
    case = Case(behind=None)
    holds(case, two.run(dropped.run, case))


WAYS = {"any number of tokens": {}, "exact splits": EXACT, "the same tokens": SAME}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["first", "gated", "between", "last"])
def test_gradients_are_of_the_draw(two: Workers, where: str, way: str) -> None:
    """Behind a dropout that the output does not show: a step along the gradients changes the loss as they say, of two experts a token."""
    for off, fused in two.run(dropped.step, Case(where=where, top_k=2, how={**WAYS[way], "grads": "sum"}, seeds=(1, 2))):
        assert off <= 1e-6
        assert fused == 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("without", [{"p": 0.0}, {"train": False}], ids=["p = 0", "eval"])
def test_without_draws_it_is_one_process(two: Workers, without: dict[str, bool | float], way: str) -> None:
    """And it is not there: experts are one op, as without the module."""
    case = replace(Case(top_k=2, where="between", how=WAYS[way]), **without)  # type: ignore[arg-type]
    for found in two.run(dropped.run, case):
        assert found.worst <= 1e-12, found
        assert ([fused.tier for fused in found.report.fused], found.report.skipped) == (["fused"], []), found.report
