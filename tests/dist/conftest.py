"""Two processes for all tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dist.workers import Workers


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()
