"""Parts of a layer under another autocast or grad mode: views and casts do not care about autocast, and everything cares about no_grad."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
