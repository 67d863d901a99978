"""What is a layer in the report: a module of what was compiled, however often it runs, and whatever stood in the way at first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import moefuse
from moefuse.pipeline import publish
from tests.cpu.test_left_frames import Helped, K, Layer, X, mixed
from tests.programs.effects import changes

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is given once in a process."""
    monkeypatch.setattr(publish, "_warned", set())


class Around(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.mlp = kind()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(x + 1)
        return out


class Changed(Layer):
    """What the experts read is changed behind them. Where the graph breaks in the function, that is elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        out = mixed(doubled, *self.router(doubled).softmax(-1).topk(K), self.experts)
        doubled.mul_(3)
        return out + doubled


class ChangedHere(Layer):
    """The same, and the loop is here as well: it stays refused."""

    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        weights, ids = self.router(doubled).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(doubled[token]) * weights[token, slot, None])
        doubled.mul_(3)
        return out + doubled


class Half(Layer):
    """Experts of two kinds in one module; what the others make takes their rows together."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        y = torch.stack([expert(x.exp()) for expert in self.experts], 1)
        gates = torch.zeros(len(x), len(self.experts)).scatter(1, ids, weights)
        return mixed(x, weights, ids, self.experts) + ((y - y.mean(0)) * gates[:, :, None]).sum(1)


class Noisy(changes.Noisy):
    """Random numbers inside of the experts where there are gradients."""

    def odd(self) -> bool:
        return torch.is_grad_enabled()


class Logged(Helped):
    """The numbers of tokens, for a log: the graph breaks there, in front of the experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        self.load = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        return mixed(x, weights, ids, self.experts)


class LoggedInside(Helped):
    """The same numbers, each where its expert is: the graph breaks between the experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out, self.load = torch.zeros_like(x), []
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            self.load.append(len(token))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class Twice(Around):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.mlp(self.mlp(x))
        return out


class Broken(Helped):
    """The graph breaks between the router and the experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        torch._dynamo.graph_break()
        return mixed(x, weights, ids, self.experts)


def report_of(model: nn.Module, *calls: tuple[Tensor, bool], **options: Any) -> moefuse.FusionReport:
    compiled = torch.compile(model, backend="moefuse", options=options)
    for x, grad in calls:
        with torch.set_grad_enabled(grad):
            compiled(x)
    report = moefuse.last_report()
    assert report is not None
    return report


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "moefuse.backend" and record.levelno >= logging.WARNING]


def test_one_layer_in_two_calls_of_one_graph() -> None:
    report = report_of(Twice(Layer), (X, False), expect=1)
    assert (len(report.fused), report.layers) == (2, (1, 1))


def test_two_calls_are_not_two_layers() -> None:
    with pytest.raises(moefuse.FusionError, match=r"options\['expect'\] is 2, and 1 layers were fused"):
        report_of(Twice(Layer), (X, False), expect=2)


def test_one_layer_in_many_calls() -> None:
    """Numbers of tokens, with gradients and without."""
    report = report_of(Around(Layer), (X, False), (X[:3], False), (X[:5], True), (X[:1], True), (X, True), expect=1)
    assert (len(report.fused), report.layers) == (1, (1, 1))


@pytest.mark.every_value
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_layer_that_is_fused_in_one_mode_only(around: bool, first: bool) -> None:
    """One layer; the report says both, and where which holds: the calls that follow do not change that."""
    model = Around(Noisy) if around else Noisy()
    report = report_of(model, (X, first), (X, not first), expect=1) if not first else report_of(model, (X, first), (X, not first))
    assert report.layers == (1, 1)
    assert ([f.module for f in report.fused], [s.code for s in report.skipped]) == (["mlp" if around else ""], ["random"])
    assert report.skipped[0].text.endswith("random numbers inside the expert (with gradients)")


def test_two_layers_of_which_one_is_refused_in_training() -> None:
    model = nn.Sequential(Layer(), Noisy())
    report = report_of(model, (X, False), (X, True), expect=2)
    assert report.layers == (2, 2)
    assert [s.module for s in report.skipped] == ["1"]


def test_the_root_is_one_layer_behind_a_break() -> None:
    """The frame behind the break has a list of experts, which is no layer of its own."""
    report = report_of(Broken(), (X, False), (X, True), expect=1)
    assert ([f.module for f in report.fused], report.skipped) == ([""], [])


@pytest.mark.parametrize("strict", [False, True])
def test_tokens_that_are_changed_in_a_frame_around_the_experts(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The graph that was refused is given up; the function's own graph has the experts alone, which keep tokens of their own."""
    for grad in (False, True):
        report = report_of(Around(Changed), (X, grad), strict=strict, expect=1)
        assert (report.layers, report.skipped, warnings(caplog)) == ((1, 1), [], [])


@pytest.mark.parametrize("strict", [False, True])
def test_numbers_for_a_log_are_no_layer(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Experts behind the break are fused: nothing of them was lost, and the break is in the report."""
    report = report_of(Logged(), (X, False), strict=strict, expect=1)
    assert (report.layers, report.skipped, warnings(caplog)) == ((1, 1), [], [])
    assert len(report.graph_breaks) == 1


def test_numbers_between_the_experts_are_told(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(LoggedInside(), (X, False))
    assert (report.layers, [s.code for s in report.skipped]) == ((0, 1), ["not-captured"])
    assert len(warnings(caplog)) == 1


def test_a_layer_that_stays_refused_is_told(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(Around(ChangedHere), (X, True))
    assert (report.layers, [s.code for s in report.skipped]) == ((0, 1), ["mutation"])
    assert len(warnings(caplog)) == 1


def test_a_layer_that_stays_refused_is_an_error_under_strict() -> None:
    with pytest.raises(moefuse.FusionError, match="mutation"):
        report_of(Around(ChangedHere), (X, True), strict=True)


def test_a_refusal_in_training_outlives_a_fused_layer_in_inference(caplog: pytest.LogCaptureFixture) -> None:
    """The same lines are fused without gradients, which says nothing about the graph with them."""
    report = report_of(Around(ChangedHere), (X, False), (X, True))
    assert report.layers == (1, 1)
    assert ([s.code for s in report.skipped], len(warnings(caplog))) == (["mutation"], 1)


def test_a_limit_of_a_graph_that_was_given_up() -> None:
    """Each layer has a graph of its own then, and each graph its limit."""
    report = report_of(nn.Sequential(Layer(), Layer()), (X, False), max_rewrites=1)
    assert (report.layers, report.skipped) == ((2, 2), [])


class Tree(nn.Module):
    """A router of layers, each with a router of its own."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.root, self.children_ = nn.Linear(X.shape[1], 2), nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        best, group = self.root(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for i, child in enumerate(self.children_):
            chosen = (group == i).nonzero().flatten()
            out[chosen] = child(x[chosen]) * best[chosen, None]
        return out


@pytest.mark.parametrize("strict", [False, True])
def test_layers_that_are_the_experts_of_another_one(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """As rows of the outer layer they are not understood; that graph is given up, and each is fused in a frame of its own."""
    report = report_of(Tree(Layer), (X, False), strict=strict)
    assert (report.layers, report.skipped, warnings(caplog)) == ((2, 2), [], [])


def test_layers_in_a_layer_that_stay_refused(caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(Tree(ChangedHere), (X, True))
    assert report.layers[0] == 0
    assert {s.code for s in report.skipped} >= {"mutation"}
    assert warnings(caplog)


@torch.no_grad()
def test_a_graph_that_is_fused_in_part_stays_refused_in_part() -> None:
    """In each call, and not only in that which compiled it."""
    model = Half()
    model.compile(backend="moefuse", fullgraph=True)
    said = []
    for _ in range(2):
        model(X)
        report = moefuse.last_report()
        assert report is not None
        said.append((len(report.fused), [s.code for s in report.skipped]))
    assert said[0] == said[1] == (1, ["value-escapes", "not-row-local"])
