"""When compiled graphs ran and when calls began, in numbers of one clock: which graphs a call has run, and which it has not.

A graph with experts costs one more number for each time that it runs, a call of a compiled function one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

now: Callable[[], int] = itertools.count(1).__next__
"""The next number."""


class Ran:
    """The last time that a graph ran; that it was compiled counts as once."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = now()


class Begun:
    """The beginning of a call. Of the shape that torch wants: made when a call begins, called when it ends.

    Attributes:
        at: when it began.
        kept_out: what keeps Dynamo from compiling in this call; None where nothing does.
        inference: whether it began under inference mode, which Dynamo switches off while it compiles.
    """

    __slots__ = ("at", "inference", "kept_out")

    question: Callable[[], str | None] = staticmethod(lambda: None)
    """Asks for ``kept_out``."""
    ended: Callable[[Begun], None] = staticmethod(lambda _: None)
    """Told of the end of a call in which something does."""

    def __init__(self) -> None:
        self.at = now()
        self.kept_out = Begun.question()
        self.inference = torch.is_inference_mode_enabled()

    def __call__(self) -> None:
        if self.kept_out is not None:
            Begun.ended(self)


__all__ = ["Begun", "Ran", "now"]
