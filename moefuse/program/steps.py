"""Operations of a graph as text, in their order, with what repeats said once: a loop over 128 experts is one body, 128 times."""

from __future__ import annotations

import functools
from typing import NamedTuple

MAX_PERIOD = 48
"""Operations of a repeated body, at most."""


class Run(NamedTuple):
    """Some operations, so many times in a row."""

    names: tuple[str, ...]
    times: int = 1


@functools.lru_cache(maxsize=64)
def fold(names: tuple[str, ...]) -> tuple[Run, ...]:
    """Names as runs, the longest repetition from each place on: ``a b c b c d`` is ``a``, ``b c`` twice, ``d``."""
    runs: list[Run] = []
    plain: list[str] = []
    at = 0
    while at < len(names):
        period, count = _repetition(names, at)
        if count == 1:
            plain.append(names[at])
            at += 1
            continue
        if plain:
            runs.append(Run(tuple(plain)))
            plain = []
        runs.append(Run(names[at : at + period], count))
        at += period * count
    return (*runs, Run(tuple(plain))) if plain else tuple(runs)


def _repetition(names: tuple[str, ...], at: int) -> tuple[int, int]:
    """(period, how often) of what repeats from ``at`` on and covers the most, shortest periods first. Twice one name is no loop."""
    best = (1, 1)
    for period in range(1, min(MAX_PERIOD, (len(names) - at) // 2) + 1):
        count = 1
        while names[at + period * count : at + period * (count + 1)] == names[at : at + period]:
            count += 1
        if count > (2 if period == 1 else 1) and period * count > best[0] * best[1]:
            best = (period, count)
    return best
