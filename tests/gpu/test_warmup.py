"""``moefuse.warmup`` on a device: measured, kept, taken, right; and the cost gate after it. Small shapes: about a minute."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moefuse
from moefuse.machine import cache_folder
from tests.cpu.ops_case import Case, run
from tests.gpu.gpu_case import assert_right, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh_dynamo", "own_folder")]

SIZES = {"hidden": 256, "inter": 128, "hidden_out": 256, "experts": 16, "top_k": 4}
SPEC = moefuse.ExpertsSpec(16, 4, 256, 128, "bfloat16", "silu", bias=True)


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Measurements of tiny layers stay out of the user's folder, and plans that were made with them go."""
    from moefuse.runtime import providers
    from moefuse.tuning import sites

    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.delenv("MOEFUSE_AUTOTUNE")
    sites.clear()
    providers.forget_records()
    yield
    providers.forget_records()
    sites.clear()


def config_of(case: Case) -> dict[str, Any]:
    """What the plan of a call takes now."""
    from moefuse.kernels.triton.host.plan import Plan
    from moefuse.kernels.triton.provide import experts as provider

    args = on_gpu(case.args())
    run(args, **case.options)
    plan = provider.plan_of(case.call(args))
    assert isinstance(plan, Plan)
    return plan.config.to_json()


def test_specs() -> None:
    """Every number of tokens is measured, the choice is taken by the next call, and it is right."""
    report = moefuse.warmup(SPEC, [2, 64], budget_s=24, progress=False)
    assert [t.tokens for t in report.measured] == [2, 64], str(report)
    assert report.device == torch.cuda.get_device_name()
    assert report.seconds < 30
    # Workers begin while the first problem is measured as it runs now.
    assert report.tuned[-1].tried > 4, str(report)
    for row in report.tuned:
        assert row.us <= row.before_us
        case = Case(**SIZES, tokens=row.tokens, dtype=torch.bfloat16)
        assert config_of(case) == row.config
        args = on_gpu(case.args())
        assert_right(run(args, **case.options), args, case.options)


def test_a_recorded_graph_stays_valid() -> None:
    case = Case(**SIZES, tokens=64, dtype=torch.bfloat16)
    args = on_gpu(case.args())
    run(args, **case.options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(args, **case.options)
    moefuse.warmup(SPEC, [64], budget_s=8, progress=False)
    args[0].normal_()
    graph.replay()
    assert_right(out, args, case.options)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_AUTOTUNE", "0")
    report = moefuse.warmup(SPEC, [2], budget_s=5, progress=False)
    assert (report.tuned, report.notes) == ([], ["MOEFUSE_AUTOTUNE=0 forbids tuning"])


def test_a_model_and_its_program() -> None:
    """The fused layer against the loop that was matched; the next compilation decides as the measurement says."""
    from tests.cpu.test_cost_gate import Layer

    model = Layer().cuda()
    x = torch.randn(10, 8, device="cuda")
    early = moefuse.warmup(model, [10], budget_s=5, progress=False)
    assert "run the compiled model once" in early.notes[0]
    with torch.no_grad():
        compiled = torch.compile(model, backend="moefuse", fullgraph=True)
        want = model(x)
        torch.testing.assert_close(compiled(x), want, rtol=1e-3, atol=1e-3)
        before = torch.cuda.get_rng_state()
        report = moefuse.warmup(compiled, [10], budget_s=26, progress=False)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        (row,) = report.measured
        ((program, fused),) = row.programs.values()
        assert row.not_compared == ()
        torch.testing.assert_close(compiled(x), want, rtol=1e-3, atol=1e-3)
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend="moefuse", fullgraph=True)(x), want, rtol=1e-3, atol=1e-3)
        last = moefuse.last_report()
        assert last is not None
        assert len(last.fused) == (fused < program)
