"""Worker processes: jobs and answers, deadlines, and processes that die. What a worker compiles needs a GPU (tests/gpu)."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.strategies import THOROUGH

ECHO = """
import json, pathlib, sys
for line in sys.stdin:
    job = json.loads(line)
    bm = job["config"]["bm"]
    if bm == 16:
        sys.exit(1)
    if bm == 599:
        pathlib.Path(sys.argv[1], "begun").touch()
        with open(sys.argv[1] + "/gate") as gate:
            gate.readline()
    print(json.dumps(None if bm < 300 else "too large"), flush=True)
"""


def jobs(*heights: int) -> list[Any]:
    from moefuse.kernels.triton.tune.call import Kind
    from moefuse.tuning.problem import Config, Problem, Tiles

    p = Problem(20, 2, 3, 24, 20, 17, "merged", "bfloat16")
    return [(p, Kind(biases=(True, False, True)), Config(bm, Tiles(), Tiles(swap=True))) for bm in heights]


NEVER = math.inf


def workers(count: int = 2, folder: Path = Path()) -> Any:
    """Processes that answer at once; what is 599 high makes a file ``begun``, and is answered when there is a line in the pipe ``gate``."""
    from moefuse.kernels.triton.tune.compiling import Workers

    return Workers(count, [sys.executable, "-c", ECHO, str(folder)])


def test_a_job_survives_the_way() -> None:
    from moefuse.kernels.triton.tune.compiling import from_json, to_json

    (job,) = jobs(32)
    assert from_json(json.loads(json.dumps(to_json(job)))) == job


def test_answers_are_in_the_order_of_the_jobs() -> None:
    with workers() as pool:
        assert pool(jobs(0, 512, 1, 400, 2), NEVER) == [None, "too large", None, "too large", None]
        assert pool(jobs(1), NEVER) == [None]


def test_a_deadline_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is late is late, also when it is answered during the next round."""
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    late = "not compiled in time"
    with workers(1, tmp_path) as pool:
        assert pool(jobs(0), NEVER) == [None]
        with monkeypatch.context() as clock:
            # The deadline is over as soon as the first of three has begun.
            clock.setattr(time, "monotonic", lambda: 10.0 if (tmp_path / "begun").exists() else 9.999)
            assert pool(jobs(599, 0, 0), 10.0) == [late, late, late]
        os.write(gate, b"\n")
        assert pool(jobs(0), NEVER) == [None]
    os.close(gate)


def test_a_process_that_dies() -> None:
    """Its job has failed; when all are dead nobody waits: this test would not end."""
    with workers(2) as pool:
        assert pool(jobs(16, 0, 0), NEVER) == ["the compiling process ended", None, None]
        assert pool(jobs(16, 16, 0, 0), NEVER) == ["the compiling process ended", *["not compiled in time"] * 3]


def test_leaving_ends_the_processes() -> None:
    pool = workers(2)
    with pool:
        pass
    assert all(process.poll() is not None for process in pool.processes)


def test_the_real_worker_answers() -> None:
    """Without a GPU Triton cannot compile for one, and that is an answer too. The user's own script is not run again."""
    from moefuse.kernels.triton.tune.compiling import Workers

    with Workers(1) as pool:
        (answer,) = pool(jobs(32), NEVER)
    assert answer != "the compiling process ended"


def problems() -> list[Any]:
    from moefuse.tuning.problem import Problem

    return [
        Problem(1, 8, 128, 2048, 768, 2048, "merged", "bfloat16"),
        Problem(8, 4, 32, 2880, 2880, 2880, "interleaved", "bfloat16", True, True),
        Problem(512, 8, 64, 2048, 1024, 2048, "separate", "bfloat16", separate=True),
        Problem(16384, 2, 8, 4096, 14336, 4096, "merged", "bfloat16"),
        Problem(64, 2, 8, 512, 256, 512, "plain", "float32"),
        Problem(64, 2, 8, 512, 256, 512, "merged", "float64"),
    ]


@pytest.mark.parametrize("index", range(6))
def test_searches_are_bounded(index: int) -> None:
    """A few dozen candidates to begin with and per round, each within the device's shared memory, none twice."""
    from moefuse.kernels.triton.config import fit, rules
    from moefuse.kernels.triton.host.layout import Device
    from moefuse.kernels.triton.tune import candidates
    from moefuse.tuning.entries import config_from

    p = problems()[index]
    for device in (Device("NVIDIA H200", 132, 227 << 10, True), Device("another", 80, 99 << 10, False)):
        item = candidates.itemsize(p)
        starts = candidates.starts(p, device, fit(p, rules(p, device.hopper), device.shared, item))
        assert 2 <= len(starts) <= 40
        for config in starts:
            assert fit(p, config, device.shared, item) == config
            assert config_from(config.to_json()) == config
            for part in (config.up, config.down):
                near = candidates.neighbours(part)
                assert 4 <= len(near) <= 40
                assert part not in near
                assert len(set(near)) == len(near)
                changed = [[f.name for f in dataclasses.fields(q) if getattr(q, f.name) != getattr(part, f.name)] for q in near]
                assert all(len(names) == 1 or names == ["bn", "bk"] for names in changed)


@pytest.mark.skipif(not THOROUGH, reason="compiles some hundred kernels")
@pytest.mark.parametrize("index", range(6))
def test_every_start_compiles(index: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate may spill: then it is slow, and loses."""
    from moefuse.kernels.triton.config import fit, rules
    from moefuse.kernels.triton.host.layout import Device
    from moefuse.kernels.triton.tune import candidates
    from tests.triton import test_compiled

    monkeypatch.setattr(test_compiled, "spills", lambda *_: 0)
    p = problems()[index]
    device = Device("NVIDIA H200", 132, 227 << 10, True)
    current = fit(p, rules(p, True), device.shared, candidates.itemsize(p))
    for config in candidates.starts(p, device, current):
        test_compiled.compile_plan(p, config, 90, tmp_path, p.separate)
