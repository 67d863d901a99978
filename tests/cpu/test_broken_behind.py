"""A graph that breaks behind a layer: what came before it is one graph with the experts in it, whoever compiled the layer besides."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse import Options
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, K = 8, 6, 3, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """No condition is in the loop, so nothing is assumed: only sizes that depend on data make it one graph."""

    def __init__(self, top_k: int = K) -> None:
        super().__init__()
        self.top_k, self.router = top_k, nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.of_one(expert, x[token]) * weights[token, slot, None])
        return out

    def of_one(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows)  # type: ignore[no-any-return]


class Mixing(Layer):
    """An expert's rows depend on each other: no mixture that can be fused."""

    def of_one(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows - rows.mean(0))  # type: ignore[no-any-return]


class Balanced(Layer):
    """What is used much is told less of itself: a loop behind the experts' that depends on data, where Dynamo cannot break a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usage", torch.zeros(E))
        self.busy: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        with torch.no_grad():
            counts = torch.bincount(self.router(x).argmax(-1), minlength=E).float()
            for e in range(E):
                self.usage[e] += counts[e]
                if self.usage[e] > self.usage.mean():
                    self.busy.append(e)
        return out * 2


class BalancedMixing(Balanced):
    def of_one(self, expert: nn.Module, rows: Tensor) -> Tensor:
        return expert(rows - rows.mean(0))  # type: ignore[no-any-return]


class BalancedFirst(Balanced):
    """The loop is in front: what it calls behind is a frame of its own."""

    def forward(self, x: Tensor) -> Tensor:
        for e in range(E):
            if self.usage[e] > self.usage.mean():
                self.busy.append(e)
            self.usage[e] += x[e].sum().detach()
        return Layer.forward(self, x)


class BalancedInside(Layer):
    """One loop does both."""

    def __init__(self) -> None:
        super().__init__()
        self.busy: list[int] = []

    def of_one(self, expert: nn.Module, rows: Tensor) -> Tensor:
        if rows.sum() > 0:
            self.busy.append(len(self.busy))
        return expert(rows)  # type: ignore[no-any-return]


def backward(loss: Tensor) -> None:
    loss.backward()


def broken(loss: Tensor) -> None:
    torch._dynamo.graph_break()
    loss.backward()


def stepping(layer: nn.Module, behind: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        loss = layer(x).square().mean()
        behind(loss)
        return loss.detach()

    return step


@pytest.mark.every_value
@pytest.mark.parametrize("behind", [backward, broken])
@pytest.mark.parametrize("twice", [False, True])
def test_a_step_that_breaks_behind_the_layer(twice: bool, behind: Callable[[Tensor], None]) -> None:
    """The layer that is compiled in place too is inlined where the step is compiled: its experts belong to the step's graph."""
    torch.manual_seed(0)
    layer = Layer()
    twin, x, seen, inner = copy.deepcopy(layer), torch.randn(10, H), Seen(), Seen()
    if twice:
        layer.compile(backend=capturing(inner, behind="aot_eager"))
    got = torch.compile(stepping(layer, behind), backend=capturing(seen, behind="aot_eager"))(x)
    torch.testing.assert_close(got, stepping(twin, behind)(x))
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert (len(seen.report.fused), seen.report.skipped, inner.graphs) == (1, [], []), seen.report


def test_two_calls_of_one_layer_with_a_break_between() -> None:
    seen, layer = Seen(), Layer()

    def program(x: Tensor) -> Tensor:
        x = layer(x)
        torch._dynamo.graph_break()
        return layer(x)  # type: ignore[no-any-return]

    x = torch.randn(10, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend=capturing(seen))(x), program(x))
    assert (len(seen.report.fused), seen.report.skipped) == (2, []), seen.report


def test_nothing_is_changed_where_nothing_is_fused() -> None:
    """Sizes that depend on data and no experts: the graph breaks where it does without moefuse."""

    def program(x: Tensor) -> Tensor:
        chosen = x[x.sum(-1) > 0].sum(0)
        torch._dynamo.graph_break()
        return chosen * 2

    def graphs(capture: bool) -> list[int]:
        torch._dynamo.reset()
        seen, x = Seen(), torch.randn(10, H)
        torch.testing.assert_close(torch.compile(program, backend=capturing(seen, Options(capture=capture)))(x), program(x))
        return [len(gm.graph.nodes) for gm in seen.graphs]

    assert graphs(True) == graphs(False)


def test_what_is_refused_is_left_to_the_frames_of_its_own() -> None:
    """Fused or not, the second layer's refusal is told, and values are as in eager."""
    torch.manual_seed(0)
    seen, model = Seen(), nn.Sequential(Layer(), Mixing())

    def program(x: Tensor) -> Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return y * 2  # type: ignore[no-any-return]

    x = torch.randn(10, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(program, backend=capturing(seen))(x), program(x))
    assert len(seen.report.fused) == 1, seen.report
    assert seen.report.skipped, seen.report


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "fused"),
    [(Balanced, 1), (BalancedMixing, 0), (BalancedFirst, 1), (BalancedInside, 0)],
    ids=["behind", "refused", "in front", "inside"],
)
def test_a_loop_that_no_graph_can_have(kind: type[Layer], fused: int) -> None:
    """The graph ends in front of it where experts are fused before, and else the frame is as without moefuse."""
    torch.manual_seed(0)
    layer, seen = kind(), Seen()
    twin = copy.deepcopy(layer)
    layer.compile(backend=capturing(seen, behind="aot_eager"))
    for tokens in (10, 10, 7):
        x = torch.randn(tokens, H)
        got, expected = layer(x), twin(x)
        torch.testing.assert_close(got, expected)
        got.square().sum().backward()
        expected.square().sum().backward()
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)
    assert layer.busy == twin.busy
    assert len(seen.report.fused) >= fused
    assert bool(seen.report.fused) == bool(fused), seen.report


def test_two_layers_that_balance() -> None:
    """The one's graph does for the other, whose code and sizes are the same."""
    seen, model = Seen(), nn.Sequential(Balanced(), Balanced())
    twin, x = copy.deepcopy(model), torch.randn(10, H)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), twin(x))
    assert [layer.busy for layer in model] == [layer.busy for layer in twin]
    assert seen.report.fused, seen.report
    assert not seen.report.skipped, seen.report
