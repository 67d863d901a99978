"""Groups of two and of four processes for all tests, started when the first one asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.distributed.device_mesh import DeviceMesh

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


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Rank 0 of two, in which nobody else takes part."""
    from tests.dist.test_big_worlds import one_of  # pytest rewrites the assertions of tests that nobody has imported before

    with one_of(2, 0) as made:
        yield made
