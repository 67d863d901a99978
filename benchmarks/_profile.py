"""Where the host spends a call, and how long the device waits for it."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import torch


def where(step: Callable[[], Any], lines: int) -> str:
    """The functions in which the host spends a call, by their own time, in microseconds per call."""
    profile, calls = cProfile.Profile(), 20
    profile.enable()
    for _ in range(calls):
        step()
    profile.disable()
    stats: Any = pstats.Stats(profile)
    rows = sorted(((own, total, n, at) for at, (_, n, own, total, _) in stats.stats.items()), reverse=True)[:lines]
    return "\n".join(
        f"  {own / calls * 1e6:8.0f} {total / calls * 1e6:8.0f} us {n / calls:7.0f} calls  {'/'.join(file.split('/')[-2:])}:{line} {name}"
        for own, total, n, (file, line, name) in rows
    )


def kernels(step: Callable[[], Any], steps: int = 5) -> tuple[float, float, str]:
    """Of some steps in a row: the shares of their time in which no kernel and no copy runs on the device, and in which none runs but those
    that communicate; and the kernels that take longest, in microseconds per step."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end, "nccl" in e.name) for e in found]
    whole = max(end for _, end, _ in spans) - min(begin for begin, _, _ in spans)
    sums: dict[str, list[float]] = {}
    for e in found:
        sums.setdefault(e.name[:100], []).append(e.time_range.end - e.time_range.start)
    rows = sorted(((sum(times), len(times), name) for name, times in sums.items()), reverse=True)[:25]
    text = "\n".join(f"  {total / steps:8.0f} us {count / steps:6.1f} x {name}" for total, count, name in rows)
    return 1 - _busy(spans) / whole, 1 - _busy([span for span in spans if not span[2]]) / whole, text


def _busy(spans: list[tuple[float, float, bool]]) -> float:
    busy, last = 0.0, float("-inf")
    for begin, end, _ in sorted(spans):
        busy += max(end - max(begin, last), 0)
        last = max(last, end)
    return busy
