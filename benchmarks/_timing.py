"""Paired, interleaved timing: every round runs each candidate once, so that a slow minute of the machine hits all of them alike."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def percentile(values: list[float], share: float) -> float:
    """Linear interpolation between the sorted values; ``share`` in [0, 1]."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, budget_s: float = 5.0, warmup: int = 2
) -> dict[str, list[float]]:
    """Milliseconds of each candidate in each round.

    The order rotates from round to round. Short calls are repeated inside a round to at least a millisecond; long ones stop after
    ``budget_s`` seconds, but not before five rounds.
    """
    repeats: dict[str, int] = {}
    for name, call in candidates.items():
        for _ in range(warmup):
            call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, min(100, int(1e-3 / max(time.perf_counter() - start, 1e-7))))
    times: dict[str, list[float]] = {name: [] for name in candidates}
    names, started = list(candidates), time.perf_counter()
    for turn in range(rounds):
        if turn >= 5 and time.perf_counter() - started > budget_s:
            break
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            call, count = candidates[name], repeats[name]
            start = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def in_a_row(call: Callable[[], object], calls: int, device: str) -> float:
    """Microseconds of each of some calls, with nothing that waits for the device between them."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e6 / calls


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles of one candidate."""
    shares = {"p25": 0.25, "median": 0.5, "p75": 0.75}
    return {"rounds": len(values)} | {name: percentile(values, share) for name, share in shares.items()}


def paired_ratio(slow: list[float], fast: list[float]) -> dict[str, float]:
    """slow / fast, taken round by round: above 1 when ``fast`` wins."""
    return summary([s / f for s, f in zip(slow, fast, strict=True)])


def short(value: Any) -> Any:
    """Floats with six digits: more than any measurement means."""
    if isinstance(value, dict):
        return {name: short(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [short(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def by_line(head: dict[str, Any], name: str, rows: list[Any]) -> str:
    """JSON of ``head`` and, under ``name``, a line for each row."""
    lines = ",\n  ".join(json.dumps(short(row)) for row in rows)
    return json.dumps(short(head))[:-1] + (", " if head else "") + f'"{name}": [\n  {lines}\n]}}\n'


def captured(call: Callable[[], object], per_graph: int) -> Callable[[], object]:
    """``per_graph`` calls as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(per_graph):
            call()
    return graph.replay


def environment() -> dict[str, Any]:
    """Where and on what a result was measured."""
    model = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _git("rev-parse", "--short=7", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "cpu": model,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
    }


def version(package: str) -> str | None:
    """None where a package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()
