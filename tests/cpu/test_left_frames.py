"""One layer that is not fused leaves the others as they are: Dynamo gives up on code, a reason is one layer's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "as_traced")

E, H, K = 3, 8, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 6, bias=False), nn.Linear(6, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def mixed(x: Tensor, weights: Tensor, ids: Tensor, experts: nn.ModuleList) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    return out


class Helped(Layer):
    """The loop is in a function, whose frame has a list of modules and no layer."""

    def forward(self, x: Tensor) -> Tensor:
        return mixed(x, *self.router(x).softmax(-1).topk(K), self.experts)


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Layer) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


X = torch.randn(11, H, generator=torch.Generator().manual_seed(0))


def ran(model: nn.Module, calls: int = 2, **options: Any) -> moefuse.FusionReport:
    """The report of some calls without gradients, each compared with eager."""
    compiled = torch.compile(model, backend="moefuse", options=options)
    with torch.no_grad():
        for _ in range(calls):
            torch.testing.assert_close(compiled(X), model(X))
    report = moefuse.last_report()
    assert report is not None
    return report


def fused(report: moefuse.FusionReport) -> list[str]:
    return sorted(f.module for f in report.fused)


def doubled(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, out: out * 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", [Layer, Helped])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_excluded_layer_takes_no_other_with_it(kind: type[nn.Module], left: int) -> None:
    """The first one had Dynamo skip the code of all; one after it ran the code of a fused one."""
    report = ran(Stack(kind), exclude=rf"layers\.{left}$", strict=True)
    assert fused(report) == [f"layers.{other}" for other in range(3) if other != left]
    assert [(s.code, s.module) for s in report.skipped] == [("excluded", f"layers.{left}")]


def test_excluded_layers_share_code_with_each_other() -> None:
    """Two kinds of layers are two compilations, however many layers there are."""
    report = ran(Stack(), exclude=r"layers\.[02]$", expect=1)
    assert fused(report) == ["layers.1"]
    assert {s.module for s in report.skipped} == {"layers.0", "layers.2"}


@pytest.mark.parametrize("at", [0, 1])
def test_a_refused_layer_takes_no_other_with_it(at: int) -> None:
    """A hook on one expert is a reason not to fuse that expert's layer."""
    model = Stack()
    doubled(model.layers[at].experts[1])
    report = ran(model)
    assert fused(report) == [f"layers.{other}" for other in range(3) if other != at]
    assert [s.module for s in report.skipped] == [f"layers.{at}"]


def test_a_refused_model_takes_no_other_with_it() -> None:
    """Neither the layer of another model of that class, nor what was fused of it before."""
    first, second, third = Layer(), Layer(), Layer()
    doubled(second.experts[1])
    kept = torch.compile(first, backend="moefuse", options={"expect": 1})
    with torch.no_grad():
        kept(X)
        assert not ran(second).fused
        assert fused(ran(third)) == [""]
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(kept(X), first(X))


@pytest.mark.parametrize("order", ["called before", "called between"])
def test_another_backend_takes_nothing_with_it(order: str) -> None:
    """torch's own backends break the graph at the loop, and Dynamo then skips its code for every backend."""
    first, second = Stack(), Stack()
    other = torch.compile(first, backend="eager")
    if order == "called before":
        other(X)
    ours = torch.compile(second, backend="moefuse", options={"expect": 3})
    with torch.no_grad():
        torch.testing.assert_close(other(X), first(X))
        torch.testing.assert_close(ours(X), second(X))
        torch.testing.assert_close(other(X), first(X))
        with torch.compiler.set_stance("fail_on_recompile"):
            torch.testing.assert_close(ours(X), second(X))
    report = moefuse.last_report()
    assert report is not None
    assert len(report.fused) == 3


def test_a_function_that_another_backend_has_left() -> None:
    """A function has its experts among its arguments, which nobody knows before the call."""
    layer = Helped()
    weights, ids = layer.router(X).softmax(-1).topk(K)
    with torch.no_grad():
        torch.compile(mixed, backend="eager")(X, weights, ids, layer.experts)
        compiled = torch.compile(mixed, backend="moefuse", options={"expect": 1})
        torch.testing.assert_close(compiled(X, weights, ids, layer.experts), layer(X))


class Late(Layer):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token = torch.where((ids == e).any(-1))[0]
            out[token] += expert(x[token]) * (weights * (ids == e)).sum(-1)[token, None]
        return out


class Halting(Stack):
    """The graph breaks in a loop, and so all that it calls is compiled by itself."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            torch._dynamo.graph_break()
            x = x + layer(x)
        return x


def test_a_layer_that_came_after_the_compilation_is_told_why() -> None:
    """Dynamo does not ask about its code again, and moefuse did not know that it would be needed."""
    torch.compile(Late(), backend="eager")(X)
    model = Halting(nn.Identity)
    compiled = torch.compile(model, backend="moefuse")
    model.layers[1] = Late()
    compiled(X)
    report = moefuse.last_report()
    assert report is not None
    (told,) = report.skipped
    assert (told.code, told.module) == ("nothing-found", "layers.1")
    assert "an earlier torch.compile, of another model or backend, had Dynamo skip this code" in told.message


class Noisy(Layer):
    """Random numbers inside of the experts in training only."""

    def __init__(self) -> None:
        super().__init__()
        for expert in self.experts:
            expert.register_forward_hook(lambda module, _args, out: out + torch.randn_like(out) if module.training else out)


def test_another_mode_is_another_try() -> None:
    """A layer that was left in training is fused in eval, without torch.compiler.reset()."""
    model = Noisy()
    compiled = torch.compile(model, backend="moefuse")
    compiled(X)
    assert not moefuse.last_report().fused  # type: ignore[union-attr]
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X))
    assert fused(moefuse.last_report()) == [""]  # type: ignore[arg-type]


def test_a_left_frame_is_traced_once() -> None:
    """What is left in one mode is not tried with every call."""
    from torch._dynamo.utils import counters

    model = Stack()
    for layer in model.layers:
        doubled(layer.experts[1])
    compiled = torch.compile(model, backend="moefuse")
    compiled(X)
    frames = counters["frames"]["ok"]
    compiled(X)
    assert counters["frames"]["ok"] == frames


class Asking(Layer):
    """Passes over experts without tokens: without any at all, torch traces nothing of them."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


@pytest.mark.every_value
@pytest.mark.parametrize("kind", [Layer, Asking])
@pytest.mark.parametrize("train", [False, True])
def test_no_tokens_in_the_first_call(kind: type[nn.Module], train: bool) -> None:
    """They take nothing from later calls, nor from other layers, which run the same code; and are not traced in every call."""
    from torch._dynamo.utils import counters

    model = Stack(kind)
    compiled = torch.compile(model, backend="moefuse")
    frames = []
    with torch.set_grad_enabled(train):
        for count in (0, 0, 7, 0):
            x = X[:count].clone().requires_grad_(train)
            torch.testing.assert_close(compiled(x), model(x))
            frames.append(counters["frames"]["total"])
            if count:
                assert fused(moefuse.last_report()) == ["layers.0", "layers.1", "layers.2"]  # type: ignore[arg-type]
    assert (frames[1], frames[3]) == (frames[0], frames[2])


def test_nothing_holds_on_to_a_model() -> None:
    """Neither what is remembered of a frame that was left, nor the guard of an excluded layer."""
    model = Stack()
    ran(model, exclude=r"layers\.0$")
    gone = weakref.ref(model.layers[1].experts)
    del model
    gc.collect()
    assert gone() is None
