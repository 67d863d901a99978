"""Programs changed in one place: whatever was fused, outputs, gradients and written inputs equal eager's."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs import check
from tests.programs.mutations import MUTATIONS, Mutation
from tests.programs.program import Program
from tests.strategies import near_misses

_SHARE = 10
"""One mutation gets this part of the profile's examples; there are many."""


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_near_miss_equals_eager(mutation: Mutation) -> None:
    examples = max(1, settings().max_examples // _SHARE)

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(near_misses(mutation))
    def run(p: Program) -> None:
        check.check_near_miss(p, mutation.name)

    run()
