"""What a program's user does to modules between calls: in eager every call of an expert sees it, so a captured loop must."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H = 4, 8


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 6), nn.Linear(6, H)

    @property
    def slope(self) -> float:
        return 0.5

    def act(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.act(self.up(x)))
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        return mixed(self.gate, self.experts, x)


def mixed(gate: nn.Module, experts: Any, x: Tensor) -> Tensor:
    weights, ids = gate(x).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for e in range(E):
        token, slot = torch.where(ids == e)
        if token.numel():
            out.index_add_(0, token, experts[e](x[token]) * weights[token, slot, None])
    return out


def _forward(layer: Layer) -> Iterator[Any]:
    yield layer.experts[1].register_forward_hook(lambda _m, _a, out: out * 5)


def _pre(layer: Layer) -> Iterator[Any]:
    yield layer.experts[2].register_forward_pre_hook(lambda _m, args: (args[0] * 3,))


def _inside(layer: Layer) -> Iterator[Any]:
    # Of one expert alone Dynamo would not see it either: the experts share their code, and the guards on it.
    handles = [expert.down.register_forward_hook(lambda _m, _a, out: out - 1) for expert in layer.experts]
    yield handles[0]
    for handle in handles:
        handle.remove()


def _keywords(layer: Layer) -> Iterator[Any]:
    yield layer.experts[0].register_forward_hook(lambda _m, _a, _k, out: out - 1, with_kwargs=True)


def _backward(layer: Layer) -> Iterator[Any]:
    yield layer.experts[3].register_full_backward_hook(lambda _m, grads, _g: (grads[0] * 2,))


def _everywhere(_layer: Layer) -> Iterator[Any]:
    yield nn.modules.module.register_module_forward_hook(lambda m, _a, out: out * 2 if isinstance(m, Expert) else None)


def _of_the_class(name: str, other: Any) -> Iterator[Any]:
    old = vars(Expert)[name]
    setattr(Expert, name, other)
    yield None
    setattr(Expert, name, old)


def _forward_of_the_class(_layer: Layer) -> Iterator[Any]:
    return _of_the_class("forward", lambda self, x: self.down(x[:, :6]))


def _method(_layer: Layer) -> Iterator[Any]:
    return _of_the_class("act", lambda self, x: x.tanh())


def _property(_layer: Layer) -> Iterator[Any]:
    return _of_the_class("slope", property(lambda self: 0.25))


def _step(run: Callable[[Tensor], Tensor], layer: Layer, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    fed = x.clone().requires_grad_()
    out = run(fed)
    out.square().sum().backward()
    return [out.detach(), fed.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks")
@pytest.mark.parametrize(
    "change",
    [_forward, _pre, _inside, _keywords, _backward, _everywhere, _forward_of_the_class, _method, _property],
    ids=lambda f: f.__name__.strip("_"),
)
def test_what_is_put_on_a_module_later(change: Callable[[Layer], Iterator[Any]]) -> None:
    """Dynamo guards no hooks by default: without capture the loop's calls run in eager and see them."""
    torch.manual_seed(0)
    layer = Layer().double()
    seen = Seen()
    compiled = torch.compile(layer, backend=capturing(seen))
    inputs = [torch.randn(9, H, dtype=torch.float64) for _ in range(6)]

    def check(x: Tensor) -> None:
        for got, expected in zip(_step(compiled, layer, x), _step(layer, layer, x), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)

    for x in inputs[:2]:
        check(x)
    assert len(seen.report.fused) == 1, "the loop is not captured, and the test says nothing"
    changed = change(layer)
    handle = next(changed)
    for x in inputs[2:4]:
        check(x)
    if handle is not None:
        handle.remove()
    next(changed, None)
    for x in inputs[4:]:
        check(x)


def test_a_module_that_has_a_hook_already() -> None:
    """One compiled function, two models: hooks are those of the model that it is called with."""
    torch.manual_seed(0)
    layers = [Layer().double() for _ in range(2)]
    layers[1].experts[1].register_forward_hook(lambda _m, _a, out: out * 5)
    seen = Seen()
    compiled = torch.compile(lambda layer, x: layer(x), backend=capturing(seen))
    with torch.no_grad():
        for at in (0, 1, 0, 1):
            x = torch.randn(9, H, dtype=torch.float64)
            torch.testing.assert_close(compiled(layers[at], x), layers[at](x), rtol=1e-12, atol=1e-12)
    assert seen.report.fused


def test_experts_in_a_list() -> None:
    """A Python list cannot be watched: its modules are looked at in every call."""
    torch.manual_seed(0)
    gate, experts, seen = nn.Linear(H, E).double(), [Expert().double() for _ in range(E)], Seen()
    compiled = torch.compile(mixed, backend=capturing(seen))
    with torch.no_grad():
        for at in range(3):
            if at == 1:
                experts[1].register_forward_hook(lambda _m, _a, out: out * 5)
            x = torch.randn(9, H, dtype=torch.float64)
            torch.testing.assert_close(compiled(gate, experts, x), mixed(gate, experts, x), rtol=1e-12, atol=1e-12)
    assert seen.report.fused


def test_hooks_elsewhere_recompile_nothing() -> None:
    """Every hook anywhere moves the number on: only hooks on the frame's own modules may cost a compilation."""
    torch.manual_seed(0)
    layer, seen = Layer().double(), Seen()
    compiled = torch.compile(layer, backend=capturing(seen))
    x = torch.randn(9, H, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(4):
            compiled(x)
            nn.Linear(2, 2).register_forward_hook(lambda *_: None)
            torch.ones(2, requires_grad=True).register_hook(lambda g: g)
    assert len(seen.graphs) == 1
