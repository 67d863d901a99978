"""Assertions about data between router and experts, whose messages are put together: at these Dynamo would break the graph."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from moefuse import Options
from tests.cpu.asserted_case import both, constant, either, formatted, negated, negated_constant, raised
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, K = 8, 6, 3, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """Repeated ids would count once, which only the top-k in the same graph excludes."""

    def __init__(self, check: Callable[[Tensor, str], None]) -> None:
        super().__init__()
        self.check, self.router = check, nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        self.check(weights, "weights")
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * expert(x[token])
        return out


@pytest.mark.parametrize("check", [formatted, negated, negated_constant, both, constant])
def test_an_assertion_is_part_of_the_graph(check: Callable[[Tensor, str], None]) -> None:
    torch.manual_seed(0)
    layer, x, seen = Layer(check), torch.randn(10, H), Seen()
    twin = copy.deepcopy(layer)
    layer.compile(backend=capturing(seen, behind="aot_eager"))
    got, expected = layer(x), twin(x)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)
    assert (len(seen.graphs), len(seen.report.fused), seen.report.skipped) == (1, 1, []), seen.report
    with pytest.raises(RuntimeError):  # as an assertion that Dynamo reads itself
        layer(torch.full_like(x, float("nan")))


@pytest.mark.parametrize("check", [either, raised])
def test_what_is_no_such_assertion(check: Callable[[Tensor, str], None]) -> None:
    """Another way around the condition, or another error: the graph breaks, and the program raises what it raises in eager."""
    torch.manual_seed(0)
    layer, x, seen = Layer(check), torch.randn(10, H), Seen()
    twin = copy.deepcopy(layer)
    layer.compile(backend=capturing(seen))
    with torch.no_grad():
        torch.testing.assert_close(layer(x), twin(x))
    assert len(seen.graphs) > 1
    with pytest.raises(ValueError if check is raised else AssertionError):
        layer(torch.full_like(x, float("nan")))


def test_without_experts_it_breaks_as_ever() -> None:
    """And its error is the program's own."""

    def program(x: Tensor) -> Tensor:
        y = x * 2
        formatted(y, "y")
        return y + 1

    graphs = []
    for capture in (False, True):
        torch._dynamo.reset()
        seen = Seen()
        compiled = torch.compile(program, backend=capturing(seen, Options(capture=capture)))
        torch.testing.assert_close(compiled(torch.ones(3)), program(torch.ones(3)))
        graphs.append(len(seen.graphs))
        with pytest.raises(AssertionError, match="y contains NaN"):
            compiled(torch.full((3,), float("nan")))
    assert graphs[0] == graphs[1] > 1


class Caught(Layer):
    """``deep``: what asserts runs in a frame of its own, whose caller catches what it raises."""

    def __init__(self, deep: bool) -> None:
        super().__init__(formatted)
        self.deep = deep

    def checked(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        try:
            if not self.deep:
                self.check(x, "x")
            return self.checked(x)
        except AssertionError:
            return x


@pytest.mark.parametrize("deep", [False, True])
def test_what_the_program_catches(deep: bool) -> None:
    """The graph would raise another error, which the program does not catch."""
    torch.manual_seed(0)
    layer, x = Caught(deep), torch.randn(10, H)
    compiled = torch.compile(layer, backend=capturing(Seen(), behind="aot_eager"))
    torch.testing.assert_close(compiled(x), layer(x))
    wrong = torch.full_like(x, float("nan"))
    torch.testing.assert_close(compiled(wrong), wrong, equal_nan=True)
