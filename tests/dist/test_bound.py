"""Rows that training keeps for backward: as many as are said, all that came, and a loud end where more came."""

from __future__ import annotations

import math

import pytest
import torch

from moefuse.ops.bounded import rows_kept
from moefuse.runtime import groups
from moefuse.runtime.groups import Terms
from tests.dist import bounds, equal, layers
from tests.dist.bounds import E, T
from tests.dist.equal import Case
from tests.dist.workers import Workers

CASES = {
    "stacked": Case(layers.Stacked, (20, 20), how={"bound": 1.6}),
    "a list, separate projections, exact, uneven": Case(layers.Listed, (5, 7), how={"bound": "exact"}),
    "exact, nothing on one rank": Case(layers.Stacked, (9, 0), how={"bound": "exact"}),
    "exact, nothing anywhere": Case(layers.Stacked, (0, 0), how={"bound": "exact"}),
    "exact splits": Case(layers.Transposed, (5, 7), how={"bound": "exact", "transport": "all_to_all"}),
    "all to one rank, exact, float64": Case(layers.Stacked, (8, 5), how={"bound": "exact"}, skew=True, dtype=torch.float64),
    "computed again": Case(layers.OnInput, (20, 20), how={"bound": 1.6, "max_tokens": 20}, checkpointed=True),
    "grouped products keep what they always keep": Case(layers.Grouped, (5, 7), how={"bound": 1.0}),
    "through Inductor": Case(layers.Shared, (20, 20), how={"bound": 1.6}, behind="inductor"),
    "slices of some": Case(layers.Stacked, (5, 7), how={"bound": 2.0, "experts": "tp"}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_as_on_one_process(two: Workers, name: str) -> None:
    case = CASES[name]
    for found in two.run(equal.run, case):
        assert found.worst <= (1e-12 if case.dtype == torch.float64 else 2e-6), found
        assert len(found.report.fused) == 2, found.report
        bounded = found.ops.get("moefuse.bounded_experts.default", 0)
        assert bounded == (0 if case.kind is layers.Grouped or case.how.get("experts") == "tp" else 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("bound", "most"), [(None, 1.0), (1.6, 0.8), ("exact", None)])
def test_what_is_kept(two: Workers, bound: float | str | None, most: float | None) -> None:
    """Of 2 T rows with K slots each: all, 1.6 halves of them, or on both ranks together just those that there are."""
    slots = 2 * T * layers.K
    found = two.run(bounds.saved, bound, False)
    for rows, wrong, report in found:
        assert wrong == ""
        assert (f"rows kept: {bound}" in report) == (bound is not None)
        assert len(rows) == 2
        assert most is None or rows == [math.ceil(slots * math.ceil(most * 1024) / 1024)] * 2
    if bound == "exact":
        assert [a + b for a, b in zip(found[0][0], found[1][0], strict=True)] == [slots, slots]


def test_more_than_is_kept(two: Workers) -> None:
    """All tokens want experts of rank 0. The next layer says so on both ranks, where the host can know it."""
    (_, raised, _), (_, told, _) = two.run(bounds.saved, 1.2, True)
    need = 2 * T * layers.K
    sentence = f"TooManyTokens: second: {need} rows came to the experts of first on rank 0, and bound=1.2 keeps 58 for backward"
    assert raised.startswith(sentence), raised
    assert told.startswith("PeerError: second: rank 0 raised before it sent its tokens"), told


def test_a_step_with_more_than_is_kept(two: Workers) -> None:
    """One layer: the result is right, gradients of its experts and router are NaN and not a wrong number, and the next step raises."""
    (wrong, raised), (others, told) = two.run(bounds.one_layer)
    assert {"gate_up", "down"} <= set(wrong)
    assert "router.weight" in others
    assert raised.startswith("TooManyTokens: the experts: 96 rows came to the experts of the experts on rank 0"), raised
    assert told.startswith("PeerError"), told


def test_a_share_of_a_thousand_ranks() -> None:
    """Never fewer rows than the share, nor more than there are."""
    groups.register("many", tuple(range(1000)), 0, None, None)
    groups.register("two", (0, 1), 0, None, None)
    assert rows_kept(8 * 1000 * 512, Terms("many", bound=1.5)) == 8000
    assert [rows_kept(n, Terms("two", bound=1.0)) for n in (0, 1, 2, 5)] == [0, 1, 1, 3]
    assert rows_kept(7, Terms("two", bound=5.0)) == 7
    assert E % 2 == 0
