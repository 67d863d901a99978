"""A progress bar on stderr: tqdm's if it is installed, plain lines else, nothing if it is not wanted."""

from __future__ import annotations

import importlib
import sys
from typing import Any


class Progress:
    """Counts steps of ``total``; a context manager.

    Args:
        total: how many there are.
        wanted: whether anything is shown.
        name: of who is at work.
        unit: what a step is.
        lines: whether lines may stand in for a bar.
    """

    def __init__(self, total: int, wanted: bool, name: str = "moefuse.warmup", unit: str = "problem", lines: bool = True) -> None:
        self.total, self.wanted, self.done = total, wanted and total > 0, 0
        self.name, self.unit, self.lines = name, unit, lines
        self.bar: Any = None

    def __enter__(self) -> Progress:
        if self.wanted:
            try:
                self.bar = importlib.import_module("tqdm").tqdm(total=self.total, desc=self.name, unit=self.unit, file=sys.stderr)
            except ImportError:
                self.bar = None
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def at(self, what: str) -> None:
        """Say what is being done."""
        if self.bar is not None:
            self.bar.set_postfix_str(what)
        elif self.wanted and self.lines:
            sys.stderr.write(f"{self.name}: {self.done + 1} of {self.total}: {what}\n")

    def more(self, steps: int) -> None:
        """There are so many more steps than was thought."""
        self.total += steps
        if self.bar is not None:
            self.bar.total = self.total

    def step(self) -> None:
        """One more is done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update(1)
