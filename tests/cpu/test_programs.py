"""Programs as people write them: each is fused as one region and equals the reference, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.programs import catalogue, check
from tests.programs.program import Program, invalid
from tests.strategies import PHASES, SPELLINGS, programs

_FULL = catalogue.PROGRAMS[::14]


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda cls: cls.__name__.lower())
def test_any_program(spelling: type[Any]) -> None:
    @settings(phases=PHASES, suppress_health_check=list(HealthCheck))
    @given(programs((spelling,)))
    def run(p: Program) -> None:
        check.check_program(p)

    run()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("entry", catalogue.PROGRAMS, ids=lambda entry: entry.name)
def test_catalogue(entry: catalogue.Entry) -> None:
    outcome = check.check_program(entry.program)
    assert outcome.fused[0].domain == entry.domain, entry.why
    assert outcome.fused[0].tier == entry.tier, entry.why


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("entry", _FULL, ids=lambda entry: entry.name)
def test_through_inductor(entry: catalogue.Entry) -> None:
    check.check_program(entry.program, full=True)


def test_catalogue_is_sound() -> None:
    names = [entry.name for entry in catalogue.PROGRAMS]
    assert len(names) == len(set(names)) >= 40
    assert [entry.name for entry in catalogue.PROGRAMS if invalid(entry.program)] == []
