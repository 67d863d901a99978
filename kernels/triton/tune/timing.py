"""How long calls take on the device, without the host: replays of one CUDA graph of all of them."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

Timer = Callable[[Sequence[Callable[[], Any]], float, Any], float]
"""(calls, a time in microseconds that is good, what is measured) -> microseconds per call."""

TARGET_MS = 12.0
"""How long the replays of one measurement take together, about."""
REPEATS = (5, 25)
"""Fewest and most replays that the median is of."""
HOPELESS = 1.25
"""A candidate whose first replay takes this many times what is good is not measured further."""


def graph_time(calls: Sequence[Callable[[], Any]], good_us: float = float("inf"), _what: Any = None) -> float:
    """Microseconds per call: the median over replays of one graph of all calls, which have run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return replay_time(graph.replay, len(calls), good_us)


def pair_time(before: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float]:
    """Microseconds of two programs, measured in the same way: as graphs if neither waits for the device, else with their host work."""
    for call in (before, after):
        for _ in range(3):
            call()
    if waits(before) or waits(after):
        return replay_time(before, 1), replay_time(after, 1)
    return graph_time([before]), graph_time([after])


def waits(call: Callable[[], Any]) -> bool:
    """Whether a call makes the host wait for the device, which no graph can record."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        except RuntimeError:
            return True
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return False


def replay_time(run: Callable[[], Any], count: int, good_us: float = float("inf")) -> float:
    """Microseconds of a ``count``-th part of ``run``, measured by events on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0 / count

    once()
    first = once()
    if first > HOPELESS * good_us:
        return first
    low, high = REPEATS
    return statistics.median(once() for _ in range(max(low, min(int(TARGET_MS * 1000.0 / max(first * count, 1e-3)), high))))
