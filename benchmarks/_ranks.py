"""Timing on several ranks: every rank runs the same calls in the same order; of a measurement the slowest rank counts."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from _timing import percentile, version

PER_GRAPH = 10
"""Calls in a CUDA graph, so that its launch does not count."""


def start(device: str) -> tuple[int, int, torch.device]:
    """(rank, number of ranks, device) of a process that ``torchrun`` started."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return rank, world, torch.device("cpu")
    mine = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(mine)
    # NVLink multicast is left off; torch reads this before the first group is made.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=mine)
    return rank, world, mine


def say(*what: object) -> None:
    """Print on the first rank."""
    if dist.get_rank() == 0:
        print(*what, flush=True)


def in_turns(candidates: Mapping[str, tuple[Callable[[], object], int]], rounds: int = 15, repeats: int = 5) -> dict[str, list[float]]:
    """Microseconds of each candidate in each round, the slowest rank's. A candidate is a call and how often it does what is measured."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call, _ in candidates.values():
        for _ in range(2):
            call()
    for _ in range(rounds):
        for name, (call, count) in candidates.items():
            times[name].append(_once(call, repeats) / count)
    device = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    table = torch.tensor([times[name] for name in candidates], dtype=torch.float64, device=device)
    dist.all_reduce(table, dist.ReduceOp.MAX)
    return {name: row.tolist() for name, row in zip(candidates, table.cpu(), strict=True)}


def _once(call: Callable[[], object], repeats: int) -> float:
    dist.barrier()
    if not torch.cuda.is_available() or dist.get_backend() == "gloo":
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats * 1e6
    torch.cuda.synchronize()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / repeats


def summary(values: list[float]) -> dict[str, float]:
    """Median and the tenth and ninetieth percentile."""
    return {name: percentile(values, share) for name, share in (("p10", 0.1), ("median", 0.5), ("p90", 0.9))}


def leave() -> None:
    """End the process at once: NCCL would wait for CUDA graphs that hold its collectives."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


@contextlib.contextmanager
def told(what: str) -> Iterator[None]:
    """Say why a part of a benchmark could not run, and go on with the next."""
    try:
        yield
    except Exception as error:
        print(f"rank {dist.get_rank()}: {what}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def head(unit: str, command: str, commit: str) -> dict[str, Any]:
    """Where and when a result was measured."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    versions |= {name: found for name in ("triton", "transformers") if (found := version(name)) is not None}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "date": today,
        "gpu": f"{dist.get_world_size()} x {gpu}",
        "versions": versions,
        "commit": commit,
        "unit": unit,
        "command": command,
    }
