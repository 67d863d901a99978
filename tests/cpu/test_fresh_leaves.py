"""Tensors that a layer makes with ``requires_grad=True``: one graph where nobody can reach them, and eager's gradients wherever one can."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing, plain

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, E, K = 8, 4, 2

MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros": lambda x: torch.zeros(len(x), H, requires_grad=True),
    "zeros_like": lambda x: torch.zeros_like(x, requires_grad=True),
    "full": lambda x: torch.full((len(x), H), 0.0, dtype=x.dtype, requires_grad=True),
    "new_zeros": lambda x: x.new_zeros(x.shape, requires_grad=True),
    "requires_grad_": lambda x: torch.zeros_like(x).requires_grad_(),
    "requires_grad_(True)": lambda x: torch.zeros_like(x).requires_grad_(requires_grad=True),
    "detached": lambda x: (x.detach() * 0).requires_grad_(),
}


def without_gradients(x: Tensor) -> Tensor:
    """It is a leaf there, too."""
    with torch.no_grad():
        return torch.zeros_like(x, requires_grad=True)


MAKES["no_grad"] = without_gradients


class Layer(nn.Module):
    """Expert rows are added to what ``begin`` makes; ``end`` says what the layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Linear(6, H)) for _ in range(E))
        self.begin = MAKES["zeros"]
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = begin = self.begin(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return self.end(out, begin)

    def end(self, out: Tensor, begin: Tensor) -> Any:
        return out


def called(run: Callable[[Tensor], Any], model: nn.Module, *, grad: bool, trained: bool) -> list[Any]:
    """What a call returns, which results have gradients, and the gradients of all that is trained."""
    torch.manual_seed(1)
    x = torch.randn(6, H).requires_grad_(trained)
    with torch.set_grad_enabled(grad):
        found = run(x)
    results = found if isinstance(found, tuple) else (found,)
    ends = [r.sum() for r in results if r.requires_grad]
    if ends:
        torch.stack(ends).sum().backward()
    leaves = [*model.parameters(), x]
    # An expert without tokens has no gradient in eager and a zero one behind a fused op.
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in leaves]
    return [*(r.detach() for r in results), *grads, [(r.requires_grad, r.is_leaf) for r in results if r.grad_fn is None or trained]]


def compared(model: Layer, *, grad: bool = True, trained: bool = True, behind: str = "eager", **options: Any) -> Seen:
    torch._dynamo.reset()
    model.requires_grad_(trained)
    twin, seen = copy.deepcopy(model), Seen()
    compiled = torch.compile(model, backend=capturing(seen, plain(**options), behind))
    expected = called(twin, twin, grad=grad, trained=trained)
    torch.testing.assert_close(called(compiled, model, grad=grad, trained=trained)[:-1], expected[:-1], rtol=1e-4, atol=1e-5)
    assert called(compiled, model, grad=grad, trained=trained)[-1] == expected[-1]
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("make", MAKES)
def test_a_leaf_that_nobody_keeps_is_fused(make: str, grad: bool) -> None:
    model = Layer()
    model.begin = MAKES[make]
    seen = compared(model, grad=grad)
    assert (len(seen.graphs), len(seen.report.fused)) == (1, 1), str(seen.report)


@pytest.mark.parametrize("grad", [True, False])
def test_through_autograd_in_one_graph(grad: bool) -> None:
    """The compiler differentiates a graph in which the tensor is none of the leaves."""
    torch._dynamo.reset()
    assert len(compared(Layer(), grad=grad, behind="aot_eager").report.fused) == 1
    model = Layer()
    compiled = torch.compile(model, backend=capturing(Seen()), fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(3, H)), model(torch.ones(3, H)))


class Asks(Layer):
    """Python is told what eager tells it."""

    def end(self, out: Tensor, begin: Tensor) -> Any:
        return out * 2 if begin.requires_grad and begin.is_leaf and out.requires_grad else out


@pytest.mark.parametrize("grad", [True, False])
def test_the_program_asks_whether_it_has_gradients(grad: bool) -> None:
    assert len(compared(Asks(), grad=grad).report.fused) == 1


class Returns(Layer):
    def end(self, out: Tensor, begin: Tensor) -> Any:
        return out, begin


class ReturnsView(Layer):
    def end(self, out: Tensor, begin: Tensor) -> Any:
        return out, begin.view(-1) * 2


class Keeps(Layer):
    def end(self, out: Tensor, begin: Tensor) -> Any:
        self.kept = begin
        return out + begin


class Hooked(Layer):
    def end(self, out: Tensor, begin: Tensor) -> Any:
        begin.register_hook(lambda gradient: self.seen.append(gradient.sum().item()))
        return out

    seen: list[float] = []  # noqa: RUF012  (one for a model and its copy, which each add to it)


@pytest.mark.every_value
@pytest.mark.parametrize("cls", [Returns, ReturnsView, Keeps])
@pytest.mark.parametrize("grad", [True, False])
def test_a_leaf_that_the_program_can_reach_is_left_to_torch(cls: type[Layer], grad: bool) -> None:
    """The graph breaks at it, as it does without moefuse: in front of it there is nothing here, and the rest is one graph."""
    model = cls()
    seen = compared(model, grad=grad)
    leaf = model.kept
    assert leaf is None or (leaf.requires_grad and leaf.is_leaf and (leaf.grad is not None) == grad)
    assert any("requires_grad" in stop for stop in seen.report.graph_breaks) or not (grad or cls is not ReturnsView), str(seen.report)


def test_a_hook_on_it_is_called() -> None:
    Hooked.seen = []
    compared(Hooked())
    assert len(set(Hooked.seen)) == 1
    assert len(Hooked.seen) > 1


def test_a_result_that_has_gradients_by_the_leaf_alone() -> None:
    """All weights are frozen: eager's result has gradients nevertheless, and so it has here."""
    seen = compared(Layer(), trained=False)
    assert any("requires_grad" in stop for stop in seen.report.graph_breaks), str(seen.report)


class Differentiates(Layer):
    """A gradient that the call itself computes."""

    def forward(self, x: Tensor) -> Any:
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad((inner * inner).sum(), inner)
        return super().forward(x) + gradient


def test_a_gradient_inside_of_the_call() -> None:
    compared(Differentiates())


def test_without_capture_nothing_is_changed() -> None:
    seen = compared(Layer(), capture=False)
    assert any("requires_grad" in stop for stop in seen.report.graph_breaks), str(seen.report)


class Transformed(nn.Module):
    """Under ``torch.func`` gradients are those of another level."""

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return (row * torch.ones_like(row, requires_grad=True)).sum()

        found: Tensor = torch.func.vmap(torch.func.grad(energy))(x)
        return found


def test_inside_of_a_transform_it_is_torchs() -> None:
    x = torch.randn(3, H)
    torch.testing.assert_close(torch.compile(Transformed(), backend=capturing(Seen()))(x), Transformed()(x))


def test_frozen_experts_are_fused_behind_the_break() -> None:
    """The result has gradients because of the leaf alone, so the graph breaks there; behind it nobody knows how many rows the leaf has."""
    torch._dynamo.reset()
    model, seen = Layer().requires_grad_(False), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for tokens in (6, 9, 11):
        x = torch.randn(tokens, H)
        found = compiled(x)
        torch.testing.assert_close(found, model(x))
        assert found.requires_grad
    assert len(seen.report.fused) == 2
    assert "not-lowered" not in seen.codes
