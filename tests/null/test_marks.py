"""Which cases of a test run: few, that have every row of each ``parametrize`` between them, or every pair."""

from __future__ import annotations

import itertools

import pytest

from tests.conftest import covering


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 12)])
def test_few_cases_have_all_rows(strength: int, most: int) -> None:
    cases = list(itertools.product("abcd", "xyz", "01"))
    rows = [set(itertools.combinations(enumerate(case), strength)) for case in cases]
    found = covering(cases, rows)
    assert found[0] == cases[0]
    assert len(found) == most
    assert set().union(*(rows[cases.index(case)] for case in found)) == set().union(*rows)
