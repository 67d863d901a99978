"""verify="graph": what makes a rewritten graph differ is found and named, and nothing of the user's is touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse.config import Options
from moefuse.passes import driver
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport

E, K, H, INNER = 4, 2, 8, 6


class Layer(nn.Module):
    """An expert layer with a count of its choices, a scale that is one, and a draw of random numbers that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, 2 * INNER, H)), nn.Parameter(torch.randn(E, H, INNER))
        self.scale = nn.Parameter(torch.ones(H))
        self.register_buffer("usage", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        self.usage.add_(F.one_hot(ids, E).sum((0, 1)))
        dense = torch.zeros(x.shape[0], E).scatter(1, ids, weights)
        gate, up = torch.einsum("th,eih->tei", x, self.w_in).chunk(2, -1)
        y = torch.einsum("te,teh->th", dense, torch.einsum("tei,ehi->teh", F.silu(gate) * up, self.w_out))
        return x + (y + 0.0 * torch.rand_like(x)) * self.scale


class Loop(nn.Module):
    """Experts in a loop over those that have tokens: capture traces one of them for all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, INNER), nn.ReLU(), nn.Linear(INNER, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, E).permute(2, 1, 0)
        for e in (mask.sum((-1, -2)) > 0).nonzero():
            slot, tok = torch.where(mask[e[0]])
            out.index_add_(0, tok, self.experts[e[0]](x[tok]) * weights[tok, slot, None])
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False) * 2


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    torch.manual_seed(0)


def compiled(model: nn.Module, reports: list[FusionReport]) -> Any:
    """The model, compiled by nobody behind moefuse."""

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        reports.append(rewrite.rewrite(gm, inputs, Options(verify="graph")))
        return gm.forward

    return torch.compile(model, backend=backend)


def report_of(model: nn.Module) -> FusionReport:
    reports: list[FusionReport] = []
    compiled(model, reports)(torch.randn(5, H, requires_grad=True))
    (report,) = reports
    return report


def injected(monkeypatch: pytest.MonkeyPatch, fault: Callable[[GraphModule], object]) -> None:
    """A driver that makes a mistake after it has fused, where it has."""
    right = driver.fuse

    def wrong(gm: GraphModule, *args: Any, **options: Any) -> Any:
        result = right(gm, *args, **options)
        if result.fused:
            fault(gm)
            for module in (m for m in gm.modules() if isinstance(m, GraphModule)):
                module.recompile()
        return result

    monkeypatch.setattr(driver, "fuse", wrong)


def calls(gm: GraphModule, name: str) -> list[Node]:
    modules = [m for m in gm.modules() if isinstance(m, GraphModule)]
    found = [n for m in modules for n in m.graph.nodes if n.op.startswith("call") and name in str(n.target)]
    assert found, name
    return found


def fused(gm: GraphModule) -> Node:
    return calls(gm, "moefuse.experts")[0]


def drop_write(gm: GraphModule) -> None:
    (node,) = calls(gm, "add_")
    node.graph.erase_node(node)


def drop_scale(gm: GraphModule) -> None:
    *_, node = calls(gm, "mul")
    node.replace_all_uses_with(node.args[0])


def skip_draw(gm: GraphModule) -> None:
    (node,) = calls(gm, "rand_like")
    node.target = torch.zeros_like


def scale_result(gm: GraphModule) -> None:
    node = fused(gm)
    weights = node.args[2]
    with node.graph.inserting_before(node):
        node.replace_input_with(weights, node.graph.call_function(torch.mul, (weights, 1.001)))


def cut_result(gm: GraphModule) -> None:
    node = fused(gm)
    with node.graph.inserting_before(node):
        node.graph.call_function(torch._C._set_grad_enabled, (False,))
    with node.graph.inserting_after(node):
        node.graph.call_function(torch._C._set_grad_enabled, (True,))


def detach_weight(gm: GraphModule) -> None:
    node = fused(gm)
    (weight,) = node.args[5]  # type: ignore[misc]
    with node.graph.inserting_before(node):
        node.replace_input_with(weight, node.graph.call_method("detach", (weight,)))


def double_gradient(gm: GraphModule) -> None:
    node = fused(gm)
    x = node.args[0]
    with node.graph.inserting_before(node):
        held = node.graph.call_method("detach", (x,))
        twice = node.graph.call_function(torch.add, (x, x))
        node.replace_input_with(x, node.graph.call_function(torch.sub, (twice, held)))


def write_input(gm: GraphModule) -> None:
    (x,) = [n for n in gm.graph.find_nodes(op="placeholder") if "x" in str(n.target).split("_")]
    (end,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(end):
        detached = gm.graph.call_method("detach", (x,))
        gm.graph.call_method("add_", (detached, 1))


FAULTS: dict[str, tuple[Callable[[GraphModule], None], str]] = {
    "a buffer is not written": (drop_write, "['usage']` afterwards"),
    "a scale of one is left out": (drop_scale, "output 0: it differs"),
    "a draw is left out": (skip_draw, "the state of the random number generator"),
    "the result is not quite right": (scale_result, "the result of the experts: it differs by 1.00e-03"),
    "the result has no gradient": (cut_result, "the result of the experts: it has no gradient"),
    "a weight has no gradient": (detach_weight, "['w_out']`: it is gone"),
    "the input's gradient is wrong": (double_gradient, "the gradient of `L['x']`: it differs"),
    "an input is written": (write_input, "`L['x']` afterwards"),
}


@pytest.mark.code_elsewhere
@pytest.mark.parametrize("model", [Layer, Loop, Checkpointed], ids=lambda m: m.__name__)
def test_equal_graphs_pass(model: type[nn.Module]) -> None:
    """Layers, bodies of checkpoints, and loops of which the graph has one iteration."""
    module, x = model(), torch.randn(5, H)
    expected = copy.deepcopy(module)
    got = torch.compile(module, backend="moefuse", options={"verify": "graph"})(x)
    report = moefuse.last_report()
    assert report is not None
    assert (len(report.fused), report.skipped) == (1, [])
    assert not [note for note in report.notes if "compared" in note]
    torch.testing.assert_close(got, expected(x))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_difference_restores_the_graph(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a mistake that the check of the region alone cannot see, as it is made behind it."""
    make, name = FAULTS[fault]
    injected(monkeypatch, make)
    model, x = Layer(), torch.randn(5, H, requires_grad=True)
    other, y = copy.deepcopy(model), x.detach().clone().requires_grad_()
    reports: list[FusionReport] = []
    torch.manual_seed(1)
    got = compiled(model, reports)(x)
    got.square().sum().backward()
    (skipped,) = reports[0].skipped
    assert (skipped.code, reports[0].fused) == ("graph-differs", [])
    assert name in skipped.message
    torch.manual_seed(1)
    want = other(y)
    want.square().sum().backward()
    assert torch.equal(got, want)
    assert torch.equal(model.usage, other.usage)
    for mine, theirs in zip((x, *model.parameters()), (y, *other.parameters()), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_faults_in_a_checkpoint_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, scale_result)
    (skipped,) = report_of(Checkpointed()).skipped
    assert "the result of the experts" in skipped.message


def test_nothing_of_the_users_is_touched() -> None:
    model, x = Layer(), torch.randn(5, H)
    state, before, random = copy.deepcopy(model.state_dict()), x.clone(), torch.get_rng_state()
    seen: list[FusionReport] = []

    def look(gm: GraphModule, inputs: list[Any]) -> Any:
        seen.append(rewrite.rewrite(gm, inputs, Options(verify="graph")))
        assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), random)
        return gm.forward

    torch.compile(model, backend=look)(x)
    assert torch.equal(x, before)
    assert [len(report.fused) for report in seen] == [1]


def test_what_does_not_run_by_itself_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the regions alone have been compared, and the report says so."""
    from moefuse.passes.prove import validate

    def fail(*_: Any) -> Any:
        raise NotImplementedError("no such input")

    monkeypatch.setattr(validate, "inputs", fail)
    report = report_of(Layer())
    assert len(report.fused) == 1
    assert report.notes == [
        'verify="graph": the graph does not run by itself, so only its regions were compared (NotImplementedError: no such input)'
    ]


@pytest.mark.usefixtures("as_traced")
def test_the_probe_alone_does_not_look_at_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    from moefuse.passes.prove import validate

    monkeypatch.setattr(validate, "validate", lambda *_: pytest.fail("compared"))
    torch.compile(Layer(), backend="moefuse")(torch.randn(5, H))


class Unrolled(Loop):
    """Every expert in the graph: its sizes depend on data, which is traced for moefuse's sake only."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@pytest.mark.code_elsewhere
@pytest.mark.parametrize("model", [Loop, Unrolled], ids=lambda m: m.__name__)
def test_what_only_moefuse_could_trace_is_traced_again(model: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration stands for several, or sizes depend on data: without the fused op Inductor must not get such a graph."""
    injected(monkeypatch, scale_result)
    module, x = model(), torch.randn(5, H)
    got = torch.compile(module, backend="moefuse", options={"verify": "graph"})(x)
    torch.testing.assert_close(got, module(x))
    report = moefuse.last_report()
    assert report is not None
    assert report.fused == []
    assert [s.code for s in report.skipped] == ["graph-differs"]


def test_strict_raises_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    injected(monkeypatch, scale_result)
    with pytest.raises(moefuse.FusionError, match="graph-differs: run as a whole before and after the rewrite"):
        torch.compile(Unrolled(), backend="moefuse", options={"verify": "graph", "strict": True})(torch.randn(5, H))
