"""``moefuse.benchmark`` and ``moefuse bench`` with real compilations: what is measured, and that nothing is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import moefuse
from moefuse.cli.main import main
from moefuse.gains.rows import EAGER, INDUCTOR, MOEFUSE
from moefuse.pipeline import publish
from moefuse.tuning import sites
from tests.cpu.beside_eager import H, MoE

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


without_code = pytest.mark.usefixtures("no_inductor_code")
"""What Inductor would run is no part of these; the first test has it."""


class Layer(MoE):
    """A loop over selected rows, of few experts."""

    def __init__(self) -> None:
        super().__init__(3)
        self.gate = nn.Linear(H, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.add_experts(torch.zeros_like(x), x, *self.route(x))


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def measured(model: Callable[..., Any], *args: Any, **more: Any) -> moefuse.Gains:
    return moefuse.benchmark(model, *args, budget_s=0.01, progress=False, **more)


@pytest.mark.parametrize("train", [False, True])
def test_a_model_and_its_layers(train: bool, request: pytest.FixtureRequest) -> None:
    if train:
        request.getfixturevalue("no_inductor_code")
    gains = measured(Model(Layer(), Layer()), torch.randn(7, H), train=train)
    assert not gains.off
    assert gains.report.layers == (2, 2)
    (layer,) = gains.layers
    assert layer.name == "layers.* (2 layers)"
    assert layer.fused
    for timed in (gains.model, layer):
        assert [row.name for row in timed.rows] == [EAGER, INDUCTOR, MOEFUSE]
        assert [row.problem for row in timed.rows] == [""] * 3
        assert all(len(row.ms) == len(timed.rows[0].ms) >= 5 for row in timed.rows)
        assert [row.memory for row in timed.rows] == [None] * 3, "not measured on a CPU"
        assert all(row.difference is not None for row in timed.rows[1:])
    assert "memory is measured on CUDA devices only" in gains.notes


@without_code
def test_what_inductor_breaks_is_a_note() -> None:
    """Where it fails torch says so in hundreds of lines, and the table was under them."""

    class Broken(Model):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    gains = measured(Broken(Layer()), torch.randn(7, H))
    model, layer = (note for note in gains.notes if "with Inductor" in note)
    assert re.match(r"with Inductor torch breaks the graphs of the model \([1-9]\), most often because of: \w", model)
    assert layer.startswith("with Inductor torch breaks the graphs of layers.0 (")


@without_code
def test_a_layer_gets_what_it_gets_in_the_model() -> None:
    """Also where the model writes to it later."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def forward(self, x: Tensor) -> Tensor:
            y = x * 3
            return y.add_(self.layer(y))

    from moefuse.gains import layers

    seen: list[Tensor] = []
    of = layers.of

    def noted(*args: Any) -> Any:
        found = of(*args)
        seen.extend(layer.args[0] for layer in found[0])
        return found

    x = torch.randn(7, H)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "of", noted)
        measured(Scaled(), x)
    assert len(seen) == 1
    torch.testing.assert_close(seen[0], x * 3)


@without_code
def test_nothing_is_left_behind() -> None:
    """The user's compiled code, counters, reports, warnings, what warmup finds."""
    layer, x = Layer(), torch.randn(7, H)
    model = Model(layer)
    compiled, alone = torch.compile(model, backend="moefuse"), torch.compile(layer, backend="moefuse")

    def state() -> Any:
        now = {name: dict(counter) for name, counter in counters.items()}
        return now, str(moefuse.last_report()), str(moefuse.reports()), set(publish._warned), sites.of(None)

    with torch.no_grad():
        compiled(x)
        alone(x)
        before = state()
        gains = measured(model, x)
        assert gains.report.layers == (1, 1), "what the user has compiled does not stand in for what is measured"
        assert [row.problem for row in gains.model.rows] == [""] * 3
        assert state() == before
        assert "layers.0" in str(gains.report)
        assert "layers.0" not in str(moefuse.last_report())
        compiled(x)
        alone(x)
    assert state() == before, "what was compiled runs on"


@without_code
def test_inductor_may_compile_it_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    """And is not told that a layer in its graph is compiled with moefuse."""
    layer, x = Layer(), torch.randn(7, H)
    measured(layer, x)
    torch.compile(Model(layer))(x)
    assert "compiled with moefuse" not in caplog.text
    assert len(moefuse.reports()) == 0


@without_code
def test_before_anything_was_compiled() -> None:
    measured(Layer(), torch.randn(7, H))
    assert len(moefuse.reports()) == 0
    compiled = torch.compile(Layer(), backend="moefuse")
    compiled(torch.randn(7, H))
    report = moefuse.last_report()
    assert report is not None
    assert report.layers == (1, 1)


@without_code
def test_a_model_that_is_compiled_in_place() -> None:
    """It is measured from under its compilation, and compiled afterwards."""
    calls: list[int] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        calls.append(1)
        return gm.forward

    model, x = Model(Layer()), torch.randn(7, H)
    model.compile(backend=backend)
    call = model._compiled_call_impl
    gains = measured(model, x)
    assert gains.report.layers == (1, 1)
    assert not gains.off
    assert calls == []
    assert model._compiled_call_impl is call
    model(x)
    assert calls


@without_code
def test_a_compiled_model_and_a_function() -> None:
    layer = Layer()
    assert measured(torch.compile(layer), torch.randn(7, H)).report.layers == (1, 1)
    gains = measured(lambda x: layer(x) * 2, torch.randn(7, H))
    assert gains.report.layers == (1, 1)
    assert gains.layers == []
    assert "layers are measured by themselves in modules only" in gains.notes


@without_code
def test_where_nothing_is_fused() -> None:
    gains = measured(nn.Linear(H, H), torch.randn(2, H))
    assert "nothing was fused; " in gains.headline
    assert "no mixture-of-experts code found" in str(gains)


@without_code
def test_a_refusal_is_in_the_report_and_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Noisy(Layer):
        def add_experts(self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            for e, expert in enumerate(self.experts):
                tok, slot = torch.where(ids == e)
                y = expert(x[tok])
                out.index_add_(0, tok, (y - y.mean(0)).nan_to_num() * weights[tok, slot, None])
            return out

    gains = measured(Noisy(), torch.randn(7, H))
    assert gains.report.skipped
    assert "skipped" in str(gains)
    assert "was not fused" not in caplog.text
    torch.compile(Noisy(), backend="moefuse")(torch.randn(7, H))
    assert "was not fused" in caplog.text, "the user's own compilation is warned of as if nothing had been measured"


MODELS = """
import torch
from torch import nn
from tests.cpu.test_benchmark import Layer, Model, H

def model():
    return Model(Layer()), torch.randn(7, H)
"""


@without_code
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_bench.py").write_text(MODELS)
    page = tmp_path / "gains.html"
    assert main(["bench", f"{tmp_path}/my_bench.py:model", "--budget", "0.01", "--json", "--html", str(page)]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert captured.err == ""
    assert [row["name"] for row in data["model"]["rows"]] == [EAGER, INDUCTOR, MOEFUSE]
    assert (data["train"], len(data["report"]["fused"])) == (False, 1)
    assert "<svg" in page.read_text(encoding="utf-8")
