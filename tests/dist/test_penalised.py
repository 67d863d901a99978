"""Who reads the weights of spread experts and is no layer is told as none, and is right; who brings tokens to them is a layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import moefuse
from tests.cpu.capture_case import Seen, capturing
from tests.dist import layers, penalised
from tests.dist.penalised import Case
from tests.dist.workers import Workers

CASES = [
    *(Case(kind, "squares", how) for kind in (layers.Stacked, layers.Listed) for how in ({}, {"placement": "round_robin"})),
    Case(layers.Stacked, "squares", {"grads": "sum"}),
    Case(layers.Listed, "squares", {"tokens": "replicated"}, (5, 5)),
    Case(layers.Stacked, "squares", {"experts": "tp", "tokens": "replicated"}, (5, 5)),
    Case(layers.Listed, "norms", {"experts": "tp"}),
    Case(layers.Stacked, "squares", tokens=(5, 0)),
    *(Case(layers.Listed if number % 2 else layers.Stacked, name) for number, name in enumerate(penalised.PENALTIES)),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind.__name__}-{case.penalty}-{case.how}-{case.tokens}")
def test_penalties(two: Workers, case: Case) -> None:
    """The layers' tokens travel, the loss and all gradients are those of one process, and ``strict`` has nothing to say."""
    for found in two.run(penalised.run, case):
        assert found.worst <= 2e-5, found
        assert (found.layers, found.skipped) == ((2, 2), [])
        assert any("penalised.py:" in note and "experts-gathered" in note and "no layer" in note for note in found.notes), found


def told(
    mesh: DeviceMesh, more: Callable[[Any, Tensor], Any], kind: type[nn.Module] = layers.Stacked, experts: int = 4
) -> moefuse.FusionReport:
    """What is said of two layers and something more, in one graph or in several."""
    model = layers.Model(kind, experts)
    moefuse.parallelize(model, mesh)
    seen = Seen()
    with torch.no_grad():
        torch.compile(lambda x: (model(x), more(model, x)), backend=capturing(seen))(torch.randn(5, layers.H))
    return seen.report


def behind_a_break(model: Any, x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return penalised.squares(model, x)


NO_LAYERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "histogram": lambda model, x: torch.histc(model.first.down, 16),
    "share of zeros": lambda model, x: (model.first.down == 0).float().mean(),
    "zeros": lambda model, x: (model.first.down == 0).sum(),
    "several at once": lambda model, x: torch._foreach_norm([model.first.down, model.second.down]),
    "nuclear norm": lambda model, x: torch.linalg.svdvals(model.first.down).sum(),
    "times a loss": lambda model, x: model.first.down.norm() * x.sum(),
    "a number of tokens": lambda model, x: model.first.down.sum() / x.shape[0],
    "summed in place": lambda model, x: x.new_zeros(()).add_(model.first.down.sum()),
    "written to, a copy": lambda model, x: (model.first.down * 2).square_().sum(),
    "noise": lambda model, x: (model.first.down + torch.randn_like(model.first.down)).square().mean(),
    "behind a break": behind_a_break,
}


ALONE = "behind a break"


@pytest.mark.parametrize("name", [ALONE, *(pytest.param(name, marks=pytest.mark.thorough) for name in NO_LAYERS if name != ALONE)])
def test_no_layers(mesh: DeviceMesh, name: str) -> None:
    report = told(mesh, NO_LAYERS[name])
    assert (report.layers, report.skipped) == ((2, 2), []), report
    assert any("by no layer" in note for note in report.notes), report


def test_no_layers_at_once(mesh: DeviceMesh) -> None:
    """In one graph, with a note for each line that reads weights."""
    report = told(mesh, lambda model, x: [more(model, x) for name, more in NO_LAYERS.items() if name != ALONE])
    assert (report.layers, report.skipped) == ((2, 2), []), report
    lines = {line for note in report.notes if "by no layer" in note for line in re.findall(r"test_penalised\.py:\d+", note)}
    assert len(lines) == len(NO_LAYERS) - 1, report


def merged(model: Any, x: Tensor) -> Tensor:
    """Experts are mixed, and their mixture has the tokens."""
    mixture = torch.einsum("e,ehi->hi", model.first.router(x).softmax(-1).mean(0), model.first.down)
    return x @ mixture  # type: ignore[no-any-return]


def left(model: Any, x: Tensor) -> Tensor:
    """Behind the break anybody may read it."""
    down = model.first.down * 2
    torch._dynamo.graph_break()
    return x @ down[0]  # type: ignore[no-any-return]


def written(model: Any, x: Tensor) -> Tensor:
    out = torch.zeros(layers.H, layers.I)
    out.copy_(model.first.down[0])
    return x @ out


LAYERS: dict[str, Callable[[Any, Tensor], Any]] = {
    "one matrix of all": lambda model, x: x @ model.first.down.mean(0),
    "a mixture": merged,
    "behind a break": left,
    "through other memory": written,
    "weights of length one": lambda model, x: x @ (model.first.down / model.first.down.norm(dim=-1, keepdim=True))[1],
    "elements": lambda model, x: x * model.first.down[1, 0, 0].exp(),
    "rows by an index": lambda model, x: x * model.first.down.flatten()[torch.tensor([3])],
    "a penalty in front": lambda model, x: model.first.down.norm() + (x @ model.first.down[2]).sum(),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(mesh: DeviceMesh, name: str) -> None:
    """What tokens come to is refused, as before."""
    report = told(mesh, LAYERS[name])
    assert [s.code for s in report.skipped] == ["experts-gathered"], report
    assert not any("by no layer" in note for note in report.notes), report


def test_a_refused_layer_with_a_penalty(mesh: DeviceMesh) -> None:
    """The layers are told, not what reads the same weights and stands first in the file."""
    report = told(mesh, penalised.squares, layers.Mixed, 2)
    assert {s.module for s in report.skipped if s.code == "experts-gathered"} == {"first", "second"}, report
