"""What surrounds the passes: a failing pass leaves the graph as it was; warnings come once; strict raises."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from moefuse import FusionError, Options
from moefuse.pipeline import publish, rewrite
from moefuse.report.entries import Skipped
from moefuse.report.report import FusionReport
from tests.conftest import StubDriver


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.fx.symbolic_trace(Inner())
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.weight


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: torch.nn.Module, qualified_name: str) -> bool:
        return True


def graph_module() -> torch.fx.GraphModule:
    """A graph with a graph inside it, as higher-order operators have, and Dynamo's mark on its input."""
    outer = Outer()
    gm = torch.fx.GraphModule(outer, _Tracer().trace(outer))
    for node in gm.graph.find_nodes(op="placeholder"):
        node._dynamo_source = "source of x"
        node.meta["example_value"] = torch.ones(3)
    return gm


def vandalise(gm: torch.fx.GraphModule) -> None:
    """Half a rewrite, then a bug."""
    body: Any = gm.get_submodule("body")
    for module in (gm, body):
        for node in list(module.graph.nodes):
            node.meta.clear()
            if node.op == "output":
                node.args = (1,)
            if node.op.startswith("call"):
                module.graph.erase_node(node) if not node.users else None
    gm.register_buffer("scratch", torch.zeros(2))
    gm.weight = None
    del gm.body
    raise KeyError("a bug")


def test_a_failing_pass_leaves_the_graph_as_it_was(stub_driver: StubDriver, caplog: pytest.LogCaptureFixture) -> None:
    stub_driver.action = vandalise
    gm = graph_module()
    before = copy.deepcopy(gm)
    with caplog.at_level(logging.ERROR, "moefuse.backend"):
        report = rewrite.rewrite(gm, [], Options())

    x = torch.randn(3)
    torch.testing.assert_close(gm(x), before(x))
    assert str(gm.graph) == str(before.graph)
    assert str(gm.body.graph) == str(before.body.graph)
    assert dict(gm.named_buffers()) == {}
    (placeholder,) = gm.graph.find_nodes(op="placeholder")
    assert placeholder._dynamo_source == "source of x"
    assert set(placeholder.meta) == {"example_value"}
    gm.graph.lint()

    (skipped,) = report.skipped
    assert skipped.code == "internal-error"
    assert "KeyError: 'a bug'" in skipped.message
    assert "test_pipeline.py:" in skipped.location
    assert "Traceback" in caplog.text


def test_dynamo_restarts_pass_through(stub_driver: StubDriver) -> None:
    from torch._dynamo.exc import SpeculationRestartAnalysis

    def restart(gm: torch.fx.GraphModule) -> None:
        raise SpeculationRestartAnalysis

    stub_driver.action = restart
    with pytest.raises(SpeculationRestartAnalysis):
        rewrite.rewrite(graph_module(), [], Options())


def test_a_broken_import_of_the_passes_is_an_internal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import moefuse.passes

    monkeypatch.delattr(moefuse.passes, "driver", raising=False)
    monkeypatch.setitem(sys.modules, "moefuse.passes.driver", None)
    (skipped,) = rewrite.rewrite(graph_module(), [], Options()).skipped
    assert skipped.code == "internal-error"


def left(code: str, location: str = "my.py:17", message: str = "the reason") -> FusionReport:
    return FusionReport(skipped=[Skipped(code, message, "layers.0", location)], graph_count=1)


@pytest.fixture
def _no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_warned", set())


@pytest.mark.usefixtures("_no_warnings_yet")
def test_each_reason_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for report in (left("no-rule"), left("no-rule"), left("no-rule", "my.py:18"), left("random")):
        publish.publish(report, Options())
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(texts) == 3
    assert texts[0] == (
        "mixture-of-experts code at my.py:17 in layers.0 was not fused (no-rule): the reason. It still runs, as without moefuse; "
        'silence this with logging.getLogger("moefuse").setLevel("ERROR") or options={"exclude": ...}'
    )


@pytest.mark.usefixtures("_no_warnings_yet")
@pytest.mark.parametrize("code", sorted(publish.USER_DECIDED))
def test_what_the_user_decided_neither_warns_nor_raises(code: str, caplog: pytest.LogCaptureFixture) -> None:
    publish.publish(left(code), Options(strict=True))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_strict_raises_the_text_of_the_report() -> None:
    report = left("no-rule")
    with pytest.raises(FusionError) as raised:
        publish.publish(report, Options(strict=True))
    assert str(raised.value) == str(report)
    assert "no-rule: the reason" in str(report)


def test_strict_is_silent_when_there_is_nothing() -> None:
    publish.publish(FusionReport(graph_count=1), Options(strict=True))
