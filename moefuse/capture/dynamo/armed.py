"""A guard on whether routing is captured or replayed: frames are compiled once more for that, and cost nothing where nobody asks for it.

Frames from before the first request have no guard. They are forgotten then, and compiled again when they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moefuse import _torch_private
from moefuse.capture.dynamo import guards, left

_asked: list[Callable[[], bool]] = []


def ask(on: Callable[[], bool]) -> None:
    """From now on frames depend on ``on()``."""
    if _asked:
        return
    _asked.append(on)
    for code in left.ours():
        _torch_private.reset_code(code)


def now() -> bool:
    """What frames that are compiled now depend on."""
    return bool(_asked) and _asked[0]()


def watch(output: Any) -> None:
    """Add the guard to a frame, if it is needed."""
    if not _asked:
        return
    on, expected = _asked[0], now()

    def same(_: Mapping[str, Any]) -> bool:
        return on() is expected

    guards.ask(output, same, "routing is replayed or not")
