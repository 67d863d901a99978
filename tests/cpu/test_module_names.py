"""Layers have the names that ``named_modules()`` of the compiled model gives them, and each is counted once."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import moefuse
from moefuse.report import history

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

HIDDEN, EXPERTS = 8, 3


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4), nn.Linear(4, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))


class Noisy(Expert):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn_like(x)


class MoE(nn.Module):
    def __init__(self, expert: type[Expert] = Expert) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Layer(nn.Module):
    def __init__(self, expert: type[Expert] = Expert, breaks: bool = False) -> None:
        super().__init__()
        self.mlp, self.breaks = MoE(expert), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, count: int = 2, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(**options) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Wrapper(nn.Module):
    """As distributed wrappers do: the model is an attribute, and called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


class Adapter(Wrapper):
    """As adapter libraries do: the model is looked up in a dictionary."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.__dict__["_modules"]["module"].forward(x)


class Trainer:
    def __init__(self) -> None:
        self.model = Model()

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()


class Hidden(nn.Module):
    """Modules in a plain list are in no ``named_modules()``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Identity()
        self.body.stages = [Layer()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body.stages[0](x)


def tokens(count: int = 6) -> torch.Tensor:
    return torch.randn(count, HIDDEN)


def fused_names(function: Callable[..., Any], *args: Any) -> list[str]:
    compiled = torch.compile(function, backend="moefuse")
    with torch.no_grad():
        compiled(*args)
    report = moefuse.last_report()
    assert report is not None
    assert not report.skipped
    return [fused.module for fused in report.fused]


PLAIN = ["layers.0.mlp", "layers.1.mlp"]
MODEL = Model()

WAYS: dict[str, tuple[Callable[[], Callable[..., Any]], list[str]]] = {
    "module": (Model, PLAIN),
    "bound method": (lambda: Model().forward, PLAIN),
    "closure": (lambda: functools.partial(lambda model, x: model(x) + 1, Model()), PLAIN),
    "global": (lambda: lambda x: MODEL(x) + 1, PLAIN),
    "method of an object": (lambda: Trainer().step, PLAIN),
    "wrapper": (lambda: Wrapper(Model()), [f"module.{name}" for name in PLAIN]),
    "adapter": (lambda: Adapter(Wrapper(Model())), [f"module.module.{name}" for name in PLAIN]),
    "not registered": (Hidden, ["body.stages.0.mlp"]),
    "graph breaks": (lambda: Model(breaks=True), PLAIN),
    "adapter and graph breaks": (lambda: Adapter(Model(breaks=True)), [f"module.{name}" for name in PLAIN]),
    "the layer alone": (MoE, [""]),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_names_are_those_of_named_modules(way: str) -> None:
    make, expected = WAYS[way]
    assert fused_names(make(), tokens()) == expected


def test_two_models_in_one_function_keep_their_variables() -> None:
    actor, critic = Model(1), Model(1)
    assert fused_names(lambda x: actor(x) + critic(x), tokens()) == ["actor.layers.0.mlp", "critic.layers.0.mlp"]


def test_a_model_that_is_an_argument() -> None:
    assert fused_names(lambda model, x: model(x) + 1, Model(), tokens()) == PLAIN


def test_weights_say_whose_function_it_is() -> None:
    """The frame behind the break is that of a function, and has no module; its parameters have."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Parameter(torch.randn(shape)) for shape in ((3, 8), (3, 8, 4), (3, 4, 8)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _broken(x, self.gate, self.up, self.down)

    model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Functional())
    assert fused_names(model, tokens()) == ["1"]


def _broken(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    weights, ids = (x @ gate.t()).softmax(-1).topk(2)
    table = torch.zeros(len(x), 3).scatter(1, ids, weights)
    return torch.einsum("tei,eih,te->th", F.silu(torch.einsum("th,ehi->tei", x, up)), down, table)


def test_layers_that_share_one_code_are_all_counted() -> None:
    """Dynamo compiles the first layer's frame, and runs the others with it."""
    assert fused_names(Model(4, breaks=True), tokens()) == [f"layers.{i}.mlp" for i in range(4)]
    report = moefuse.last_report()
    assert report is not None
    assert report.summary == "fused 4 of 4 MoE layers"
    assert "layers.*.mlp (4 layers)" in str(report)


def test_layers_that_are_compiled_one_by_one_are_all_counted() -> None:
    model = Model(3)
    for layer in model.layers:
        layer.compile(backend="moefuse")
    with torch.no_grad():
        model(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == ["mlp"] * 3


@pytest.mark.parametrize("breaks", [False, True])
def test_a_recompilation_counts_no_layer_twice(breaks: bool) -> None:
    compiled = torch.compile(Model(breaks=breaks), backend="moefuse")
    for count in (6, 7, 9):
        with torch.no_grad():
            compiled(tokens(count))
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == PLAIN


def test_a_layer_that_is_compiled_again_for_its_class_stands_beside_the_first() -> None:
    """One code object, two compilations: the second is of another layer, and replaces nothing."""
    model = Model(3, breaks=True)
    model.layers[1] = Layer(Noisy, breaks=True)
    with torch.no_grad():
        torch.compile(model, backend="moefuse")(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == ["layers.0.mlp", "layers.2.mlp"]
    assert [skipped.module.partition(".experts")[0] for skipped in report.skipped] == ["layers.1.mlp"]


def test_explain_counts_the_same() -> None:
    report = moefuse.explain(Model(3, breaks=True), tokens())
    assert [fused.module for fused in report.fused] == [f"layers.{i}.mlp" for i in range(3)]


def test_parameters_that_are_replaced_make_no_layer() -> None:
    model = Model(1, breaks=True)
    compiled = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        compiled(tokens())
        old = model.state_dict()
        model.load_state_dict({name: value.clone() for name, value in old.items()}, assign=True)
        compiled(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == ["layers.0.mlp"]


@pytest.mark.parametrize("pattern", [r"^module\.layers\.0\.", r"__dict__|^module\.layers\.0", r"layers\.0\.mlp$"])
def test_exclude_matches_these_names(pattern: str) -> None:
    compiled = torch.compile(Adapter(Model()), backend="moefuse", options={"exclude": pattern})
    with torch.no_grad():
        compiled(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == ["module.layers.1.mlp"]
    assert [(skipped.code, skipped.module) for skipped in report.skipped] == [("excluded", "module.layers.0.mlp")]


def test_exclude_behind_a_graph_break_sees_the_whole_name() -> None:
    compiled = torch.compile(Model(breaks=True), backend="moefuse", options={"exclude": r"layers\.0\."})
    with torch.no_grad():
        compiled(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert ("excluded", "layers.0.mlp") in [(skipped.code, skipped.module) for skipped in report.skipped]


def test_a_refusal_by_capture_has_its_module() -> None:
    class Counts(MoE):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, ids = self.router(x).softmax(-1).topk(2)
            out, count = torch.zeros_like(x), 0
            for e in (F.one_hot(ids, EXPERTS).sum((0, 1)) > 0).nonzero().flatten().tolist():
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, self.experts[e](x[token]) * weights[token, slot, None])
                count += 1
            return out / count

    model = Model(1)
    model.layers[0].mlp = Counts()
    report = moefuse.explain(model, tokens())
    refused = {skipped.code: skipped.module for skipped in report.skipped}
    assert refused.get("not-captured") == "layers.0.mlp", report


def test_the_page_of_a_report_has_the_model_and_the_region() -> None:
    report = moefuse.explain(Model(2), tokens())
    assert [name for name, _ in report.modules[0][1].children] == ["layers"]
    (first, second) = report.fused
    assert first.before == second.before
    assert sum(run.times * len(run.names) for run in first.before) > 10
    assert [run.names[-1] for run in first.after] == ["moefuse::experts"]
    page = report.to_html()
    assert "2 layers" in page
    assert "moefuse::experts" in page


def test_a_module_that_is_put_in_later_has_its_name() -> None:
    """Names are remembered between graphs; a layer that comes later is looked for again, also in the place of an older one."""
    model = Model(2)
    compiled = torch.compile(model, backend="moefuse")
    with torch.no_grad():
        compiled(tokens())
        model.layers.insert(0, Layer())
        model.layers[1] = Layer()
        compiled(tokens())
    report = moefuse.last_report()
    assert report is not None
    assert [fused.module for fused in report.fused] == [f"layers.{i}.mlp" for i in range(3)]


def test_modules_without_a_mode() -> None:
    """A proxy that is a module and was never initialised, as PEFT has one, is no reason to stop a program."""

    class Proxy(nn.Module):
        def __init__(self) -> None:
            pass

    traced = types.SimpleNamespace(local_scope={"self": Proxy()})
    assert history._mode(traced)[1] is None  # type: ignore[arg-type]
