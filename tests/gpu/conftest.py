"""Compilation takes most of the time here: ``TEST_SHARD=3/16`` runs every sixteenth test, so that as many processes share it."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = os.environ.get("TEST_SHARD")
    if not shard:
        return
    this, count = map(int, shard.split("/"))
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != this])
    items[:] = items[this::count]
