"""What it costs to send bytes between ranks: measured constants, and which transport they speak for.

A collective of n bytes takes ``latency + factor * n ** exponent`` microseconds: below some megabytes a link is not used in full, so that an
exponent fits where a bandwidth does not (``benchmarks/comm.py`` fits and checks it on sizes that were held out).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

Fit = tuple[float, float, float]
"""(latency, factor, exponent), in microseconds and bytes."""

_MANY = 1024
"""Tokens of a rank below which weights never travel: full ones take memory, and few microseconds are no reason for that."""
_TABLE = Path(__file__).with_name("links.json")


def fitted(points: Mapping[int, float]) -> Fit:
    """The three constants for microseconds by bytes: least squares of the relative errors over a grid of latencies.

    Args:
        points: at least three sizes.
    """
    least = min(points.values())
    best: tuple[float, Fit] | None = None
    for step in range(200):
        latency = least * step / 200
        logs = [(math.log(n), math.log(us - latency)) for n, us in points.items()]
        mean_x, mean_y = (sum(v) / len(logs) for v in zip(*logs, strict=True))
        spread = sum((x - mean_x) ** 2 for x, _ in logs)
        exponent = min(max(sum((x - mean_x) * (y - mean_y) for x, y in logs) / spread, 0.0), 1.0)
        factor = math.exp(mean_y - exponent * mean_x)
        fit = (latency, factor, exponent)
        error = sum(math.log(predicted(fit, n) / us) ** 2 for n, us in points.items())
        if best is None or error < best[0]:
            best = error, fit
    assert best is not None
    return best[1]


def predicted(fit: Fit, size: float) -> float:
    """Microseconds of a collective in which a rank receives ``size`` bytes."""
    latency, factor, exponent = fit
    return latency + factor * math.pow(size, exponent)


@functools.cache
def links() -> dict[str, Fit]:
    """The fit of each collective inside one host, in a CUDA graph, as it was measured."""
    return {name: tuple(fit) for name, fit in json.loads(_TABLE.read_text())["fits"].items()}


def tokens_us(tokens: int, row: int, world: int) -> float:
    """Microseconds of dispatch and combine by all-gather: ``tokens`` rows of ``row`` bytes on each of P ranks."""
    size = (world - 1) * tokens * row
    return predicted(links()["all_gather"], size) + predicted(links()["all_to_all"], size)


def weights_us(experts: int, world: int) -> float:
    """Microseconds of gathering ``experts`` bytes of weights, of which each rank has the P-th part."""
    return predicted(links()["all_gather"], experts * (world - 1) / world)


def cheapest(tokens: int | None, row: int, experts: int, world: int, hosts: int) -> str:
    """The transport for distinct tokens.

    Args:
        tokens: most tokens of a rank; None if that is not known before.
        row: bytes of a token.
        experts: bytes of the experts of a layer, on all ranks.
        hosts: on which the ranks are.
    """
    if hosts > 1:
        return "all_to_all"
    if tokens is None or tokens < _MANY or world == 1:
        return "allgather"
    # In training tokens travel four times and gathered weights three times; in inference it is two and one.
    if 2 * tokens_us(tokens, row, world) > 3 * weights_us(experts, world):
        return "gather"
    return "allgather"
