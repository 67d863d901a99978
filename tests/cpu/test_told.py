"""Reports are true of the latest call: what is no longer fused is told in that call, and what is fused is not denied."""

from __future__ import annotations

import linecache
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from moefuse.pipeline import publish
from moefuse.program import called
from moefuse.report import history
from tests.cpu.test_left_frames import E, Expert, H, K, Layer, X
from tests.programs.effects import changes
from tests.programs.effects.broken import put_back

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is given once in a process."""
    monkeypatch.setattr(publish, "_warned", set())


def report() -> moefuse.FusionReport:
    found = moefuse.last_report()
    assert found is not None
    return found


def told() -> list[tuple[str, str]]:
    return [(s.code, s.module) for s in report().skipped]


def runs(call: Any, *args: Any) -> int:
    """How many ops with experts a call runs."""
    with torch.profiler.profile() as profile:
        call(*args)
    return sum(e.count for e in profile.key_averages() if e.key == "moefuse::experts")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "moefuse.backend" and record.levelno >= logging.WARNING]


class Balancing(Layer):
    """A bias is updated between the experts, in training only, by comparing numbers: Dynamo leaves all of it then."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (self.router(x) + self.bias).softmax(-1).topk(K)
        out, usage = torch.zeros_like(x), torch.zeros(E)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            usage[e] = (ids == e).sum().float()
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            if self.training:
                with torch.no_grad():
                    if usage[e] > usage.mean():
                        self.bias[e] -= 0.001
        return out


def balancing(**options: Any) -> tuple[Balancing, Any]:
    """A layer that is fused in evaluation, about to be trained."""
    layer = Balancing().eval()
    compiled = torch.compile(layer, backend="moefuse", options=options)
    with torch.no_grad():
        compiled(X)
    assert (report().layers, told()) == ((1, 1), [])
    return layer, compiled


def test_what_training_runs_in_eager_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """The report went on to say that the layer is fused, as it is in evaluation, and nothing was logged."""
    layer, compiled = balancing()
    layer.train()
    with caplog.at_level(logging.WARNING, "moefuse.backend"):
        compiled(X)
    assert (report().layers, told()) == ((0, 1), [("nothing-found", "")])
    (text,) = warnings(caplog)
    assert "fused in another call" in text
    assert "for this one, Dynamo left the graph" in text
    assert runs(compiled, X) == 0
    assert report().layers == (0, 1)


def test_evaluation_again_is_fused_and_said_so() -> None:
    layer, compiled = balancing()
    for _ in range(2):
        layer.train()
        compiled(X)
        assert (report().layers, len(told())) == ((0, 1), 1)
        layer.eval()
        with torch.no_grad():
            assert runs(compiled, X) == 1
        assert report().layers == (1, 1)


@pytest.mark.parametrize("options", [{"strict": True}, {"expect": 1}])
def test_what_training_runs_in_eager_is_an_error(options: dict[str, Any]) -> None:
    """In each call, and behind calls that are fused."""
    layer, compiled = balancing(**options)
    for _ in range(2):
        layer.train()
        with pytest.raises(moefuse.FusionError, match="fused in another call"):
            compiled(X)
        layer.eval()
        with torch.no_grad():
            compiled(X)


@pytest.mark.parametrize("name", changes.SHOWN)
def test_a_fault_is_seen(name: str) -> None:
    """A program that shows it, wrong with the fault and right without."""
    with put_back(changes.FAULTS[name]):
        assert changes.wrong(changes.SHOWN[name])
    assert changes.wrong(changes.SHOWN[name]) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, 3, 7])
def test_changes_between_calls(seed: int) -> None:
    """Drawn ones: what the report says is what ran. benchmarks/fault_injection.py looks at many."""
    p = changes.draw(seed)
    assert changes.wrong(p) == [], p


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(E, 6, H)), nn.Parameter(torch.randn(E, H, 6))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        hidden = F.silu(torch.einsum("th,tkih->tki", x, self.up[ids]))
        return (torch.einsum("tki,tkhi->tkh", hidden, self.down[ids]) * weights[..., None]).sum(1)


class Stack(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = x + layer(x)
        return x


@pytest.fixture
def offloaded() -> Iterator[Any]:
    """Weights are elsewhere between calls, and other Parameters in a call, some with the identity of one that is gone; Dynamo does not
    trace who does that."""

    def brought(value: Tensor) -> nn.Parameter:
        return nn.Parameter(value, requires_grad=False)

    def offload(model: nn.Module) -> None:
        kept = {m: {n: p.detach().clone() for n, p in m.named_parameters(recurse=False)} for m in model.modules() if m._parameters}

        @torch.compiler.disable
        def bring(module: nn.Module, _args: Any) -> None:
            for name, value in kept[module].items():
                module._parameters[name] = brought(value.clone())

        @torch.compiler.disable
        def take(module: nn.Module, _args: Any, _out: Any) -> None:
            for name, value in kept[module].items():
                module._parameters[name] = brought(torch.empty_like(value, device="meta"))

        for module in kept:
            module.register_forward_pre_hook(bring)
            module.register_forward_hook(take)
            take(module, None, None)

    with torch._dynamo.config.patch(recompile_limit=64):
        yield offload


@pytest.mark.parametrize("strict", [False, True])
def test_weights_that_are_brought_for_a_call(offloaded: Any, strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The second layer runs the first one's graph, with Parameters that nobody has seen before or will again."""
    model = Stack(Stacked(), Stacked()).eval()
    with torch.no_grad():
        expected = model(X)
        offloaded(model)
        compiled = torch.compile(model, backend="moefuse", options={"strict": strict})
        torch.testing.assert_close(compiled(X), expected)
        assert runs(compiled, X) == 2
    assert (report().layers, told(), warnings(caplog)) == ((2, 2), [], [])


def test_weights_that_are_erased_behind_the_compilation() -> None:
    """As Inductor's freezing does: a call begins with other Parameters than it ends with."""
    layer = Stacked().eval()
    with torch.no_grad():
        compiled = torch.compile(layer, backend="moefuse", options={"strict": True})

        def erase(*_: Any) -> None:
            for name in ("up", "down"):
                setattr(layer, name, nn.Parameter(torch.empty_like(getattr(layer, name)), requires_grad=False))

        layer.register_forward_hook(torch.compiler.disable(erase))
        compiled(X)
    assert (report().layers, told()) == ((1, 1), [])


def test_the_limit_of_graphs_is_the_cause() -> None:
    """Modules that are called through one function are as many graphs of its code."""

    class Called(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = through(layer, x)
            return x

    def through(layer: nn.Module, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        out: Tensor = layer(x)
        return out

    others = (nn.LayerNorm(H), nn.Tanh(), nn.SiLU(), nn.ReLU())
    compiled = torch.compile(Called(*others, Layer()), backend="moefuse")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        assert runs(compiled, X) == 0
    (skipped,) = report().skipped
    assert (skipped.code, skipped.module) == ("nothing-found", "layers.4")
    assert "torch._dynamo.config.recompile_limit" in skipped.message


def test_the_limit_of_graphs_counts_no_further_layer() -> None:
    class Two(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    compiled = torch.compile(Two(Layer(), Layer()), backend="moefuse")
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        compiled(X[:1])
        assert report().layers == (2, 2)
        compiled(X)
        assert (report().layers, told()) == ((0, 2), [("nothing-found", "layers.0"), ("nothing-found", "layers.1")])
        assert runs(compiled, X[:1]) == 2
        assert report().layers == (2, 2)


def observed(layer: Layer) -> list[Any]:
    sums: dict[int, Any] = {}

    def hook(e: int) -> Any:
        return lambda _m, _i, out: sums.__setitem__(e, sums.get(e, 0) + out.detach().norm(dim=-1).sum())

    return [expert.register_forward_hook(hook(e)) for e, expert in enumerate(layer.experts)]


@pytest.mark.parametrize("grad", [False, True])
def test_a_refusal_ends_with_its_hooks(grad: bool) -> None:
    """The layer stayed in eager for good, and the report named a line of a hook that was gone. The cause is the hook."""
    layer = Layer()
    compiled = torch.compile(layer, backend="moefuse")
    hooks = observed(layer)
    with torch.set_grad_enabled(grad):
        for _ in range(2):
            compiled(X)
            (skipped,) = report().skipped
            assert skipped.code == "value-escapes"
            path, _, line = skipped.location.rpartition(":")
            assert "lambda" in linecache.getline(path, int(line))
            assert report().layers == (0, 1)
            for hook in hooks:
                hook.remove()
            compiled(X)
            assert runs(compiled, X) == 1
            assert (report().layers, told()) == ((1, 1), [])
            hooks = observed(layer)


def test_a_refusal_ends_with_its_experts() -> None:
    """A list that is pruned has other experts."""

    class Doubling(Expert):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * torch.rand_like(x)

    layer = Layer()
    layer.experts.append(Doubling())
    layer.router = nn.Linear(H, E + 1, bias=False)
    compiled = torch.compile(layer, backend="moefuse")
    with torch.no_grad():
        compiled(X)
        assert report().layers == (0, 1)
        layer.experts = layer.experts[:E]
        layer.router = nn.Linear(H, E, bias=False)
        compiled(X)
        assert runs(compiled, X) == 1
    assert (report().layers, told()) == ((1, 1), [])


def test_hooks_that_come_and_go_are_tried_a_few_times() -> None:
    from torch._dynamo.utils import counters

    layer = Layer()
    compiled = torch.compile(layer, backend="moefuse")
    with torch.no_grad():
        for number in range(3):
            hooks = observed(layer)
            compiled(X)
            if number == 1:
                frames = counters["frames"]["total"]
            for hook in hooks:
                hook.remove()
            compiled(X)
    assert counters["frames"]["total"] <= frames + 1


def test_layers_that_are_compiled_one_by_one() -> None:
    layers = [Layer(), changes.Noisy(), Stacked()]
    for layer in layers:
        layer.compile(backend="moefuse")
    with torch.no_grad():
        for layer in layers:
            layer(X)
    found = moefuse.reports()
    assert [r.layers for r in found] == [(1, 1), (0, 1), (1, 1)]
    assert found.layers == (2, 3)
    assert str(found).startswith("moefuse: fused 2 of 3 MoE layers in 3 compiled functions\n")
    assert "random" in str(found)
    torch.compiler.reset()
    assert moefuse.reports() == ()
    with torch.no_grad():
        layers[0](X)
    assert [r.layers for r in moefuse.reports()] == [(1, 1)]


def test_reports_go_with_their_modules() -> None:
    layer = Layer()
    layer.compile(backend="moefuse")
    layer(X)
    assert len(moefuse.reports()) == 1
    del layer
    torch.compiler.reset()
    assert len(moefuse.reports()) == 0


@pytest.mark.every_value
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"expect": 1}, {"strict": True, "expect": 1}])
@pytest.mark.parametrize("by", ["environment", "option"])
def test_switched_off_is_said(options: dict[str, Any], by: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report was that of an earlier compilation, and ``strict`` and ``expect`` were content."""
    torch.compile(Layer(), backend="moefuse")(X)
    assert report().fused
    torch.compiler.reset()
    if by == "environment":
        monkeypatch.setenv("MOEFUSE_DISABLE", "1")
    else:
        options = {**options, "enabled": False}
    with caplog.at_level(logging.WARNING, "moefuse.backend"):
        torch.compile(Layer(), backend="moefuse", options=options)(X)
    found, name = report(), "MOEFUSE_DISABLE=1" if by == "environment" else "options={'enabled': False}"
    assert (found.fused, found.skipped) == ([], [])
    assert str(found).startswith(f"moefuse: disabled by {name}: graphs go to Inductor as they are")
    asked = [name for name in ("strict", "expect") if name in options]
    expected = [f"moefuse is disabled by {name}: nothing is fused, and there are no errors of {' and '.join(asked)}"] if asked else []
    assert warnings(caplog) == expected


def test_a_break_that_a_refusal_brings_is_part_of_it() -> None:
    """One layer, one line: the innocent ``where`` is not blamed beside it."""
    layer = Layer()
    observed(layer)
    text = str(moefuse.explain(layer, X))
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["skipped"]
    assert "1 graph break" in text


def test_an_experts_implementation_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """There was no report of what runs moefuse's op in eager."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(called, "_modules", weakref.WeakKeyDictionary())
    monkeypatch.setattr(history, "_compilations", None)
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        vocab_size=17, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="moefuse").eval()
    assert moefuse.last_report() is None
    with torch.no_grad():
        model(input_ids=torch.tensor([[3, 4, 5]]))
    text = str(report())
    assert "Qwen3MoeExperts (2 modules) runs moefuse::experts on cpu, outside of torch.compile" in text
