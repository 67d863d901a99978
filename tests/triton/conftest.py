"""Triton without a GPU: values run in Triton's interpreter (TRITON_INTERPRET=1, a process of its own), the rest is compiled only."""

from __future__ import annotations

import importlib.util
import os

import pytest

HAVE = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name != "triton":
            continue
        if not HAVE:
            item.add_marker(pytest.mark.skip(reason="triton is not installed"))
        elif ("interpreted" in item.path.stem) != INTERPRETED:
            reason = "runs compiled: unset TRITON_INTERPRET" if INTERPRETED else "runs in the interpreter: set TRITON_INTERPRET=1"
            item.add_marker(pytest.mark.skip(reason=reason))
