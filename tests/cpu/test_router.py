"""``moefuse::topk`` under the machinery of torch, and the pass that puts it in place of a router's ``torch.topk``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from moefuse import Options
from moefuse.passes.block import router_topk
from moefuse.passes.graph.calls import raw_name
from moefuse.pipeline import rewrite
from moefuse.report.report import FusionReport

T, H, E, K = 12, 8, 8, 3
SCORES = [
    pytest.param(torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), 3, id="plain"),
    pytest.param(torch.zeros(0, 4), 2, id="no-tokens"),
    pytest.param(torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).bfloat16(), 2, id="three-dimensions"),
    pytest.param(torch.randn(8, 5, generator=torch.Generator().manual_seed(2)).t(), 0, id="none-chosen"),
]


@pytest.mark.parametrize(("scores", "k"), SCORES[:2])
def test_opcheck(scores: Tensor, k: int) -> None:
    torch.library.opcheck(torch.ops.moefuse.topk.default, (scores, k))
    torch.library.opcheck(torch.ops.moefuse.topk.default, (scores.clone().requires_grad_(), k))


@pytest.mark.parametrize(("scores", "k"), SCORES)
def test_what_torch_gives(scores: Tensor, k: int) -> None:
    """Values, ids and the gradient, where no two scores are equal."""

    def grad(topk: Any) -> Tensor:
        leaf = scores.clone().requires_grad_()
        values, _ = topk(leaf, k)
        weights = torch.arange(1.0, values.numel() + 1).view(values.shape)
        return torch.autograd.grad((values * weights).sum(), leaf)[0]

    for got, want in zip(torch.ops.moefuse.topk(scores, k), torch.topk(scores, k), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(grad(torch.ops.moefuse.topk), grad(torch.topk))


def test_ties_go_to_the_lowest_id() -> None:
    """0.0 and -0.0 are equal, each keeps its sign; all NaN are, and come first."""
    scores = torch.tensor([[0.0, -0.0, 0.0], [1.0, 2.0, 2.0], [float("nan"), float("inf"), float("nan")]])
    values, ids = torch.ops.moefuse.topk(scores, 2)
    torch.testing.assert_close(values, torch.topk(scores, 2).values, rtol=0, atol=0, equal_nan=True)
    assert ids.tolist() == [[0, 1], [1, 2], [0, 2]]
    assert torch.signbit(values[0]).tolist() == [False, True]


def softmax_first(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = torch.topk(layer.gate(x).float().softmax(-1), K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def softmax_last(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    top = layer.gate(x).topk(K, sorted=False)
    return top.values.softmax(-1), top.indices


def by_groups(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Sigmoid scores, a bias for the choice only, the best groups by their two best (DeepSeek-V3)."""
    scores = layer.gate(x).sigmoid()
    choice = scores + layer.bias
    groups = choice.view(-1, 4, E // 4).topk(2, dim=-1)[0].sum(dim=-1)
    best = torch.topk(groups, k=2, dim=-1, sorted=False)[1]
    mask = torch.zeros_like(groups).scatter_(1, best, 1).unsqueeze(-1).expand(-1, 4, E // 4).reshape(-1, E)
    ids = torch.topk(choice.masked_fill(~mask.bool(), float("-inf")), k=K, dim=-1, sorted=False)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def largest_of_the_negative(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest: another operation."""
    weights, ids = torch.topk(-layer.gate(x).softmax(-1), K, dim=-1, largest=False)
    return -weights, ids


class Layer(nn.Module):
    """Experts that are matrices, each on every token times its routing weight."""

    def __init__(self, route: Callable[..., tuple[Tensor, Tensor]], also: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(H, E, bias=False)
        self.bias = nn.Parameter(torch.randn(E))
        self.experts = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(E))
        self.route, self.also = route, also

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(self, x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out + torch.topk(x, 2)[0].sum(-1, keepdim=True) if self.also else out


def run(model: nn.Module, x: Tensor, dynamic: bool = False, **options: Any) -> tuple[Tensor, FusionReport, Counter[str]]:
    """(result, report, how often each operation is called)."""
    report, names = FusionReport(), Counter[str]()

    def backend(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        report.extend(rewrite.rewrite(gm, example_inputs, Options(**{"router_topk": True, **options})))
        names.update(raw_name(n).replace("::", ".") for n in gm.graph.nodes)
        return gm.forward

    return torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(x), report, names


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that has a kernel for the op."""
    monkeypatch.setattr(router_topk, "DEVICES", {"cpu"})


@pytest.mark.parametrize(("route", "calls", "dynamic"), [(softmax_first, 1, False), (softmax_last, 1, True), (by_groups, 3, True)])
@pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")
def test_a_router_calls_the_op(route: Any, calls: int, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every top-k of the router, results and gradients bit for bit those of torch.topk in the same graph."""
    model, x = Layer(route), torch.randn(T, H, generator=torch.Generator().manual_seed(3))
    got, report, names = run(model, x, dynamic)
    assert len(report.fused) == 1
    assert (names["topk"], names["moefuse.topk"]) == (0, calls)
    assert len(report.notes) == calls
    assert "the router's top-k at test_router.py:" in report.notes[0]
    leaves = [model.gate.weight, *model.experts.parameters()]
    grads = torch.autograd.grad(got.square().sum(), leaves)
    monkeypatch.setattr(router_topk, "DEVICES", set())
    torch._dynamo.reset()
    want, other, names = run(model, x, dynamic)
    assert (names["topk"], names["moefuse.topk"], other.notes) == (calls, 0, [])
    assert torch.equal(got, want)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")
def test_only_the_routers_choice() -> None:
    """A top-k of something else in the same graph is none of ours."""
    _, report, names = run(Layer(softmax_first, also=True), torch.randn(T, H))
    assert len(report.fused) == 1
    assert (names["topk"], names["moefuse.topk"]) == (1, 1)


@pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")
def test_what_the_op_does_not_compute_stays() -> None:
    _, report, names = run(Layer(largest_of_the_negative), torch.randn(T, H))
    assert len(report.fused) == 1
    assert (names["topk"], names["moefuse.topk"], report.notes) == (1, 0, [])


@pytest.mark.usefixtures("fresh_dynamo")
def test_only_where_there_is_a_kernel() -> None:
    """On the CPU torch.topk stays."""
    _, report, names = run(Layer(softmax_first), torch.randn(T, H))
    assert len(report.fused) == 1
    assert (names["topk"], names["moefuse.topk"], report.notes) == (1, 0, [])


@pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")
def test_switched_off() -> None:
    _, report, names = run(Layer(softmax_first), torch.randn(T, H), router_topk=False)
    assert len(report.fused) == 1
    assert (names["topk"], names["moefuse.topk"], report.notes) == (1, 0, [])


@pytest.mark.usefixtures("fresh_dynamo", "on_the_cpu")
def test_regions_that_stay_keep_theirs() -> None:
    _, report, names = run(Layer(softmax_first), torch.randn(T, H), max_rewrites=0)
    assert not report.fused
    assert (names["topk"], names["moefuse.topk"]) == (1, 0)
