"""Programs, routings, placements and modes drawn at random: on every rank what one process computes, outputs and all gradients.

A few cases, always the same, in every run. ``make dist-nightly`` draws many more, on four ranks.
"""

from __future__ import annotations

import hypothesis
from hypothesis import given

from tests.dist import drawn
from tests.dist.workers import Groups
from tests.strategies import THOROUGH

WORLD = 4 if THOROUGH else 2
FEW = hypothesis.settings(parent=hypothesis.settings.default, max_examples=150 if THOROUGH else 5)


def test_programs_as_on_one_process(groups: Groups) -> None:
    @FEW
    @given(drawn.cases(WORLD, most_experts=9 if THOROUGH else 4))
    def holds(case: drawn.Drawn) -> None:
        found = groups.of(WORLD).run(drawn.run, case)
        assert not any(outcome.wrong for outcome in found), found
        assert len({outcome.fused > 0 for outcome in found}) == 1, found
        assert not any("verification-error" in outcome.skipped for outcome in found), found

    holds()
