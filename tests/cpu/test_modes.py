"""Parts of a layer under another autocast or grad mode: dtypes say what autocast did, and everything cares about no_grad."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse
from tests.cpu.capture_case import Result, Seen, call, capturing, same
from tests.programs.loops import E, H, I, logits_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def _no_autocast() -> Any:
    return torch.autocast("cpu", enabled=False)


class Modes(nn.Module):
    """A loop whose router, routing weights or expert weights are touched under a mode; ``where`` says which."""

    def __init__(self, where: str, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.modes = {name: mode if name == where else contextlib.nullcontext for name in ("router", "weights", "stack", "scores")}
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        with self.modes["router"]():
            top, ids = logits.softmax(-1).topk(2)
        with self.modes["scores"]():
            top = top * 2
        with self.modes["weights"]():
            weights = top.to(x.dtype).view(-1, 2)
        with self.modes["stack"]():
            up = self.up.view(E, I, H)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(F.silu(F.linear(x[tok], up[e])), self.down[e]) * weights[tok, slot, None])
        return out


def run(where: str, mode: Callable[[], Any]) -> tuple[Seen, Result, Result]:
    torch.manual_seed(0)
    model, seen = Modes(where, mode), Seen()
    x, logits = torch.randn(5, H), logits_for("upper", 5)
    expected = call(model, model, x, logits)
    return seen, call(torch.compile(model, backend=capturing(seen)), model, x, logits), expected


@pytest.mark.parametrize("where", ["router", "weights", "stack", "scores"])
def test_autocast_switched_off_around_a_part(where: str) -> None:
    """ernie4_5's router ends with a cast in a block without autocast."""
    seen, got, expected = run(where, _no_autocast)
    same(got, expected)
    assert (len(seen.report.fused), seen.report.skipped, len(seen.graphs)) == (1, [], 1)


@pytest.mark.parametrize("where", ["router", "weights", "stack", "scores"])
def test_no_grad_around_a_part(where: str) -> None:
    """What was cut off from the gradient stays cut off, fused or not."""
    seen, got, expected = run(where, torch.no_grad)
    same(got, expected)
    fused = where in ("router", "scores")
    assert len(seen.report.fused) == fused
    assert {s.code for s in seen.report.skipped} == (set() if fused else {"context-differs"})


NOTHING: dict[str, Callable[[], Any]] = {
    "inference_mode(False)": lambda: torch.inference_mode(False),
    "enable_grad": torch.enable_grad,
    "set_grad_enabled": lambda: torch.set_grad_enabled(torch.is_grad_enabled()),
    "autocast(enabled=False)": _no_autocast,
}
"""Contexts that change nothing where gradients are recorded and no autocast is on."""


class Around(nn.Module):
    """``context`` is entered around the experts of sorted rows (``call``), their body, what an expert adds, or all of the loop."""

    def __init__(self, where: str, context: Callable[[], Any]) -> None:
        super().__init__()
        self.where, self.context = where, context
        self.decorated = context()(self.each)
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def at(self, where: str) -> Any:
        return self.context() if where == self.where else contextlib.nullcontext()

    def expert(self, e: int, h: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(h, self.up[e])), self.down[e])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = logits.softmax(-1).topk(2)
        if self.where == "call":
            return self.sorted(x, weights, ids)
        out = torch.zeros_like(x)
        with self.at("loop"):
            for e in range(E):
                tok, slot = torch.where(ids == e)
                if tok.numel() == 0:
                    continue
                with self.at("add"):
                    with self.at("body"):
                        y = self.expert(e, x[tok]) * weights[tok, slot, None]
                    out.index_add_(0, tok, y)
        return out

    def each(self, rows: Tensor, counts: Tensor) -> Tensor:
        return torch.cat([self.expert(e, part) for e, part in enumerate(rows.split(counts.tolist()))])

    def sorted(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=E)

        y = self.decorated(x[order // 2], counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // 2, y)


def around(where: str, context: Callable[[], Any], *, grad: bool = True) -> Seen:
    torch.manual_seed(0)
    model, seen = Around(where, context), Seen()
    x, logits = torch.randn(5, H), logits_for("upper", 5)
    expected = call(model, model, x, logits, grad=grad)
    same(call(torch.compile(model, backend=capturing(seen)), model, x, logits, grad=grad), expected)
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["call", "loop", "body", "add"])
@pytest.mark.parametrize("context", NOTHING)
def test_a_context_that_changes_nothing(context: str, where: str) -> None:
    """torchtune's experts have ``inference_mode(False)`` around them. In a branch on the rows of an expert nothing is left of it."""
    if (where, context) == ("call", "set_grad_enabled"):
        pytest.skip("Dynamo breaks the graph at this decorator")
    seen = around(where, NOTHING[context])
    assert (len(seen.report.fused), seen.report.skipped, len(seen.graphs)) == (1, [], 1)


@pytest.mark.parametrize("context", ["inference_mode(False)", "enable_grad"])
@pytest.mark.parametrize("where", ["call", "loop"])
def test_gradients_switched_on_in_a_call_without(where: str, context: str) -> None:
    """The zeros of the sum are older than the switch; they have no gradients either way."""
    assert len(around(where, NOTHING[context], grad=False).report.fused) == 1


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_loop_without_gradients_inside_of_a_call_with(context: Callable[[], Any]) -> None:
    assert len(around("loop", context).report.fused) == 1


def test_no_grad_around_the_experts() -> None:
    """They have no gradients there, and are not fused. (Autocast around them: test_autocast.py.)"""
    assert around("body", torch.no_grad).report.fused == []


@pytest.mark.parametrize("trained", [False, True], ids=["zeros", "what has gradients"])
def test_a_sum_without_gradients(trained: bool) -> None:
    """What begins with zeros has none then; an accumulator that has some keeps them, and a fused sum would not."""

    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(H, H) for _ in range(E))

        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = logits.softmax(-1).topk(2)
            out = x * 1.5 if trained else torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                tok, slot = torch.where(ids == e)
                y = expert(x[tok]) * weights[tok, slot, None]
                with torch.no_grad():
                    out.index_add_(0, tok, y)
            return out + x

    torch.manual_seed(0)
    model, seen = Silent(), Seen()
    x, logits = torch.randn(5, H), logits_for("upper", 5)
    expected = call(model, model, x, logits, grad=True)
    same(call(torch.compile(model, backend=capturing(seen)), model, x, logits, grad=True), expected)
    assert [len(seen.report.fused), *(s.code for s in seen.report.skipped)] == ([0, "context-differs"] if trained else [1])


@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("context", [lambda: torch.inference_mode(False), torch.enable_grad], ids=["inference_mode(False)", "enable_grad"])
def test_gradients_switched_on_in_a_call_under_inference_mode(context: Callable[[], Any]) -> None:
    """Autograd cannot keep what such a call computes itself; the program's loop keeps rows of its own."""
    torch.manual_seed(0)
    layer = Switched(context)
    x = torch.randn(6, 8)
    compiled = torch.compile(layer, backend="moefuse")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), layer(x))
    report = moefuse.last_report()
    assert report is not None
    assert [s.code for s in report.skipped] == ["context-differs"], report


class Switched(nn.Module):
    """The whole loop under a context."""

    def __init__(self, context: Callable[[], Any]) -> None:
        super().__init__()
        self.context, self.router = context, nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        with self.context():
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
            return out
