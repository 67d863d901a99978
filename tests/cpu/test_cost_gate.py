"""Regions taken out of their graph, what warmup remembers of them, and the gate that measurements decide."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from moefuse import Options, cache
from moefuse.machine import cache_folder
from moefuse.passes.lower import cost_gate
from moefuse.passes.lower.program import NotComparableError
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport
from moefuse.tuning import sites, store
from moefuse.tuning.entries import Entry, Pair
from moefuse.tuning.measure import compare
from moefuse.tuning.problem import Config, Vectors

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")

T, H, I, E, K = 10, 8, 12, 4, 2  # noqa: E741


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The CPU as a device with something to tune, and a cache folder of its own."""
    monkeypatch.setattr(sites, "DEVICES", {"cpu"})
    monkeypatch.setattr(cost_gate, "device_name", lambda device: "a device")
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.delenv(store.SWITCH)
    sites.clear()
    yield
    sites.clear()


class Layer(nn.Module):
    """A loop over experts; ``transposed``: in-out storage, ``residual``: the sum begins at another value."""

    def __init__(self, transposed: bool = False, residual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transposed, self.residual = transposed, residual
        self.gate = nn.Linear(H, E, bias=False)
        shapes = ((E, H, 2 * I), (E, I, H)) if transposed else ((E, 2 * I, H), (E, H, I))
        self.w_in, self.w_out = (nn.Parameter(torch.randn(s) * 0.3) for s in shapes)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w if self.transposed else F.linear(x, w)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        out = torch.tanh(x) if self.residual else torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            a, b = self.product(x[tok], self.w_in[e]).chunk(2, dim=-1)
            out.index_add_(0, tok, self.product(F.silu(a) * b, self.w_out[e]) * weights[tok, slot, None])
        return out


def run(model: nn.Module, x: Tensor, dynamic: bool | None = None, **options: Any) -> FusionReport:
    """Compile, run and check one call."""
    report = FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options(**options)))
        return gm.forward

    with torch.no_grad():
        got = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x)
        torch.testing.assert_close(got, model(x))
    return report


def only_site() -> sites.Site:
    (site,) = sites.of(None)
    return site


def ran(before: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float]:
    """A timer that compares the two results instead."""
    torch.testing.assert_close(before(), after(), rtol=1e-4, atol=1e-5)
    return 2.0, 1.0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_before_and_after_compute_the_same(transposed: bool, residual: bool) -> None:
    """Taken out of the graph, on the model's own weights and random tokens, in both storages."""
    model = Layer(transposed, residual)
    assert len(run(model, torch.randn(T, H)).fused) == 1
    site = only_site()
    inputs = compare.inputs(site.program, T)
    graphs = zip((site.program.before, site.program.after), site.program.reads, strict=True)
    # A sum that begins at another value is made in place there.
    before, after = (gm(*(inputs[i].clone() for i in reads)) for gm, reads in graphs)
    torch.testing.assert_close(before, after)
    assert sum(t is not None and t.data_ptr() == model.w_in.data_ptr() for t in inputs if isinstance(t, Tensor)) == 1


def test_a_program_for_any_number_of_tokens_runs_with_another() -> None:
    model = Layer()
    run(model, torch.randn(T, H), dynamic=True)
    program = only_site().program
    for tokens in (T, 3, 64):
        assert compare.compare(program, tokens, ran, backend="eager").tokens == tokens


def test_a_program_for_one_number_of_tokens_says_so() -> None:
    model = Layer()
    run(model, torch.randn(T, H), dynamic=False)
    with pytest.raises(NotComparableError, match="it was compiled for 10 tokens, which cannot be 11"):
        compare.inputs(only_site().program, 11)


def test_what_is_remembered() -> None:
    model = Layer(transposed=True)
    run(model, torch.randn(T, H))
    run(model, torch.randn(T, H))
    site = only_site()
    assert (site.problem.tokens, site.problem.top_k, site.problem.experts) == (T, K, E)
    assert (site.problem.hidden, site.problem.inter, site.problem.out) == (H, I, H)
    assert (site.problem.transposed_in, site.problem.transposed_out, site.problem.separate) == (True, True, False)
    assert (site.spec.hidden_out, site.trained, site.biases) == (H, False, (False, False, False))
    tensors = site.tensors()
    assert tensors is not None
    assert torch.equal(tensors[0][0], model.w_in.detach().transpose(1, 2))
    assert sites.of(list(model.parameters())) == [site]
    assert sites.of(list(Layer().parameters())) == []


def test_nothing_is_kept_alive() -> None:
    model = Layer()
    run(model, torch.randn(T, H))
    site = only_site()
    torch._dynamo.reset()
    del model
    gc.collect()
    assert site.tensors() is None
    assert sites.of(None) == []
    # Its program still runs, on weights that are made up.
    assert compare.compare(site.program, T, ran, backend="eager") == Pair(2.0, 1.0, T)


def test_weights_are_those_of_now() -> None:
    """A view is made when it is asked for: of the values of that moment, and none if the owner was moved."""
    model = Layer()
    run(model, torch.randn(T, H))
    site = only_site()
    with torch.no_grad():
        model.w_in.mul_(2)
    tensors = site.tensors()
    assert tensors is not None
    assert torch.equal(tensors[0][0], model.w_in)
    model.w_in.data = model.w_in.data.double()
    assert site.tensors() is None


@pytest.mark.thorough
@pytest.mark.parametrize("choice", ["grouped_mm", "batched_mm"])
def test_programs_of_transformers(choice: str) -> None:
    """They run by themselves, compute what replaces them, and have one name, whether compiled for one number of tokens or for any."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.moe")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = transformers.Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
    config._experts_implementation = choice
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).to(torch.bfloat16).eval()
    for p in block.parameters():
        torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)

    def close(before: Callable[[], Any], after: Callable[[], Any]) -> tuple[float, float]:
        # Neither is exact: each is a rounding of bfloat16 from float64, here and in the row between the two products.
        ours, theirs = after().double(), before().double()
        assert float((ours - theirs).abs().max()) <= 2 * torch.finfo(torch.bfloat16).eps * float(theirs.abs().max())
        return 2.0, 1.0

    names = set()
    for dynamic in (False, True):
        torch._dynamo.reset()
        sites.clear()
        with torch.no_grad():
            torch.compile(block, backend="moefuse", dynamic=dynamic)(torch.randn(1, 16, 64, dtype=torch.bfloat16))
        (site,) = sites.of(list(block.parameters()))
        assert site.tensors() is not None
        names.add(site.program.name)
        for tokens in (16, 5) if dynamic else (16,):
            assert compare.compare(site.program, tokens, close, backend="eager") == Pair(2.0, 1.0, tokens)
    assert len(names) == 1


def test_equal_layers_share_one_program() -> None:
    """A graph of many experts is large; the weights of each layer are its own."""
    model = nn.Sequential(Layer(), nn.LayerNorm(H), Layer(), nn.LayerNorm(H), Layer(transposed=True))
    run(model, torch.randn(T, H))
    first, second, third = (s.program for s in sites.of(None))
    assert first is second is not third
    assert len({frozenset(s.owners()) for s in sites.of(None)}) == 3
    assert len(sites.of([model[2].w_in])) == 1


def test_a_failure_here_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.passes.lower import record

    def take_out(*_: Any) -> Any:
        raise KeyError("a bug")

    monkeypatch.setattr(record, "take_out", take_out)
    model = Layer()
    assert len(run(model, torch.randn(T, H)).fused) == 1
    assert sites.of(None) == []


def test_a_loop_that_depends_on_data_is_no_program() -> None:
    """What capture traced for one expert stands for all of them: that graph cannot be run by itself."""

    class Loop(Layer):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
            out = torch.zeros_like(x)
            mask = F.one_hot(ids, E).permute(2, 1, 0)
            for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
                slot, tok = torch.where(mask[e[0]])
                a, b = F.linear(x[tok], self.w_in[e[0]]).chunk(2, dim=-1)
                out.index_add_(0, tok, F.linear(F.silu(a) * b, self.w_out[e[0]]) * weights[tok, slot, None])
            return out

    model = Loop()
    with torch.no_grad():
        torch.compile(model, backend="moefuse", fullgraph=True)(torch.randn(T, H))
    assert only_site().program == "the loop depends on data: its graph is not a program that runs by itself"


def test_weights_that_the_graph_computes() -> None:
    """They are no operand of the user's, but say whose layer it is; measuring makes its own."""

    class Scaled(Layer):
        def product(self, x: Tensor, w: Tensor) -> Tensor:
            return F.linear(x, w)

        def forward(self, x: Tensor) -> Tensor:
            weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
            w_in, w_out = self.w_in * 2, self.w_out * 2
            out = torch.zeros_like(x)
            for e in range(E):
                tok, slot = torch.where(ids == e)
                a, b = F.linear(x[tok], w_in[e]).chunk(2, dim=-1)
                out.index_add_(0, tok, F.linear(F.silu(a) * b, w_out[e]) * weights[tok, slot, None])
            return out

    model = Scaled()
    report = run(model, torch.randn(T, H))
    assert len(report.fused) == 1, str(report)
    site = only_site()
    assert site.lists is None
    assert site.tensors() is None
    assert sites.of([model.w_in]) == [site]
    assert compare.compare(site.program, T, ran, backend="eager") == Pair(2.0, 1.0, T)


def test_a_gradient_is_noted() -> None:
    report = FusionReport()

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options()))
        return gm.forward

    model = Layer()
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(T, H))
    assert only_site().trained


# The gate --------------------------------------------------------------------------------------------------------------------------------


def measured(model: nn.Module, tokens: int, program_us: float, fused_us: float, dynamic: bool | None = None) -> str:
    """Put a measurement of the model's program into the store; the program's name."""
    run(model, torch.randn(tokens, H), dynamic)
    site = only_site()
    name: str = site.program.name
    entry = Entry(site.problem, Config(0, Vectors(), Vectors()), fused_us, {}, {name: Pair(program_us, fused_us, tokens)}, 1)
    store.save("a device", [entry])
    torch._dynamo.reset()
    return name


@pytest.mark.parametrize(("program_us", "fused_us", "fused"), [(20.0, 30.0, 0), (30.0, 20.0, 1), (20.0, 20.0, 0)])
def test_the_faster_one_stays(program_us: float, fused_us: float, fused: int) -> None:
    model = Layer()
    measured(model, T, program_us, fused_us)
    report = run(model, torch.randn(T, H))
    assert len(report.fused) == fused
    if not fused:
        (skipped,) = report.skipped
        assert skipped.code == "not-faster"
        assert skipped.message == (
            f"20.0 us as it is and {fused_us} us as the fused op for 10 tokens on a device (measured here by moefuse.warmup)"
        )


def test_other_numbers_of_tokens_are_other_questions() -> None:
    """5 and 8 rows per expert share a bucket, 32 do not."""
    model = Layer()
    measured(model, T, 20.0, 30.0)
    assert [len(run(model, torch.randn(n, H), dynamic=False).fused) for n in (16, 9, 8, 64)] == [0, 0, 1, 1]


def test_the_hint_decides_for_all_numbers_of_tokens() -> None:
    model = Layer()
    measured(model, T, 20.0, 30.0, dynamic=True)
    assert run(model, torch.randn(T, H), dynamic=True).skipped[0].code == "not-faster"
    torch._dynamo.reset()
    assert len(run(model, torch.randn(64, H), dynamic=True).fused) == 1


def test_another_spelling_is_another_program() -> None:
    """The same layer with its sum begun elsewhere was not measured."""
    measured(Layer(), T, 20.0, 30.0)
    assert len(run(Layer(residual=True), torch.randn(T, H)).fused) == 1


def test_the_option_and_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layer()
    measured(model, T, 20.0, 30.0)
    assert len(run(model, torch.randn(T, H), cost_gate=False).fused) == 1
    torch._dynamo.reset()
    monkeypatch.setenv(store.SWITCH, "0")
    assert len(run(model, torch.randn(T, H)).fused) == 1


@pytest.mark.usefixtures("no_code")
def test_no_error_under_strict() -> None:
    """A measurement is no defect of the program."""
    model = Layer()
    measured(model, T, 20.0, 30.0)
    with torch.no_grad():
        torch.compile(model, backend="moefuse", fullgraph=True, options={"strict": True})(torch.randn(T, H))
    report = moefuse.last_report()
    assert report is not None
    assert [s.code for s in report.skipped] == ["not-faster"]


def test_a_table_speaks_of_grouped_products_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layer()
    run(model, torch.randn(T, H))
    site = only_site()
    monkeypatch.setattr(cost_gate, "table_times", lambda device: ((dataclasses.replace(site.problem, tokens=16), 30.0, 20.0),))
    found = cost_gate.measurement("a device", site.problem, site.program.name, grouped=True)
    assert found == (Pair(20.0, 30.0, 16), "measured for the configurations that ship with moefuse")
    assert cost_gate.measurement("a device", site.problem, site.program.name, grouped=False) is None
    assert cost_gate.measurement("a device", dataclasses.replace(site.problem, tokens=64), site.program.name, grouped=True) is None
    # What was measured here is asked first.
    store.save("a device", [Entry(site.problem, Config(0, Vectors(), Vectors()), 1.0, {}, {site.program.name: Pair(2.0, 1.0, T)}, 1)])
    mine = cost_gate.measurement("a device", site.problem, site.program.name, grouped=True)
    assert mine == (Pair(2.0, 1.0, T), "measured here by moefuse.warmup")


def test_the_cache_key_follows_the_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's cache may hold what was compiled before a measurement: it is served only while the gate decides as it did then."""
    monkeypatch.setattr(cache, "devices", lambda: ["a device"])
    model = Layer()
    keys = [cache.key(Options())]
    measured(model, T, 30.0, 20.0)
    assert cache.key(Options()) == keys[0]
    measured_again = Entry(only_site().problem, Config(0, Vectors(), Vectors()), 1.0, {}, {only_site().program.name: Pair(2.0, 3.0, T)}, 2)
    store.save("a device", [measured_again])
    assert cache.key(Options()) != keys[0]
    # With the gate off, nothing that was measured matters.
    off = Options(cost_gate=False)
    with_measurement = cache.key(off)
    monkeypatch.setenv(store.SWITCH, "0")
    assert cache.key(off) == with_measurement
    assert cache.key(Options()) == keys[0]
