"""Times of calls that take turns, and what two of them come to: a machine is faster in one minute than in the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TURNS = (5, 200)
"""Fewest turns, whatever the budget, and most."""

Verdict = Literal["faster", "slower", "even"]


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one is as another, over pairs of calls in the same turn.

    Attributes:
        median: of the pairs.
        low, high: 10th and 90th percentile.
        verdict: ``even`` where the median may be on either side of 1 (95 in 100).
    """

    median: float
    low: float
    high: float
    verdict: Verdict

    @classmethod
    def of(cls, slow: Sequence[float], fast: Sequence[float]) -> Ratio:
        """Of the times of two, in the same turns."""
        pairs = sorted(a / b for a, b in zip(slow, fast, strict=True))
        low, high = _around_the_median(pairs)
        verdict: Verdict = "faster" if low > 1 else "slower" if high < 1 else "even"
        return cls(percentile(pairs, 0.5), percentile(pairs, 0.1), percentile(pairs, 0.9), verdict)

    def to_dict(self) -> dict[str, object]:
        return {"median": self.median, "p10": self.low, "p90": self.high, "verdict": self.verdict}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them is, between two of them by their distance."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def _around_the_median(ordered: Sequence[float]) -> tuple[float, float]:
    """Values between which the median is in 95 of 100 cases, however they are distributed: so far from the middle a coin goes."""
    count = len(ordered)
    out = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    return ordered[out], ordered[count - 1 - out]


def take(calls: Mapping[str, Callable[[], float]], budget_s: float, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Times of each, one call a turn, in all orders one after the other, until the budget is spent.

    Args:
        calls: each says how long it took.
        budget_s: seconds.
        clock: seconds.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = clock() + budget_s
    for turn, order in zip(range(TURNS[1]), itertools.cycle(itertools.permutations(calls)), strict=False):
        if turn >= TURNS[0] and clock() >= end:
            break
        for name in order:
            times[name].append(calls[name]())
    return times
