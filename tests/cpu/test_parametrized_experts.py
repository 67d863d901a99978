"""Loops over experts that read a parametrised stack of weights: its value is computed where an expert first has tokens."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.cpu.capture_case import Seen, capturing
from tests.cpu.test_lora_rows import close
from tests.cpu.test_parametrized import registered

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, K = 8, 6, 4, 2  # noqa: E741  (the letters of moefuse.spec)
X = torch.randn(7, H, generator=torch.Generator().manual_seed(0))
LOGITS = {
    "all": torch.randn(7, E, generator=torch.Generator().manual_seed(1)),
    "not the first": torch.randn(7, E, generator=torch.Generator().manual_seed(2)) + torch.tensor([-1e3, 0, 0, 0]),
}


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(E, 2, H)), nn.Parameter(torch.randn(E, I, 2))
        self.register_buffer("scale", torch.tensor(0.5))
        self.calls = 0

    def forward(self, w: Tensor) -> Tensor:
        return torch.baddbmm(w, self.b, self.a, alpha=0.5)


class Scaled(LowRank):
    def forward(self, w: Tensor) -> Tensor:
        return w * self.scale + self.b @ self.a


class Counting(LowRank):
    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(w)


class Experts(nn.Module):
    """``write``: doubles the scale behind each expert, used or not; in place, or as another tensor."""

    def __init__(self, extra: LowRank, keep: bool = True, write: str | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))
        self.extra, self.keep, self.write = extra, keep, write

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = torch.topk(logits.softmax(-1), K)
        out = torch.zeros_like(x)
        with registered(self, "up", self.extra), parametrize.cached() if self.keep else nullcontext():
            for e in range(E):
                token, slot = torch.where(ids == e)
                if token.numel() > 0:
                    y = F.linear(F.silu(F.linear(x[token], self.up[e])), self.down[e])
                    out.index_add_(0, token, y * weights[token, slot, None])
                if self.write == "in place":
                    self.extra.scale.mul_(2)
                elif self.write is not None:
                    self.extra.scale = self.extra.scale * 2
        return out


def numbers(run: Any, model: Experts) -> list[Tensor]:
    """By name: eager puts a Parameter that was registered behind all others."""
    found = []
    for logits in LOGITS.values():
        model.zero_grad()
        with torch.set_grad_enabled(model.write is None):
            out = run(X, logits)
        if out.requires_grad:
            out.square().sum().backward()
        found += [
            out.detach(),
            *(p.grad.clone() for _, p in sorted(model.named_parameters()) if p.grad is not None),
            model.extra.scale.clone(),
        ]
    return found


def both(**how: Any) -> tuple[Experts, Experts, Seen]:
    torch.manual_seed(0)
    model, seen = Experts(**how), Seen()
    twin = copy.deepcopy(model)
    close(numbers(torch.compile(model, backend=capturing(seen)), model), numbers(twin, twin), 1e-5)
    return model, twin, seen


def test_one_graph() -> None:
    _, _, seen = both(extra=LowRank())
    assert len(seen.graphs) == 1
    (fused,) = seen.report.fused
    assert fused.spec.lora == (2,)


def test_row_by_row() -> None:
    """A body that Python gives other numbers for each expert is traced for each of them."""
    torch.manual_seed(0)

    class Rows(Experts):
        def forward(self, x: Tensor, logits: Tensor) -> Tensor:
            weights, ids = torch.topk(logits.softmax(-1), K)
            out, names = torch.zeros_like(x), ["down"] * E
            with registered(self, "up", self.extra), parametrize.cached():
                for row in F.one_hot(ids, E).sum((0, 1)).nonzero():
                    e = row[0]
                    token, slot = torch.where(ids == e)
                    y = F.linear(F.silu(F.linear(x[token], self.up[e])), getattr(self, names[int(e)])[e])
                    out.index_add_(0, token, y * weights[token, slot, None])
            return out

    model, seen = Rows(LowRank()), Seen()
    expected = numbers(twin := copy.deepcopy(model), twin)
    close(numbers(torch.compile(model, backend=capturing(seen)), model), expected, 1e-5)
    assert [fused.spec.lora for fused in seen.report.fused] == [(2,)]


def test_computed_for_each_expert() -> None:
    """Without ``cached()`` each expert has a stack of its own, as far as one can see, and its row of that is a matrix as any."""
    _, _, seen = both(extra=LowRank(), keep=False)
    assert (len(seen.report.fused), seen.report.skipped) == (1, [])


@pytest.mark.parametrize(("write", "text"), [("in place", "is written to, and what is kept of it"), ("another", "Python objects change")])
def test_a_scale_that_changes_in_the_loop(write: str, text: str) -> None:
    """What is kept has the scale of the first expert with tokens: which one that is, only the run knows."""
    _, _, seen = both(extra=Scaled(), write=write)
    assert not seen.report.fused
    assert any(text in skipped.message for skipped in seen.report.skipped)


def test_calls_that_are_counted_in_the_loop() -> None:
    """The call is a side effect, of an expert that may have no tokens."""
    model, twin, seen = both(extra=Counting())
    assert model.extra.calls == twin.extra.calls == 4
    assert not seen.report.fused
