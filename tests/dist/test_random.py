"""Programs, routings, placements and modes drawn at random: on every rank what one process computes, outputs and all gradients.

A few cases, always the same, in every run. ``make dist-nightly`` draws many more, on four ranks.
"""

from __future__ import annotations

import hypothesis
from hypothesis import given

from tests.dist import drawn
from tests.dist.workers import WorkerError, Workers
from tests.strategies import THOROUGH

WORLD = 4 if THOROUGH else 2
FEW = hypothesis.settings(parent=hypothesis.settings.default, max_examples=150 if THOROUGH else 14)


def test_programs_as_on_one_process() -> None:
    alive = [Workers(WORLD, timeout=30)]

    @FEW
    @given(drawn.cases(WORLD, most_experts=9 if THOROUGH else 5))
    def holds(case: drawn.Drawn) -> None:
        try:
            found = alive[0].run(drawn.run, case, wait=120)
        except WorkerError:
            # The others may be in the middle of a collective.
            alive.pop().close()
            alive.append(Workers(WORLD, timeout=30))
            raise
        assert not any(outcome.wrong for outcome in found), found
        assert len({outcome.fused > 0 for outcome in found}) == 1, found
        assert not any("verification-error" in outcome.skipped for outcome in found), found

    try:
        holds()
    finally:
        alive[0].close()
