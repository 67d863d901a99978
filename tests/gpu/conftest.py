"""Compilation takes most of the time here: ``TEST_SHARD=3/16`` runs every sixteenth test, so that as many processes share it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.dist.workers import Workers


@pytest.fixture(scope="module")
def two() -> Iterator[Workers]:
    """Two processes with a GPU each, for all tests of a module."""
    workers = Workers(2, timeout=120, cuda=True)
    yield workers
    workers.close()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = os.environ.get("TEST_SHARD")
    if not shard:
        return
    this, count = map(int, shard.split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != this])
    items[:] = items[this::count]
