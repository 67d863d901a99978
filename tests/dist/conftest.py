"""Groups of two and of four processes for all tests, started when the first one asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.workers import Groups, Workers


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    found = Groups()
    yield found
    found.close()


@pytest.fixture
def two(groups: Groups) -> Workers:
    return groups.of(2)


@pytest.fixture
def four(groups: Groups) -> Workers:
    return groups.of(4)
