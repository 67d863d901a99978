"""The search in Triton's interpreter: real kernels, a clock that is made up."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from moefuse.ops.meaning.call import ExpertsCall
from tests.cpu.ops_case import Case, reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),  # the interpreter, about NumPy
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def problem(**more: Any) -> Any:
    from moefuse.tuning.problem import Problem

    return Problem(
        **{
            "tokens": 20,
            "top_k": 2,
            "experts": 3,
            "hidden": 24,
            "inter": 20,
            "out": 17,
            "gating": "merged",
            "dtype": "float32",
            **more,
        }
    )


def prefers(wanted: Any, calls: list[Any]) -> Any:
    """A timer for which a configuration is the slower, the further it is from ``wanted`` in the sizes of its blocks."""

    def timer(run: Sequence[Any], good: float, config: Any) -> float:
        run[0]()
        calls.append(config)
        parts = [(config.up, wanted.up), (config.down, wanted.down)]
        apart = sum(abs(a.bn - b.bn) + abs(a.bk - b.bk) for a, b in parts if type(a) is type(b))
        return 10.0 + apart + 100.0 * (config.bm != wanted.bm)

    return timer


def search(p: Any, timer: Any, deadline: float = 1e9, clock: Any = lambda: 0.0, compiler: Any = None, **kind: Any) -> Any:
    from moefuse.kernels.triton.tune.call import Kind, make
    from moefuse.kernels.triton.tune.compiling import nothing
    from moefuse.kernels.triton.tune.search import Search

    call = make(p, Kind(**kind), "cpu")
    return Search(call, timer, compiler or nothing, deadline, clock)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes seconds for some configurations: where only the order of times matters, the result is the reference's."""
    from moefuse.kernels.triton.host.plan import Plan

    def run(self: Any, call: ExpertsCall) -> torch.Tensor:
        return reference([call.x, call.ids, call.weights, *call.lists], gating=call.body.gating)

    monkeypatch.setattr(Plan, "run", run)


@pytest.mark.usefixtures("nothing_runs")
def test_the_search_walks_to_the_best() -> None:
    """Neighbour by neighbour, in both kernels, to a configuration that no start has."""
    from moefuse.kernels.triton.tune import candidates
    from moefuse.tuning.problem import Config, Tiles

    p = problem()
    wanted = Config(16, Tiles(64, 32, 4, 3), Tiles(32, 32, 4, 3))
    found = search(p, prefers(wanted, []))
    outcome = found.run()
    assert (outcome.config.bm, outcome.config.up.bn, outcome.config.up.bk) == (16, 64, 32)
    assert (outcome.config.down.bn, outcome.config.down.bk) == (32, 32)
    assert outcome.us == 10.0 < outcome.before_us
    starts = candidates.starts(p, found.device, outcome.before)
    assert all((c.bm, c.up.bn, c.down.bn) != (16, 64, 32) for c in starts)


@pytest.mark.usefixtures("nothing_runs")
def test_a_fast_configuration_that_is_wrong_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.kernels.triton.host.plan import Plan

    run = Plan.run

    def broken(self: Any, *args: Any) -> torch.Tensor:
        out = run(self, *args)
        return out * 1.01 if self.config.bm == 0 else out

    monkeypatch.setattr(Plan, "run", broken)
    outcome = search(problem(), lambda calls, good, config: 1.0 if config.bm == 0 else 5.0).run(rounds=0)
    assert outcome.config.bm
    assert outcome.us == 5.0
    assert any(why.startswith("error ") for why in outcome.failed)


@pytest.mark.usefixtures("nothing_runs")
def test_time_runs_out() -> None:
    """What runs now is measured even then, and nothing else is begun."""
    calls: list[Any] = []
    outcome = search(problem(), lambda c, g, config: float(calls.append(config) or 3.0), deadline=0.0, clock=lambda: 1.0).run()
    assert calls == [outcome.before]
    assert outcome.config == outcome.before
    assert (outcome.us, outcome.before_us) == (3.0, 3.0)


@pytest.mark.usefixtures("nothing_runs")
def test_what_does_not_compile_is_left_out() -> None:
    def compiler(jobs: Sequence[Any], deadline: float) -> list[str | None]:
        return ["out of registers" if config.bm else None for _, _, config in jobs]

    outcome = search(problem(), lambda c, g, config: 1.0 if config.bm else 2.0, compiler=compiler).run(rounds=0)
    assert outcome.failed.get("out of registers")
    assert {c.bm for c, _ in outcome.times} == {outcome.before.bm, 0}


@pytest.mark.usefixtures("nothing_runs")
def test_a_launch_that_fails_is_left_out() -> None:
    def timer(calls: Sequence[Any], good: float, config: Any) -> float:
        if config.bm == 0:
            raise RuntimeError("out of resources\nand more")
        return 1.0

    outcome = search(problem(), timer).run(rounds=0)
    assert outcome.config.bm
    assert outcome.failed["out of resources"] >= 1


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gating": "plain"},
        {"gating": "separate", "separate": True},
        {"gating": "interleaved", "transposed_in": True, "transposed_out": True},
        {"tokens": 1},
        {"dtype": "float16"},
        {"experts": 1, "top_k": 2},
    ],
    ids=str,
)
def test_every_start_is_right(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates of a search's first round, in every storage, against the reference. Sizes are tiny: this is slow."""
    from moefuse.kernels.triton.tune import call as calls

    monkeypatch.setattr(calls, "SETS", ((1 << 30, 1),))
    small = problem(**{"tokens": 4, "hidden": 10, "inter": 6, "out": 7, **more})
    found = search(small, lambda calls, good, config: 1.0, biases=(True, True, True))
    outcome = found.run(rounds=0)
    assert outcome.failed == {}
    assert found.times
    for config in list(found.times):
        found.times = {config: 1.0}
        assert found._right() == config


def test_the_problem_of_a_call_is_the_plans() -> None:
    """The gate and the tuner name a problem from tensors, the plan from its operands; a choice must mean the same to both."""
    from moefuse.kernels.triton.host import plan as plans
    from moefuse.tuning.problem import Config, Vectors, problem_of

    seen: list[Any] = []
    for storage in ({}, {"transposed": True}, {"separate": True}):
        case = Case(tokens=3, hidden=24, inter=20, hidden_out=17, dtype=torch.float32, **storage)
        x, ids, weights, *lists = case.args()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "choose", lambda p, *rest: seen.append(p) or Config(0, Vectors(), Vectors()))
            plans.Plan(case.call([x, ids, weights, *lists]))
        assert seen[-1] == problem_of(x, ids, lists[0], lists[2], "merged")
    assert len(set(seen)) == 3


# moefuse.warmup --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Any]:
    """Measuring in the interpreter: a clock that ticks once per look, times that prefer tiles of 64 features, no compiler."""
    import contextlib
    import itertools

    from moefuse.kernels.triton.tune import call as calls
    from moefuse.kernels.triton.tune.compiling import nothing
    from moefuse.tuning import sites
    from moefuse.tuning.measure.warmup import Tools

    monkeypatch.setenv("MOEFUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MOEFUSE_AUTOTUNE")
    monkeypatch.setattr(calls, "SETS", ((1 << 30, 1),))
    monkeypatch.setattr(sites, "DEVICES", {"cpu"})
    sites.clear()
    ticks = itertools.count()

    def timer(run: Sequence[Any], good: float, config: Any) -> float:
        return 50.0 + abs(config.up.bn - 64) + (0.0 if config.bm == 16 else 50.0)

    yield Tools(timer, lambda: contextlib.nullcontext(nothing), lambda before, after: (30.0, 60.0), lambda: float(next(ticks)), "eager")
    sites.clear()


SPEC = {"num_experts": 3, "top_k": 2, "hidden": 10, "intermediate": 6, "dtype": "float32", "activation": "silu", "hidden_out": 7}


@pytest.mark.usefixtures("nothing_runs")
def test_warmup_with_specs(tools: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Measured once per bucket, kept, and taken by the next plan; equal specs are one."""
    import moefuse
    from moefuse.kernels.triton.config import choose, shipped
    from moefuse.tuning import store
    from moefuse.tuning.measure import warmup

    spec = moefuse.ExpertsSpec(**SPEC)  # type: ignore[arg-type]
    report = warmup.run([spec, spec], [20, 17, 1], 1e6, False, tools)
    assert [(t.tokens, t.asked) for t in report.tuned] == [(1, (1,)), (20, (17, 20))]
    assert [t.name for t in report.measured] == ["spec 0, spec 1"] * 2
    last = report.tuned[-1]
    assert last.us == 50.0 < last.before_us
    assert last.config["bm"] == 16
    assert last.config["up"]["bn"] == 64
    assert report.path == str(store.path_of("interpreter"))
    p = problem(tokens=18, hidden=10, inter=6, out=7)
    how = ("interpreter", False, 99 << 10, 4)
    assert choose(p, *how).to_json() == last.config != shipped(p, *how).to_json()
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("nothing_runs")
def test_a_budget_is_shared(tools: Any) -> None:
    """However little there is, every number of tokens is measured as it runs now."""
    import moefuse
    from moefuse.tuning.measure import warmup

    spec = moefuse.ExpertsSpec(**SPEC)  # type: ignore[arg-type]
    report = warmup.run(spec, [1, 4, 16, 64], 2.0, False, tools)
    assert [t.tokens for t in report.measured] == [1, 4, 16, 64]
    assert all(t.tried <= 2 for t in report.tuned)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("installed", [True, False])
def test_progress(tools: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    """On stderr: a bar, or lines where tqdm is not installed."""
    import sys

    import moefuse
    from moefuse.tuning.measure import warmup

    if not installed:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    warmup.run(moefuse.ExpertsSpec(**SPEC), [1, 20], 1e6, True, tools)  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert out == ""
    lines = ["moefuse.warmup: 1 of 2: T=1 spec 0", "moefuse.warmup: 2 of 2: T=20 spec 0"]
    assert ("2/2" in err) if installed else (err.splitlines() == lines)


def test_warmup_with_a_model(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the compiled model to another decision at its next compilation: real kernels, its own weights, its own program."""
    from moefuse.kernels.triton.provide import experts as provider
    from moefuse.kernels.triton.tune import candidates
    from moefuse.passes.lower import cost_gate
    from moefuse.runtime import native, providers
    from moefuse.tuning.measure import warmup
    from tests.cpu.test_cost_gate import H, Layer, T, run

    # The interpreter takes half a minute for all candidates; the search has tests of its own.
    monkeypatch.setattr(candidates, "starts", lambda p, device, current, specialised: [current])
    monkeypatch.setattr(candidates, "neighbours", lambda part: [])
    native.configure(False)
    monkeypatch.setattr(cost_gate, "device_name", lambda device: "interpreter")
    providers.register("experts", providers.Provider("triton", provider.supports, provider.experts))
    try:
        model, x = Layer(), torch.randn(T, H)
        assert len(run(model, x, verify="off").fused) == 1
        forgotten: list[int] = []
        monkeypatch.setattr(providers, "forget_records", lambda: forgotten.append(1))
        report = warmup.run(model, [T], 1e6, False, dataclasses.replace(tools, clock=lambda: 0.0))
        assert forgotten
        (row,) = report.measured
        ((program, times),) = row.programs.items()
        assert times == (30.0, 60.0)
        assert program.startswith("selected:")
        assert "stays as it is from the next compilation on" in str(report)
        torch._dynamo.reset()
        assert [s.code for s in run(model, x, verify="off").skipped] == ["not-faster"]
        torch._dynamo.reset()
        assert len(run(model, x, verify="off", cost_gate=False).fused) == 1
    finally:
        providers.unregister("experts", "triton")
        providers.PROVIDERS["experts"][:0] = [p for p in providers._on_cuda() if p.name == "triton"]
        native.configure(True)
        torch._dynamo.reset()


@pytest.mark.parametrize("quick", ["all", "down", None])
def test_products_by_the_library(tools: Any, monkeypatch: pytest.MonkeyPatch, quick: str | None) -> None:
    """Its forms are measured beside our own kernels; the quickest is what the next call takes."""
    import moefuse
    from moefuse.kernels.triton.provide import experts as provider, library as grouped_mm
    from moefuse.kernels.triton.tune import candidates
    from moefuse.kernels.triton.tune.call import Kind, make
    from moefuse.tuning.measure import warmup
    from moefuse.tuning.problem import Config, Tiles

    monkeypatch.setattr(grouped_mm, "DEVICES", ("cpu",))
    monkeypatch.setattr(grouped_mm, "DTYPES", (torch.float32,))
    monkeypatch.setattr(candidates, "starts", lambda p, d, current, specialised: [Config(16, Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1))])
    monkeypatch.setattr(candidates, "neighbours", lambda part: [])
    times = {"all": 5.0, "down": 5.0} | ({quick: 2.0} if quick else {})

    def timer(run: Sequence[Any], good: float, what: Any) -> float:
        return times[what] if isinstance(what, str) else 3.0 if what.bm else 4.0

    spec = moefuse.ExpertsSpec(**{**SPEC, "hidden": 12, "intermediate": 8, "hidden_out": 8})  # type: ignore[arg-type]
    (row,) = warmup.run(spec, [6], 1e6, False, dataclasses.replace(tools, timer=timer)).measured
    assert (row.us, row.library) == ((2.0, quick) if quick else (3.0, ""))
    call = make(problem(tokens=6, hidden=12, inter=8, out=8), Kind(), "cpu")
    provider.experts(call.calls[0])
    assert type(provider.plan_of(call.calls[0])).__name__ == ("LibraryPlan" if quick else "Plan")


@pytest.mark.usefixtures("nothing_runs")
def test_every_number_of_tokens_has_its_program(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that was compiled for two fixed numbers of tokens has two programs of one name, and none for a third."""
    from moefuse.kernels.triton.tune import candidates
    from moefuse.tuning.measure import warmup
    from tests.cpu.test_cost_gate import H, Layer, run

    monkeypatch.setattr(candidates, "neighbours", lambda part: [])
    model = Layer()
    for tokens in (4, 20):
        run(model, torch.randn(tokens, H), dynamic=False)
    report = warmup.run(model, [4, 20, 100], 1e6, False, dataclasses.replace(tools, clock=lambda: 0.0))
    assert [len(t.programs) for t in report.tuned] == [1, 1, 0]
    assert [t.not_compared for t in report.tuned[:2]] == [(), ()]
    (why,) = report.tuned[2].not_compared
    assert why == "it was compiled for 20 tokens, which cannot be 100"


def test_a_device_out_of_memory(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import moefuse
    from moefuse.kernels.triton.tune import call as calls
    from moefuse.tuning.measure import warmup

    def weights_of(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(calls, "weights_of", weights_of)
    report = warmup.run(moefuse.ExpertsSpec(**SPEC), [4], 1e6, False, tools)  # type: ignore[arg-type]
    assert [t.problem for t in report.tuned] == ["not enough memory on the device"]
    assert report.measured == []
    assert json.loads(report.to_json())["tuned"][0]["us"] is None


def test_a_folder_that_cannot_be_written(tools: Any, monkeypatch: pytest.MonkeyPatch, nothing_runs: None) -> None:
    import moefuse
    from moefuse.tuning import store
    from moefuse.tuning.measure import warmup

    def save(*_: Any) -> Any:
        raise PermissionError("read-only")

    monkeypatch.setattr(store, "save", save)
    report = warmup.run(moefuse.ExpertsSpec(**SPEC), [4], 1e6, False, tools)  # type: ignore[arg-type]
    assert len(report.measured) == 1
    assert report.notes == ["measurements could not be kept: read-only"]
