"""Programs changed in one place: whatever was fused, outputs, gradients and written inputs equal eager's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs import check
from tests.programs.mutations import MUTATIONS, Mutation
from tests.programs.program import Dense, Program, Routing, Selected, Sorted
from tests.strategies import PHASES, near_misses

_SHARE = 15
"""One mutation gets this part of the profile's examples; there are many."""
_BASES = (Program(Selected()), Program(Sorted()))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.sampled(18)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_near_miss_equals_eager(mutation: Mutation) -> None:
    examples = max(1, settings().max_examples // _SHARE)

    @settings(max_examples=examples, phases=PHASES, suppress_health_check=list(HealthCheck))
    @given(near_misses(mutation))
    def run(p: Program) -> None:
        check.check_near_miss(p, mutation.name)

    run()


_NOT_DIFFERENTIABLE = [
    (Program(Selected(combine="scatter_reduce")), "first row halved through a view"),
    (Program(Dense(weights="given", weight_on="input"), Routing("neg_inf_softmax")), "rows detached"),
]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("program", "name"), _NOT_DIFFERENTIABLE, ids=["written", "detached"])
def test_what_eager_cannot_differentiate(program: Program, name: str) -> None:
    check.check_near_miss(program, name)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mutation", [m for m in MUTATIONS if m.code], ids=lambda m: m.name.replace(" ", "-"))
def test_near_miss_is_refused_by_name(mutation: Mutation) -> None:
    program = next(p for p in _BASES if mutation.applies(p))
    outcome = check.check_near_miss(program, mutation.name)
    assert outcome.fused == [], str(outcome)
    assert mutation.code in {s.code for s in outcome.skipped}, str(outcome)
