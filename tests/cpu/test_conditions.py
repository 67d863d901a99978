"""Conditions inside experts: what a row picks by its own numbers is fused, and what other tokens have a say in is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cpu.beside_eager import I, MoE, check
from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

Function = Callable[[Tensor], Tensor]


class Act(nn.Module):
    """A function between the projections."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


class Loop(MoE):
    """Each expert on the rows that chose it."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        for expert in self.experts:
            expert[1] = Act(function)  # type: ignore[index, operator]

    def forward(self, x: Tensor) -> Tensor:
        return self.add_experts(torch.zeros_like(x), x, *self.route(x))


class Dense(Loop):
    """Each expert on every row, times a mask."""

    def add_experts(self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


def _two_sides(h: Tensor) -> Tensor:
    above = (h > 0).float()
    return h * above + 0.1 * h * (1 - above)


TAKEN: dict[str, Function] = {
    "leaky relu": lambda h: torch.where(h > 0, h, h * 0.1),
    "as a method": lambda h: h.where(h > 0, h * 0.1),
    "by keywords": lambda h: torch.where(condition=h > 0, input=h, other=h * 0.1),
    "or zeros": lambda h: torch.where(h > 0, h, torch.zeros_like(h)),
    "or a number": lambda h: torch.where(h <= 0, -0.5, h),
    "two numbers": lambda h: h * torch.where(h > 0, 1.0, 0.1),
    "times a condition": lambda h: h * (h > 0),
    "times its numbers": lambda h: (h >= 0).to(h.dtype) * h,
    "times its integers": lambda h: h * (h > 0).int(),
    "one minus its numbers": _two_sides,
    "how many": lambda h: h * (h > 0).float().mean(-1, keepdim=True),
    "filled": lambda h: h.masked_fill(h < 0, 0.5),
    "several": lambda h: torch.where((h > 1) | ~(h >= -1), h, h * h),
    "logical": lambda h: torch.where(torch.logical_or(h > 1, h < -1) & (h != 2), h, h * h),
    "numbers that are none": lambda h: torch.where(torch.isnan(h) | torch.isinf(h), 0.0, h),
    "above the row's mean": lambda h: torch.where(h > h.mean(-1, keepdim=True), h, 0.1 * h),
    "the first feature says": lambda h: torch.where(h[:, :1] > 0, h, torch.zeros_like(h)),
    "clamp": lambda h: torch.clamp(h, min=0) ** 2,
    "torch's own": F.leaky_relu,
    "maximum": lambda h: torch.maximum(h, 0.1 * h),
    "the larger": lambda h: torch.max(h, 0.1 * h),
    "the smaller": lambda h: h.min(other=0.1 * h),
    "maximum of zeros": lambda h: torch.maximum(h, torch.zeros_like(h)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", [Loop, Dense])
@pytest.mark.parametrize("name", TAKEN)
def test_what_a_row_says_of_itself(name: str, layer: type[Loop]) -> None:
    seen = check(lambda: layer(TAKEN[name]))
    assert not seen.report.skipped, str(seen.report)
    assert {f.tier for f in seen.report.fused} == {"fused" if name == "clamp" else "grouped"}


def _numbered(h: Tensor) -> Tensor:
    return torch.where((torch.arange(h.shape[0]) > 2)[:, None], h, 0.1 * h)


MIXED: dict[str, Function] = {
    "less the tokens' mean": lambda h: h - h.mean(0),
    "above the tokens' mean": lambda h: torch.where(h > h.mean(0), h, 0.1 * h),
    "above the tokens' mean, kept": lambda h: torch.where(h > h.mean(0, keepdim=True), h, 0.1 * h),
    "above the largest": lambda h: torch.where(h >= h.max(), h, 0.1 * h),
    "any token": lambda h: torch.where((h > 0).any(0), h, 0.1 * h),
    "any at all": lambda h: torch.where((h > 0).any(), h, 0.1 * h),
    "all tokens": lambda h: h.masked_fill((h > 0).all(0, keepdim=True), 0.0),
    "enough tokens": lambda h: h * ((h > 0).sum(0) > 2),
    "so far": lambda h: torch.where((h > 0).cumsum(0) > 2, h, 0.1 * h),
    "the first token's": lambda h: torch.where(h[:1] > 0, h, 0.1 * h),
    "another token's": lambda h: torch.where((h > 0).flip(0), h, 0.1 * h),
    "by number": _numbered,
    "numbers, and not conditions": lambda h: h * torch.logical_and(h, h + 1),
    "numbers in place": lambda h: h * h.clone().gt_(0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layer", [Loop, Dense])
@pytest.mark.parametrize("name", MIXED)
def test_what_is_of_other_rows_stays(name: str, layer: type[Loop]) -> None:
    seen = check(lambda: layer(MIXED[name]))
    assert not seen.report.fused, str(seen.report)
    assert seen.report.skipped
    assert "dtype-unsupported" not in {s.code for s in seen.report.skipped}, "what all tokens say is no weight of an expert"


class Chosen(Loop):
    """Conditions of a row's token, and of its weight."""

    def __init__(self) -> None:
        super().__init__(F.silu)

    def add_experts(self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        kept = x[:, 0] > 0
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            rows, w = x[tok], weights[tok, slot, None]
            y = torch.where(kept[tok][:, None], expert(torch.where(rows > 0, rows, 0.1 * rows)), rows)
            out.index_add_(0, tok, torch.where(w > 0.3, y, 0.5 * y) * w)
        return out


class Slopes(nn.Module):
    """An expert's own number for each feature that is below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(I))

    def forward(self, h: Tensor) -> Tensor:
        return torch.where(h > 0, h, self.slopes * h)


class Sloped(Loop):
    """Vectors of the experts behind their conditions."""

    def __init__(self) -> None:
        super().__init__(F.silu)
        for expert in self.experts:
            expert[1] = Slopes()  # type: ignore[index, operator]


@pytest.mark.parametrize("layer", [Chosen, Sloped])
def test_what_else_belongs_to_a_row(layer: Callable[[], nn.Module]) -> None:
    seen = check(layer)
    assert not seen.report.skipped, str(seen.report)
    assert {f.tier for f in seen.report.fused} == {"grouped"}


def test_rows_that_a_condition_leaves_out_are_not_lost() -> None:
    """Which rows are left is no value of a row."""

    class Left(Loop):
        def add_experts(self, out: Tensor, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
            for e, expert in enumerate(self.experts):
                tok, slot = torch.where(ids == e)
                y = expert(x[tok])
                kept = y[:, 0] > 0
                out.index_add_(0, tok[kept], (y * weights[tok, slot, None])[kept])
            return out

    seen = check(lambda: Left(F.silu))
    assert not seen.report.fused, str(seen.report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    """Conditions are booleans in each of them, and what they make of numbers is in the program's dtype."""
    torch.manual_seed(0)
    model = Loop(lambda h: h * (h > 0).to(h.dtype) + torch.where(h > 0, torch.zeros_like(h), 0.1 * h)).to(dtype)
    x = torch.randn(13, model.gate.in_features, dtype=dtype)
    seen = Seen()
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), model(x), rtol=2e-2, atol=2e-2)
    assert [f.tier for f in seen.report.fused] == ["grouped"], str(seen.report)
