"""When compiled graphs ran and when calls began, in numbers of one clock: which graphs a call has run, and which it has not.

A graph with experts costs one more number for each time that it runs, a call of a compiled function one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

now: Callable[[], int] = itertools.count(1).__next__
"""The next number."""


class Ran:
    """The last time that a graph ran; that it was compiled counts as once."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = now()


class Begun:
    """The beginning of a call. Of the shape that torch wants: made when a call begins, called when it ends."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        self.at = now()

    def __call__(self) -> None:
        pass


__all__ = ["Begun", "Ran", "now"]
