"""Graphs that moefuse cannot copy: a program runs as without moefuse, and is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from moefuse import FusionError
from moefuse.capture.dynamo import order
from moefuse.passes.graph import snapshot
from moefuse.pipeline import rewrite
from tests.cpu.beside_eager import H, MoE, check
from tests.cpu.capture_case import Seen, capturing, plain

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _early(gm: fx.GraphModule) -> fx.Node | None:
    """Move the weights of the router to the front, which is in front of what they are taken from."""
    node = next((n for n in gm.graph.nodes if n.op == "call_function" and any(i.name.startswith("topk") for i in n.all_input_nodes)), None)
    if node is not None:
        next(iter(gm.graph.nodes)).prepend(node)
    return node


@pytest.fixture
def _disordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every graph that has both the router and a loop is as torch 2.11 leaves it for a hook on rows."""
    original = rewrite.rewrite_and_keep

    def disorder(gm: fx.GraphModule, *args: Any) -> Any:
        if any(n.name.startswith("where") for n in gm.graph.nodes):
            _early(gm)
        return original(gm, *args)

    monkeypatch.setattr(rewrite, "rewrite_and_keep", disorder)


class Hooked(MoE):
    """A hook on the rows of each expert, which changes their gradients."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows = x[tok]
            if rows.requires_grad:
                rows.register_hook(_twice)
            out.index_add_(0, tok, expert(rows) * weights[tok, slot, None])
        return out


def _twice(grad: Tensor) -> Tensor:
    return grad * 2


class Plain(MoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.add_experts(torch.zeros_like(x), x, *self.route(x))


@pytest.mark.parametrize("behind", ["eager", "aot_eager"])
def test_hooks_on_rows(behind: str) -> None:
    """As torch gives the graph, whichever torch that is."""
    seen = check(Hooked, behind=behind)
    assert seen.codes & {"hook", "not-captured", "no-rule"}
    assert "internal-error" not in seen.codes


@pytest.mark.usefixtures("_disordered")
def test_a_graph_out_of_order(caplog: pytest.LogCaptureFixture) -> None:
    """It was a graph only because of capture: the frame is traced again without, and all it says is that."""
    seen = check(Plain, behind="aot_eager")
    (told,) = {s for s in seen.report.skipped if s.code == "not-captured"}
    assert "Dynamo has put it in front of what it reads" in told.message
    assert told.location.startswith(__file__.replace("test_disordered_graphs", "beside_eager"))
    assert not seen.report.fused
    assert "Traceback" not in caplog.text


@pytest.mark.usefixtures("_disordered")
def test_strict_says_so() -> None:
    model = torch.compile(Plain(), backend="moefuse", options={"strict": True})
    with pytest.raises(FusionError, match="in front of what it reads"):
        model(torch.randn(13, H))


def test_a_graph_that_cannot_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whatever other reason."""

    def fails(graph: fx.Graph) -> fx.Graph:
        raise NotImplementedError("no copies")

    monkeypatch.setattr(snapshot, "copy_graph", fails)
    seen = check(Plain, behind="aot_eager")
    assert seen.codes == {"internal-error"}
    assert not seen.report.fused


def test_order_is_put_right() -> None:
    class Three(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return ((x + 1) * 2).relu()

    graph = fx.symbolic_trace(Three()).graph
    wanted = [n.name for n in graph.nodes]
    assert order.early(graph) is None
    nodes = {n.name: n for n in graph.nodes}
    nodes["x"].prepend(nodes["relu"])
    nodes["x"].prepend(nodes["mul"])
    assert order.early(graph) is nodes["relu"]
    order.put_right(graph)
    assert [n.name for n in graph.nodes] == wanted
    graph.lint()


def test_one_graph_of_the_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was captured: the graph goes on as it is."""
    seen = Seen()

    def fails(graph: fx.Graph) -> fx.Graph:
        raise NotImplementedError("no copies")

    monkeypatch.setattr(snapshot, "copy_graph", fails)
    compiled = torch.compile(nn.Linear(H, H), backend=capturing(seen, plain()))
    compiled(torch.randn(3, H))
    assert seen.codes == {"internal-error"}
