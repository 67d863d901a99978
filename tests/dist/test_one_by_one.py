"""Layers that are compiled one by one, as FSDP2 has it, share what is compiled: torch compiles no more than eight graphs of one code."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import moefuse
from moefuse import _torch_private
from moefuse.evidence.suspects import suspects
from moefuse.parallel import shard, views
from moefuse.passes import replacement
from moefuse.passes.prove.verify import verify
from moefuse.pipeline import publish
from tests.dist import layers

LAYERS = 10


def run(model: nn.Module, train: bool) -> Counter[str]:
    """Operations of the last of two calls, and how often they run."""
    for layer in model:  # type: ignore[attr-defined]
        layer.compile(backend="moefuse")
    x, found = torch.randn(6, layers.H), Counter[str]()
    with torch.set_grad_enabled(train):
        model(x)
        with _torch_private.after_operations(lambda op, *_: found.update([str(op)])):
            model(x)
    return found


@pytest.mark.usefixtures("as_traced")
@pytest.mark.every_value
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_more_layers_than_torch_compiles(mesh: DeviceMesh, kind: type[nn.Module], train: bool, around: bool) -> None:
    """Beyond its limit torch runs them in eager mode, where their weights are gathered."""
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*(layers.Around(kind(4)) if around else kind(4) for _ in range(LAYERS)))
    moefuse.parallelize(model, mesh, max_tokens=6)
    found = run(model, train)
    assert found[f"moefuse.{'ep_experts_forward' if train else 'ep_experts_infer'}.default"] == LAYERS
    assert "moefuse.gathered.default" not in found
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1 + train  # the first layer's input has no gradient


class Shaped(layers.Stacked):
    """Asks for the shape of its tokens, in which its sum is to be."""

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        return super().forward(x.reshape(-1, layers.H)).view(shape)


class InARow(nn.Module):
    """Two layers of one graph, of which the second has its tokens from the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = Shaped(2), nn.LayerNorm(layers.H), Shaped(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return x + self.second(self.norm(x))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("as_traced")
def test_two_layers_of_one_graph_and_other_numbers_of_tokens(mesh: DeviceMesh) -> None:
    """From the second number on it is symbolic, and no step leads from what is known to the second layer's."""
    model = InARow()
    moefuse.parallelize(model, mesh)
    model.compile(backend="moefuse", options={"strict": True})
    for tokens in (5, 3, 4):
        model(torch.randn(tokens, layers.H)).sum().backward()
        report = moefuse.last_report()
        assert (report.layers, report.skipped, report.graph_count) == ((2, 2), [], 1)


@pytest.mark.usefixtures("as_traced")
def test_what_an_attempt_gathered_is_not_said_of_the_next(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one layer is refused the frame starts again, and this layer is fused in a graph of its own."""
    answers = [verify, verify, fails]
    monkeypatch.setattr(replacement, "verify", lambda *args: (answers.pop(0) if answers else verify)(*args))
    model = InARow()
    moefuse.parallelize(model, mesh)
    model.compile(backend="moefuse")
    for tokens in (5, 3):
        model(torch.randn(tokens, layers.H))
    assert not answers
    report = moefuse.last_report()
    assert (report.layers, report.skipped, report.graph_count) == ((2, 2), [], 2)


def fails(*_: object) -> None:
    raise ValueError("this proof cannot be made")


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("train", [False, True])
def test_a_fused_layer_is_not_told_as_missed(
    mesh: DeviceMesh, train: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In inference a graph reads what a Parameter is on this rank, which is another tensor than the Parameter."""
    monkeypatch.setattr(publish, "_warned", set())
    layer = layers.Stacked(4)
    moefuse.parallelize(layer, mesh)
    assert moefuse.compile_layers(layer) == [""]
    with torch.set_grad_enabled(train):
        layer(torch.randn(5, layers.H))
    assert moefuse.last_report().layers == (1, 1)
    assert not [record for record in caplog.records if record.name.startswith("moefuse") and record.levelno >= logging.WARNING]


@pytest.mark.every_value
@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("order", ["spread", "compile", "compile, call"])
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed])
def test_layers_are_found_before_and_after(mesh: DeviceMesh, kind: type[nn.Module], order: str, train: bool) -> None:
    """Experts in a list have no Parameters of their own once they are spread; the compiled layers spread their tokens in any order."""
    model, x = layers.Model(kind, 4), torch.randn(6, layers.H)
    if order != "spread":
        assert moefuse.compile_layers(model, options={"strict": True}) == ["first", "second"]
    with torch.set_grad_enabled(train):
        if order == "compile, call":
            model(x)
            assert [f.parallel for f in moefuse.last_report().fused] == ["", ""]
        moefuse.parallelize(model, mesh)
        if order == "spread":
            assert moefuse.compile_layers(model, options={"strict": True}) == ["first", "second"]
        model(x)
        found = Counter[str]()
        with _torch_private.after_operations(lambda op, *_: found.update([str(op)])):
            model(x)
    spread = [f.module for f in moefuse.last_report().fused if "ep=2 linear, 2 of 4 experts here" in f.parallel]
    assert sorted(spread) == ["first", "second"]
    assert moefuse.last_report().layers == (2, 2)
    assert sum(found[name] for name in found if name.startswith(("moefuse.ep_experts_", "moefuse.ep_combine"))) == 2, found
    assert "moefuse.gathered.default" not in found


HOW: dict[str, dict[str, Any]] = {
    "empty slots": {"placement": "round_robin"},
    "slices": {"experts": "tp"},
    "the same tokens": {"tokens": "replicated"},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", [layers.Stacked, layers.Listed, layers.Shared])
def test_what_spread_experts_are_built_like(mesh: DeviceMesh, kind: type[nn.Module], how: str) -> None:
    """As they were: experts and a router are told with the same words; also with empty slots, and after ``unparallelize``."""
    model = layers.Model(kind, 5 if how == "empty slots" else 4)
    told = [(s.name, [pair.what for pair in s.pairs]) for s in suspects([model])]
    assert [name for name, _ in told] == ["first", "second"]
    moefuse.parallelize(model, mesh, **HOW[how])
    assert [(s.name, [pair.what for pair in s.pairs]) for s in suspects([model])] == told
    assert moefuse.compile_layers(copy.deepcopy(model)) == ["first", "second"]
    moefuse.unparallelize(model)
    assert [(s.name, [pair.what for pair in s.pairs]) for s in suspects([model])] == told


class Taking(layers.Listed):
    """Takes what attention takes."""

    def forward(self, x: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x)


@pytest.mark.usefixtures("no_code")
def test_what_a_layer_counts_is_no_experts_memory(mesh: DeviceMesh) -> None:
    """A buffer is written beside weights that are DTensors, whose memory is that of what they are made of."""
    model = layers.Model(layers.Counting, 4)
    moefuse.parallelize(model, mesh, max_tokens=6)
    torch.compile(model, backend="moefuse", dynamic=False, options={"expect": 2, "strict": True})(torch.randn(6, layers.H))


def test_a_list_is_no_layer(mesh: DeviceMesh) -> None:
    """It holds [E, ..] once it is spread, and nobody calls it."""
    for spread in (False, True):
        model = nn.Sequential(Taking(4))
        if spread:
            moefuse.parallelize(model, mesh)
        assert moefuse.compile_layers(model) == ["0"]


def test_other_layers_are_other_classes(mesh: DeviceMesh) -> None:
    """Their tables, names and terms are their own; a copy has those of what it was copied of."""
    model = nn.Sequential(*(layers.Stacked(4) for _ in range(3)))
    moefuse.parallelize(model[:2], mesh, max_tokens=6)
    moefuse.parallelize(model[2], mesh, max_tokens=6, placement=[1, 0, 1, 0])
    first, second, third = model
    assert type(first) is type(second) is type(third)
    tables = [layer._moefuse_place for layer in model]
    assert [t.tolist() for t in tables] == [[0, 1, 2, 3], [0, 1, 2, 3], [2, 0, 3, 1]]
    assert len({id(t) for t in tables}) == 3
    assert copy.deepcopy(third)._moefuse_place is tables[2]
    moefuse.unparallelize(model)
    assert {type(layer) for layer in model} == {layers.Stacked}
    assert not any(name in vars(layer) for layer in model for name in (shard.HELD, views.WAYS))
