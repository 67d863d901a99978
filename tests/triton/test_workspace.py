"""How much memory a call of the op takes beside its result: no more than the compiled grouped program took on the device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "layer-h200.json"
HOPPER = ("NVIDIA H200", 132, 227 << 10, True)
MIB = 1 << 20
SMALL = 0.1
"""MiB that may be more: a decode call keeps partial sums of some hundred KiB in float32."""


def measured() -> dict[tuple[str, int], float]:
    """Peak MiB of transformers' grouped program under torch.compile."""
    rows = json.loads(RESULTS.read_text())["results"]
    return {(r["shape"], r["T"]): r["peak_mib"] for r in rows if r["impl"] == "hf_grouped_c" and "peak_mib" in r}


@pytest.mark.parametrize("shape", ["mixtral", "qwen3", "olmoe", "deepseek", "gptoss", "qwen2moe"])
def test_no_more_than_the_compiled_program(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the configurations that ship, for every number of tokens of the benchmark; the result itself counts for both."""
    import sys

    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    from gpu_table import problem_of

    from moefuse.kernels.triton import config
    from moefuse.kernels.triton.host import layout, planned
    from tests.triton.test_compiled import make_plan

    monkeypatch.setattr(planned, "device_of", lambda device: layout.Device(*HOPPER))
    program = {tokens: mib for (name, tokens), mib in measured().items() if name == shape}
    assert program.keys() == {1, 8, 64, 512, 4096, 16384}
    for tokens, mib in program.items():
        problem = problem_of(shape, tokens)
        chosen = config.choose(problem, HOPPER[0], HOPPER[3], HOPPER[2], 2)
        ours = (make_plan(problem, chosen)[0].workspace.size + tokens * problem.out * 2) / MIB
        assert ours <= mib + SMALL, f"{tokens} tokens: {ours:.2f} MiB, the program {mib:.2f}"


def test_a_section_over_another() -> None:
    import torch

    from moefuse.kernels.triton.host.layout import Workspace

    w = Workspace()
    w.add("a", (3,), torch.int32)
    w.add("b", (100,), torch.float32)
    w.add("c", (90,), torch.float32, over="b")
    assert (w.parts["c"][0], w.size) == (w.parts["b"][0], 256 + 512)
    w.add("d", (200,), torch.float32, over="c")
    assert w.size == 256 + 1024
