"""What a model of threads and barriers runs on: generators that yield what they wait for, and events that end what was begun.

Of all that may go on, one random one does; some are slow now and then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Thread = Generator[Callable[[], bool], None, T]
"""Yields a condition without which it does not go on; each yield lets others run."""


class BrokenError(Exception):
    """A rule of the protocol was broken."""


def always() -> bool:
    return True


class Barrier:
    """A phase is over once so many have arrived and what was expected has landed."""

    def __init__(self, arrivals: int) -> None:
        self.arrivals = self.missing = arrivals
        self.copies = self.done = 0

    def passes(self, parity: int) -> bool:
        """Whether the phase of this parity is over: the running one has the other."""
        return self.done % 2 != parity

    def arrive(self) -> None:
        if self.missing == 0:
            raise BrokenError("more arrivals than a phase has")
        self.missing -= 1
        self._end()

    def expect(self, copies: int) -> None:
        self.copies += copies
        self.arrive()

    def landed(self) -> None:
        if self.copies == 0:
            raise BrokenError("a copy that was not expected")
        self.copies -= 1
        self._end()

    def _end(self) -> None:
        if not (self.missing or self.copies):
            self.done += 1
            self.missing = self.arrivals


@dataclass
class Cell:
    """A buffer: the (tile, step) that it holds, and how many products read it now."""

    holds: tuple[int, int] | None = None
    readers: int = 0

    def overwrite(self, step: tuple[int, int] | None) -> None:
        if self.readers:
            raise BrokenError("a stage is overwritten while it is read")
        self.holds = step


class Machine:
    """Threads and events, of which one random one goes on at a time. Whatever runs, some are slow now and then."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.threads: list[tuple[Thread[None], Callable[[], bool], float]] = []
        self.events: list[Callable[[], None]] = []
        self.speed = 1.0

    def start(self, thread: Thread[None]) -> None:
        self.threads.append((thread, always, self._weight()))

    def later(self, event: Callable[[], None]) -> None:
        self.events.append(event)

    def run(self) -> None:
        """Until all threads are at their ends."""
        while self.threads:
            ready = [i for i, (_, may, _) in enumerate(self.threads) if may()]
            weights = [self.threads[i][2] for i in ready]
            if self.events:
                ready.append(-1)
                weights.append(self.speed)
            if not ready:
                raise BrokenError("a deadlock")
            self._go_on(self.random.choices(ready, weights)[0])
            if self.random.random() < 0.01:
                self.threads = [(thread, may, self._weight()) for thread, may, _ in self.threads]
                self.speed = self._weight()
        while self.events:
            self._go_on(-1)

    def _go_on(self, which: int) -> None:
        if which < 0:
            at = self.random.randrange(len(self.events))
            self.events[at], self.events[-1] = self.events[-1], self.events[at]
            self.events.pop()()
            return
        thread, _, weight = self.threads[which]
        try:
            self.threads[which] = thread, next(thread), weight
        except StopIteration:
            del self.threads[which]

    def _weight(self) -> float:
        return self.random.random() ** 3 + 0.02
