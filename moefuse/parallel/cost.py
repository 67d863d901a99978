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
from typing import Any

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
    """The fit of each collective inside one host, in a CUDA graph, and of ``symm`` both ways, as it was measured."""
    return {name: tuple(fit) for name, fit in _table()["fits"].items()}


@functools.cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_TABLE.read_text())
    return found


def tokens_us(tokens: int, row: int, world: int) -> float:
    """Microseconds of dispatch and combine by all-gather: ``tokens`` rows of ``row`` bytes on each of P ranks."""
    size = (world - 1) * tokens * row
    return predicted(links()["all_gather"], size) + predicted(links()["all_to_all"], size)


def shared_us(tokens: int, row: int, world: int) -> float:
    """Microseconds of dispatch and combine through memory that ranks share."""
    return predicted(links()["symm"], 2 * (world - 1) * tokens * row)


def weights_us(experts: int, world: int) -> float:
    """Microseconds of gathering ``experts`` bytes of weights, of which each rank has the P-th part."""
    return predicted(links()["all_gather"], experts * (world - 1) / world)


def far_us(rows: int, row: int) -> float:
    """Microseconds of as many rows each way over the network card of a rank, by a rate that is assumed and was not measured."""
    return float(2 * rows * row / _table()["assumed"]["network_bytes_per_us"])


def waits_us() -> float:
    """Microseconds that a layer's host needs longer for exact splits than for all-gather, as it was measured, launched."""
    return float(_table()["exact_splits_us"])


def products_us(rows: float, numbers: int) -> float:
    """Microseconds of the products of many rows with experts of ``numbers`` weights each."""
    return float(2 * rows * numbers / _table()["rates"]["flops_per_us"])


def reading_us(size: float) -> float:
    """Microseconds of reading ``size`` bytes of weights for few rows."""
    return float(size / _table()["rates"]["bytes_per_us"])


def cheapest(tokens: int | None, row: int, experts: int, world: int, hosts: int, shared: bool = False) -> str:
    """The transport for distinct tokens.

    Args:
        tokens: most tokens of a rank; None if that is not known before.
        row: bytes of a token.
        experts: bytes of the experts of a layer, on all ranks.
        hosts: on which the ranks are.
        shared: whether ranks can write each other's memory, and have as many tokens as each other, or not more than are known before.
    """
    if hosts > 1:
        return _over_hosts(tokens, row, world, hosts)
    way = "symm" if shared else "allgather"
    if tokens is None or tokens < _MANY or world == 1:
        return way
    us = shared_us(tokens, row, world) if way == "symm" else tokens_us(tokens, row, world)
    # In training tokens travel four times and gathered weights three times; in inference it is two and one.
    return "gather" if 2 * us > 3 * weights_us(experts, world) else way


def _over_hosts(tokens: int | None, row: int, world: int, hosts: int) -> str:
    """One copy of a row for each host, unless tokens are so few that the wait for their numbers costs more than all rows of all ranks do.

    Inside of a host both bring a rank no more rows than there are, so only what comes over the network is counted.
    """
    if tokens is None:
        return "all_to_all"
    everything = (world - -(-world // hosts)) * tokens
    return "allgather" if far_us(everything, row) < waits_us() else "all_to_all"
