"""In both directions: who has experts hears of those that are not fused, and ``strict`` raises; who has none hears nothing."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch
from torch import nn

import moefuse
from tests.programs.suspects import FILES, HAVE, HAVE_NOT, Make
from tests.programs.suspects.backbones import EarlyExit
from tests.programs.suspects.chosen import OneForAll, Soft, StraightThrough, Threshold, TwoByMask, TwoByWhere
from tests.programs.suspects.counted import Counting, SecondLost, Stack
from tests.programs.suspects.parts import Expert, H, Layer, T
from tests.programs.suspects.several import Critics, Levels, Pooling

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")


@pytest.fixture(autouse=True)
def _not_told_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moefuse.pipeline.publish, "_warned", set())


def run(make: Make, **options: object) -> nn.Module:
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(T, H)
    expected = model(x)
    model.compile(backend="moefuse", options=options)
    torch.testing.assert_close(model(x), expected, equal_nan=True)
    return model


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("moefuse") and r.levelno >= logging.WARNING]


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("make", HAVE)
def test_experts_that_are_lost_are_told_about(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Once, at a line of the layer's own, and none of its experts'."""
    run(make)
    texts = messages(caplog)
    assert texts, str(moefuse.last_report())
    assert len(texts) == 1, texts
    assert any(f"{file}:" in texts[0] for file in FILES), texts
    lines, start = inspect.getsourcelines(Expert)
    assert not any(f"{inspect.getsourcefile(Expert)}:{line} " in texts[0] for line in range(start, start + len(lines))), texts


@pytest.mark.sampled(9)
@torch.no_grad()
@pytest.mark.parametrize("make", HAVE)
def test_strict_raises_where_experts_are_lost(make: Make) -> None:
    with pytest.raises(moefuse.FusionError):
        run(make, strict=True)


@pytest.mark.sampled(2)
@torch.no_grad()
@pytest.mark.parametrize("make", HAVE_NOT)
def test_what_has_no_experts_hears_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    run(make, strict=True)
    assert messages(caplog) == []


class Sharing(Layer):
    """Its loop is in a function that another class calls, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return taken_apart(self, x)


class SharingToo(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return taken_apart(self, x) + 0.0


def taken_apart(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    p = (x @ layer.w_gate).softmax(-1)
    p = p * (p >= p.topk(2)[0][:, -1:])
    return sum(p[:, e, None] * expert(x) for e, expert in enumerate(layer.experts))  # type: ignore[return-value]


@torch.no_grad()
def test_models_of_two_classes_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """One warning for each class of model, also where both share the line; a second model of one class is no news."""
    for make in (Threshold, StraightThrough, Sharing, SharingToo, Sharing):
        run(make)
        torch._dynamo.reset()
    texts = messages(caplog)
    assert len(texts) == 4, texts


@torch.no_grad()
def test_each_lost_layer_is_in_the_report() -> None:
    """Layers of one class share a warning, and have a line each."""
    run(Stack)
    report = moefuse.last_report()
    assert report is not None
    assert [s.module for s in report.skipped] == [f"layers.{n}.mlp" for n in range(3)]
    torch._dynamo.reset()
    run(SecondLost)
    report = moefuse.last_report()
    assert report is not None
    assert ([f.module for f in report.fused], [s.module for s in report.skipped]) == (["a"], ["b"])


@torch.no_grad()
def test_the_cause_is_what_is_in_the_way(caplog: pytest.LogCaptureFixture) -> None:
    """Not that nothing is in the graphs, where something is; and no line of torch's."""
    for make, text in {
        Soft: "no top-k, sort or argmax is in its graphs",
        TwoByWhere: "its graph has its experts in a form that moefuse does not read",
        OneForAll: "the graph breaks inside it (Unsupported Tensor.item() call with capture_scalar_outputs=False)",
        Counting: "how many tokens an expert has depends on data, and the program keeps that number",
    }.items():
        caplog.clear()
        run(make)
        (found,) = messages(caplog)
        assert text in found
        torch._dynamo.reset()


@torch.no_grad()
def test_a_function_that_dynamo_gave_up_on_before_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """Another compilation of the same code broke the graph in its loop, and Dynamo asks for it no more: moefuse has it ask again."""
    torch.compile(Layer(), backend="eager")(torch.randn(T, H))
    run(Layer, strict=True, expect=1)
    assert messages(caplog) == []


@pytest.mark.sampled(1)
@torch.no_grad()
@pytest.mark.parametrize(("make", "told"), [(Counting, True), (TwoByMask, True), (SecondLost, True), (EarlyExit, False), (Critics, False)])
def test_explain_says_the_same(make: Make, told: bool) -> None:
    report = moefuse.explain(make().eval(), torch.randn(T, H))
    assert bool(report.skipped) is told, report


@pytest.mark.parametrize("make", [Levels, Pooling])
def test_one_layer_for_all_groups_is_no_expert_of_any_number_of_rows(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """Where sizes are dynamic the rows are lost before the layer, and its weight says all the same that it is one."""
    model = make()
    model.compile(backend="moefuse", dynamic=True, options={"strict": True})
    model(torch.randn(T, H))
    assert messages(caplog) == []
