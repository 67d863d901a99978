"""What is in the way is named where Dynamo stops before any rule sees it, and where a refusal's usual words would be untrue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import moefuse
from tests.cpu.test_messages import WIDTH, E, H, K, Layer, T, told_of_a_graph


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    """Statistics of a batch need two rows for an expert."""
    torch.manual_seed(0)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(H, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.norm(self.up(x))))  # type: ignore[no-any-return]


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(E))


class Twice(Layer):
    """The same experts twice into one accumulator."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for _ in range(2):
            for e, expert in enumerate(self.experts):
                tok, slot = torch.where(ids == e)
                out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


def hooked(register: str) -> Callable[[], Layer]:
    def build() -> Layer:
        layer = Layer()
        for expert in layer.experts:
            getattr(expert, register)(lambda *_: None)
        return layer

    return build


def doubled() -> Layer:
    def double(_module: Any, _inputs: Any, out: Tensor) -> None:
        out.register_hook(lambda grad: grad * 2)

    layer = Layer()
    for expert in layer.experts:
        expert.register_forward_hook(double)
    return layer


MIXED = "`batch_norm` takes the rows of an expert together"
WATCHED = "a hook observes a value inside the experts"
CASES: dict[str, tuple[Callable[[], Layer], str, str]] = {
    "batch norm in training": (lambda: Normed().train(), "not-row-local", MIXED),
    "batch norm": (lambda: Normed().eval(), "nothing-found", "in batchnorm.py at"),
    "backward hook": (hooked("register_full_backward_hook"), "hook", WATCHED),
    "hook before backward": (hooked("register_full_backward_pre_hook"), "hook", WATCHED),
    "hook of a tensor": (doubled, "hook", WATCHED),
    "twice": (Twice, "missing-experts", "the experts are computed 2 times into one sum here"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("fresh_dynamo", "as_traced")
def test_the_reason_is_named(name: str) -> None:
    build, code, text = CASES[name]
    report = moefuse.explain(build(), torch.randn(T, H))
    assert code in [s.code for s in report.skipped], report
    found = next(s for s in report.skipped if s.code == code)
    assert text in found.message, found.message
    assert not told_of_a_graph(report)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_hook_of_the_router_is_none_of_the_experts() -> None:
    layer = Layer()
    layer.router.register_full_backward_hook(lambda *_: None)
    assert "hook" not in [s.code for s in moefuse.explain(layer, torch.randn(T, H)).skipped]


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_value_that_a_hook_gives_away_has_a_line() -> None:
    """The graph returns it, and that is no statement of the program's."""
    kept: list[Tensor] = []
    layer = Layer()
    for expert in layer.experts:
        expert.register_forward_hook(lambda _module, _inputs, out: kept.append(out))
    (found,) = moefuse.explain(layer, torch.randn(T, H)).skipped
    assert found.code == "value-escapes"
    assert ".py:" in found.location


class Bounded(Layer):
    """Segments of sorted slots, one of them cut: a graph that is given up, and its pieces are left as well."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        order = ids.flatten().argsort(stable=True)
        tok, ends = order // K, torch.bincount(ids.flatten(), minlength=E).cumsum(0).tolist()
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            start, end = ends[e - 1] if e else 0, ends[e] if e else min(ends[e], 3)
            rows, slots = tok[start:end], order[start:end]
            out.index_add_(0, rows, expert(x[rows]) * weights.flatten()[slots, None])
        return out


class Guarded(Layer):
    """A look for what is no number, in front of the experts or behind them."""

    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.behind = behind

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        if not self.behind and torch.isnan(weights).any():
            weights = torch.nan_to_num(weights)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        if self.behind and torch.isnan(out).any():
            out = torch.nan_to_num(out)
        return out


@pytest.mark.usefixtures("fresh_dynamo")
def test_bounds_are_said_and_the_layer_counts_once() -> None:
    report = moefuse.explain(Bounded().eval(), torch.randn(T, H))
    assert report.layers == (0, 1), report
    assert all(s.code == "tokens-differ" for s in report.skipped), report
    assert "`min(ends[e], 3)`" in str(report) or "`end`" in str(report), report


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("behind", "code", "said"),
    [
        (False, "mutation", "the sum is made in `out`, which comes from before the graph break at"),
        (True, "not-captured", "did not become part of a fused layer"),
    ],
)
def test_a_guard_is_named(behind: bool, code: str, said: str) -> None:
    report = moefuse.explain(Guarded(behind).eval(), torch.randn(T, H))
    (found,) = (s for s in report.skipped if s.code == code)
    assert said in found.message
    assert "test_said_truly.py:" in found.message + found.location
    assert report.layers == (0, 1), report
