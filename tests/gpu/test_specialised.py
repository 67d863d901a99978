"""Kernels with specialised warps on the device: random calls in processes that a watchdog ends, and what a plan says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cpu.ops_case import Case
from tests.gpu.gpu_case import assert_right, on_gpu
from tests.strategies import THOROUGH

ROOT = Path(__file__).parent.parent.parent
SECONDS = 400
"""After which a process counts as hanging."""
CASES = 125 if THOROUGH else 16
LARGE = {"tokens": 2000, "hidden": 512, "inter": 384, "hidden_out": 512, "experts": 8, "top_k": 4, "dtype": torch.bfloat16}


def hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper(), reason="kernels with specialised warps need Hopper")]


@pytest.mark.parametrize("what", ["", "train"], ids=["infer", "train"])
@pytest.mark.parametrize("seed", range(8))
def test_random_calls(seed: int, what: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.specialised_cases", str(seed), str(CASES if not what else max(CASES // 4, 4)), what]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]


def test_a_table_chooses_them_and_a_switch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the switch the same layer runs by the kernels of Triton, and both are right."""
    from moefuse.kernels.triton.host import plan as plans
    from moefuse.kernels.triton.host.available import SWITCH

    case = Case(**LARGE, bias=False, low_id=0, high_id=8)
    args = on_gpu(case.args())
    plan = plans.Plan(case.call(args))
    assert plan.config.specialised
    assert_right(plan.run(case.call(args)), args, case.options)
    monkeypatch.setenv(SWITCH, "0")
    other = plans.Plan(case.call(args))
    assert not other.config.specialised
    assert_right(other.run(case.call(args)), args, case.options)


def test_a_triton_that_does_not_compile_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made by the kernels of Triton, so are all later ones, and a note says what was lost."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    from moefuse.kernels.triton.host.plan import Plan
    from moefuse.kernels.triton.launch import gluon
    from moefuse.kernels.triton.provide import experts
    from moefuse.machine import slow_paths
    from moefuse.runtime import providers

    def fails(*args: object, **options: object) -> None:
        raise AttributeError("module has no attribute 'warp_specialize'")

    monkeypatch.setattr(GluonJITFunction, "warmup", fails)
    monkeypatch.setattr(gluon, "_lost", [])
    monkeypatch.setattr(slow_paths, "_notes", {})
    case = Case(**LARGE, bias=False, low_id=0, high_id=8)
    args = on_gpu(case.args())
    providers.forget_records()
    for _ in range(3):
        assert_right(providers.run("experts", case.call(args)), args, case.options)
    plan = experts.plan_of(case.call(args))
    assert isinstance(plan, Plan)
    assert not plan.config.specialised
    assert "product_tiles: module has no attribute 'warp_specialize'" in slow_paths.notes()[0]
    providers.forget_records()


def test_a_configuration_that_cannot_be_is_an_error() -> None:
    """Who forces these kernels on a call that they do not take is told why."""
    from moefuse.kernels.triton.config import specialised_tiles
    from moefuse.kernels.triton.host import plan as plans

    case = Case(**{**LARGE, "hidden": 510})
    call = case.call(on_gpu(case.args()))
    with pytest.raises(ValueError, match="rows are not whole 16 bytes"):
        plans.Plan(call, specialised_tiles(plans.Plan(call).problem, 128))


def test_live_weights_in_a_cuda_graph() -> None:
    """Weights that change between replays are read as they are; ids that change are sorted anew, and counters begin at 0 again."""
    case = Case(**LARGE, bias=True, low_id=0, high_id=8)
    args = on_gpu(case.args())
    run = torch.ops.moefuse.experts
    for _ in range(3):
        run(*args, **case.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*args, **case.options)
    for seed in (1, 2):
        other = on_gpu(case.with_(seed=seed).args())
        for t, new in zip(args, other, strict=True):
            for a, b in zip(t, new, strict=True) if isinstance(t, list) else [(t, new)]:
                a.copy_(b)
        graph.replay()
        assert_right(out, args, case.options)
