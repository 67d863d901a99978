"""explain: what it finds, also under a compilation and where Dynamo gives up, and that it leaves no trace."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import moefuse
from moefuse.report.entries import Fused
from moefuse.spec import ExpertsSpec
from tests.conftest import StubDriver

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

FUSED = Fused("mlp", "my.py:3", ExpertsSpec(8, 2, 64, 48, "float32", "silu"), "sorted", "fused", 0.5)


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(6, 6), torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.linear(x))


class Dense(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(x) * scale


class Breaks(Dense):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.inner(x)
        torch._dynamo.graph_break()
        return h * scale


class Branches(Dense):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        h = self.inner(x)
        if h.sum() > 0:
            h = h + 1
        return h * scale


class Loops(Dense):
    """Dynamo gives up on the second half altogether, and its own count of graph breaks does not show that."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        for row in (x[:, 0] > 0).nonzero():
            x = x * row[0].item()
        return x


def recording() -> tuple[list[torch.fx.GraphModule], Callable[..., Any]]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    return graphs, backend


def test_it_reports_what_the_passes_find(stub_driver: StubDriver) -> None:
    stub_driver.result.fused.append(FUSED)
    assert moefuse.explain(Dense(), torch.randn(3, 6), scale=2.0) == moefuse.FusionReport([FUSED], [], 1, [])
    with torch.no_grad():
        assert moefuse.explain(lambda x: x.sin(), torch.randn(3)).graph_count == 1


def test_graph_breaks_have_a_reason_and_a_place(stub_driver: StubDriver) -> None:
    report = moefuse.explain(Breaks(), torch.randn(3, 6))
    assert report.graph_count == 2
    (reason,) = report.graph_breaks
    assert f" at {__file__}:" in reason
    assert "moefuse only sees what Dynamo captured" in str(report)


def test_a_branch_on_data_is_named(stub_driver: StubDriver) -> None:
    (reason,) = moefuse.explain(Branches(), torch.randn(3, 6)).graph_breaks
    assert reason.startswith("Data-dependent branching at ")


def test_frames_that_dynamo_gives_up_are_counted(stub_driver: StubDriver) -> None:
    breaks = moefuse.explain(Loops(), torch.randn(30, 6)).graph_breaks
    assert any("forward" in reason and "runs in eager" in reason and f" at {__file__}:" in reason for reason in breaks), breaks


@pytest.mark.parametrize("how", ["torch.compile", "module.compile", "submodule.compile", "function"])
def test_it_looks_under_a_compilation(how: str, stub_driver: StubDriver) -> None:
    graphs, backend = recording()
    model: Any = Dense()
    call: Any = model
    if how == "torch.compile":
        call = torch.compile(model, backend=backend)
    elif how == "module.compile":
        model.compile(backend=backend)
    elif how == "submodule.compile":
        model.inner.compile(backend=backend)
    else:
        call = torch.compile(lambda x: model(x), backend=backend)
    x = torch.randn(3, 6)
    call(x)
    before = len(graphs)
    assert before == 1
    for _ in range(2):
        report = moefuse.explain(call, x)
        assert report.graph_count == 1
        assert report.graph_breaks == []
    assert len(stub_driver.calls) == 2
    call(x)
    assert len(graphs) == before, "what was compiled must still be there"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model", [Dense(), Breaks(), Branches(), Loops()], ids=lambda model: type(model).__name__)
def test_it_leaves_no_trace(model: torch.nn.Module, stub_driver: StubDriver) -> None:
    graphs, backend = recording()
    model, x = copy.deepcopy(model), torch.randn(3, 6)
    compiled = torch.compile(model, backend=backend)
    torch.manual_seed(0)  # dropout decides which way Branches goes
    compiled(x)
    compiled_before = len(graphs)
    counts = {name: dict(counter) for name, counter in counters.items()}
    reasons = len(torch._dynamo.utils.graph_break_reasons)
    metrics = len(torch._dynamo.utils.get_compilation_metrics())
    backends = set(torch._dynamo.eval_frame.cached_backends)
    state, last = torch.random.get_rng_state(), moefuse.last_report()
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}

    for tokens in (3, 5, 8):
        moefuse.explain(compiled, torch.randn(tokens, 6, generator=torch.Generator().manual_seed(0)))

    assert {name: dict(counter) for name, counter in counters.items()} == counts
    assert len(torch._dynamo.utils.graph_break_reasons) == reasons
    assert len(torch._dynamo.utils.get_compilation_metrics()) == metrics
    assert set(torch._dynamo.eval_frame.cached_backends) == backends
    assert torch.equal(torch.random.get_rng_state(), state)
    assert moefuse.last_report() == last
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == attributes
    torch.manual_seed(0)
    compiled(x)
    assert len(graphs) == compiled_before


@pytest.mark.skipif(
    "isolate_recompiles" not in inspect.signature(torch.compile).parameters,
    reason="this torch counts them together",
)
def test_it_does_not_use_up_the_users_recompilations(stub_driver: StubDriver) -> None:
    graphs, backend = recording()
    model = Dense()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    compiled(torch.randn(2, 6))
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        moefuse.explain(model, torch.randn(2, 6))
    for tokens in range(3, torch._dynamo.config.recompile_limit + 2):
        compiled(torch.randn(tokens, 6))
    assert len(graphs) == torch._dynamo.config.recompile_limit


def test_sizes_seen_by_explain_do_not_make_the_next_compilation_dynamic(stub_driver: StubDriver) -> None:
    graphs, backend = recording()
    model = Dense()
    moefuse.explain(model, torch.randn(3, 6))
    moefuse.explain(model, torch.randn(4, 6))
    torch.compile(model, backend=backend)(torch.randn(5, 6))
    (graph,) = graphs
    assert all(isinstance(size, int) for node in graph.graph.find_nodes(op="placeholder") for size in node.meta["example_value"].shape)


def test_state_comes_back_when_the_model_raises(stub_driver: StubDriver) -> None:
    _, backend = recording()
    model: Any = Dense()
    model.compile(backend=backend)
    call = model._compiled_call_impl
    with pytest.raises(RuntimeError, match="reduction dim"):
        moefuse.explain(model, torch.randn(3, 7))
    assert model._compiled_call_impl is call
    assert counters["frames"] == {}


def test_disable_and_strict_do_not_matter_to_a_question(stub_driver: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEFUSE_DISABLE", "1")
    monkeypatch.setenv("MOEFUSE_STRICT", "1")
    stub_driver.result.fused.append(FUSED)
    assert moefuse.explain(Dense(), torch.randn(3, 6)).fused == [FUSED]
