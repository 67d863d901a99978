"""Compiling candidates beside each other: worker processes fill Triton's cache, the measuring process only loads from it.

A worker is ``python -m moefuse.kernels.triton.tune.worker``: a process of its own that reads one job per line and writes one answer per
line, both JSON. It is not forked (CUDA forbids that) and not spawned by ``multiprocessing`` (which would run the user's script again).
It compiles for meta tensors, so it holds no memory of the device but its context.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.tune.call import Kind, make
from moefuse.tuning.problem import Config, Problem

Job = tuple[Problem, Kind, Config]
Compiler = Callable[[Sequence[Job], float], list[str | None]]
"""(jobs, deadline by ``time.monotonic``) -> for each job None, or why it cannot be used."""

CONTEXT_BYTES = 700 << 20
"""Device memory that a worker's CUDA context takes, at most."""
MAX_WORKERS = 16
LATE = "not compiled in time"


def to_json(job: Job) -> dict[str, Any]:
    problem, kind, config = job
    return {"problem": asdict(problem), "kind": kind.to_json(), "config": config.to_json()}


def from_json(data: dict[str, Any]) -> Job:
    return Problem(**data["problem"]), Kind.from_json(data["kind"]), Config.from_json(data["config"])


def compile_one(job: Job) -> str | None:
    """Compile all kernels of one configuration into Triton's cache; the error if one fails."""
    problem, kind, config = job
    try:
        call = make(problem, kind, "meta")
        # Kernels for one kind of device are made for no other: meta tensors do not say which it is.
        plan = call.plan(config, device_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None)
        x, ids, weights = call.sets[0]
        space = torch.empty(plan.workspace.size, dtype=torch.uint8, device="meta")
        tensors = {**plan.workspace.views(space), **_operands(plan, call.lists), "x": x, "ids": ids, "weights": weights}
        tensors["out"] = torch.empty((problem.tokens, problem.out), dtype=kind.out(problem), device="meta")
        for launch in plan.steps:
            launch.kernel.warmup(*launch.arguments([tensors[name] for name in launch.names]), grid=launch.grid, **launch.options)
    except Exception as error:
        return (repr(error) or type(error).__name__)[:200]
    return None


def _operands(plan: Any, lists: Any) -> dict[str, torch.Tensor]:
    """What the plan puts behind each name; for a table of addresses or steps an empty one, since meta tensors have no addresses."""
    table = torch.empty(plan.experts, dtype=torch.int64, device="meta")
    names = ("w_in", "w_up", "w_out", "b_in", "b_up", "b_out")
    given = {
        name: table if getattr(plan, name).table and name not in plan.apart else tensors[0]
        for name, tensors in zip(names, lists, strict=True)
        if tensors and getattr(plan, name) is not None
    }
    given.setdefault("w_up", given["w_in"])
    given.setdefault("b_in", given["w_out"])
    given.setdefault("b_up", given["b_in"])
    given.setdefault("b_out", given["w_out"])
    return given | {f"steps_{name}": table for name in plan.apart}


def nothing(jobs: Sequence[Job], deadline: float) -> list[str | None]:
    """A :data:`Compiler` that leaves it to the first launch."""
    return [None] * len(jobs)


def worker_count() -> int:
    """As many as there are processors, less one, and contexts that fit into half of the free device memory."""
    free = torch.cuda.mem_get_info()[0] // (2 * CONTEXT_BYTES) if torch.cuda.is_available() else MAX_WORKERS
    return max(min((os.cpu_count() or 2) - 1, MAX_WORKERS, free), 1)


class Workers:
    """A pool of worker processes, as a :data:`Compiler`, for the current device. A context manager; leaving it ends the processes."""

    def __init__(self, count: int | None = None, command: Sequence[str] | None = None) -> None:
        # -P: the current folder counts only if this process looks there too.
        device = str(torch.cuda.current_device() if torch.cuda.is_available() else 0)
        self.command = list(command or (sys.executable, "-P", "-m", "moefuse.kernels.triton.tune.worker", device))
        self.count = count or worker_count()
        self.jobs: queue.SimpleQueue[tuple[int, int, str] | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[int, int, str | None]] = queue.SimpleQueue()
        self.processes: list[subprocess.Popen[str]] = []
        self.threads: list[threading.Thread] = []
        self.round = 0

    def __enter__(self) -> Workers:
        # The child finds moefuse, torch and Triton where this process found them.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}
        for _ in range(self.count):
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(self.command, text=True, env=environment, **pipes)
            self.processes.append(process)
            self.threads.append(threading.Thread(target=self._serve, args=(process,), daemon=True))
            self.threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self.jobs.put(None)

    def __call__(self, jobs: Sequence[Job], deadline: float) -> list[str | None]:
        """Answers by the deadline; what is not compiled by then is told so, and what was not begun is not begun any more."""
        self.round += 1
        for i, job in enumerate(jobs):
            self.jobs.put((self.round, i, json.dumps(to_json(job))))
        answers: list[str | None] = [LATE] * len(jobs)
        missing = len(jobs)
        while missing and time.monotonic() < deadline and (any(t.is_alive() for t in self.threads) or not self.answers.empty()):
            try:
                number, i, answer = self.answers.get(timeout=min(max(deadline - time.monotonic(), 0.001), 1.0))
            except queue.Empty:
                continue
            if number == self.round:
                answers[i], missing = answer, missing - 1
        with contextlib.suppress(queue.Empty):
            while True:
                self.jobs.get_nowait()
        return answers

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Hand jobs to one process until it or the pool ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        while (job := self.jobs.get()) is not None:
            number, i, text = job
            try:
                process.stdin.write(text + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except (OSError, ValueError):
                line = ""
            if not line:
                self.answers.put((number, i, "the compiling process ended"))
                return
            self.answers.put((number, i, json.loads(line)))
