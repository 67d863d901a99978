"""Statistics of routing weights beside a loop over experts: sums over what a mask picks are sums under the mask, and the loop is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H = 4, 8


class Here(NamedTuple):
    """What a statistic may read: weights and ids [T, K], the expert, and its tokens and slots."""

    w: Tensor
    ids: Tensor
    e: int
    t: Tensor
    k: Tensor


def _first_slot(at: Here) -> Tensor:
    return at.w[torch.where(at.ids[:, 0] == at.e)[0], 0].sum()


STATISTICS: dict[str, Callable[[Here], Tensor | float]] = {
    "sum": lambda at: at.w[at.t, at.k].sum(),
    "mean": lambda at: torch.nan_to_num(at.w[at.t, at.k].mean()),
    "by mask": lambda at: torch.sum(at.w[at.ids == at.e]),
    "masked_select": lambda at: at.w.masked_select(at.ids == at.e).mean().nan_to_num(0.0),
    "a dimension": lambda at: at.w[at.t, at.k].detach().float().sum(0),
    "one dimension more": lambda at: at.w[at.t, at.k, None].sum(),
    "of the first slot": _first_slot,
    "a number": lambda at: at.w[at.t, at.k].sum().item(),
    "a share": lambda at: at.w[at.t, at.k].sum() / at.w.shape[0],
}


class Layer(nn.Module):
    """``how``: the statistic; ``detached``: without its gradients; ``kept``: in a buffer, else returned."""

    importance: Tensor

    def __init__(self, how: Callable[[Here], Tensor | float], *, detached: bool, kept: bool) -> None:
        super().__init__()
        self.how, self.detached, self.kept = how, detached, kept
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.SiLU(), nn.Linear(H, H)) for _ in range(E))
        self.register_buffer("importance", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        found = self.importance if self.kept else x.new_zeros(E)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            value = self.how(Here(w, ids, e, t, k))
            found[e] += value.detach() if self.detached and isinstance(value, Tensor) else value
            out.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return out if self.kept else out + (found * found).sum()


def _check(model: Layer, *, fused: int) -> Seen:
    """Values, gradients and the statistic are eager's, in training and in inference."""
    seen = Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for training in (True, False):
        model.train(training)
        x = torch.randn(6, H, requires_grad=True)
        x.data[:, 0] = 3.0  # so that some expert has no token
        results = []
        for call in (model, compiled):
            before = model.importance.detach().clone()
            out = call(x)
            grads = torch.autograd.grad(out.square().sum(), [x, *model.parameters()], allow_unused=True)
            results.append((out.detach(), [torch.zeros(()) if g is None else g for g in grads], model.importance.detach().clone()))
            model.importance = before
        (out, grads, kept), (out_, grads_, kept_) = results
        torch.testing.assert_close(out_, out)
        torch.testing.assert_close(kept_, kept)
        for one, other in zip(grads_, grads, strict=True):
            torch.testing.assert_close(one, other if other.dim() else torch.zeros_like(one), rtol=1e-4, atol=1e-6)
    assert len(seen.report.fused) == fused
    return seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", STATISTICS.values(), ids=STATISTICS)
def test_in_a_buffer(how: Callable[[Here], Tensor | float]) -> None:
    _check(Layer(how, detached=True, kept=True), fused=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", STATISTICS.values(), ids=STATISTICS)
def test_in_the_loss(how: Callable[[Here], Tensor | float]) -> None:
    """Gradients go to the weights that the mask has, and none through a number."""
    _check(Layer(how, detached=False, kept=False), fused=1)


def test_gradients_that_would_outlive_the_call() -> None:
    """A buffer that keeps a sum which nobody has detached: backward of the next call would reach into this one, which eager's does not."""
    seen = _check(Layer(STATISTICS["sum"], detached=False, kept=True), fused=0)
    (skipped,) = {s.message for s in seen.report.skipped}
    assert "outlives the call: detach what is added" in skipped


NEAR: dict[str, Callable[[Here], Tensor | float]] = {
    "the largest of no rows is an error": lambda at: at.w[at.t, at.k].max() if at.t.numel() else 0.0,
    "order counts in a cumulative sum": lambda at: at.w[at.t, at.k].cumsum(0).sum(),
    "slots are taken for tokens": lambda at: at.w[at.k, at.k].sum(),
    "tokens and slots are of two experts": lambda at: at.w[at.t, torch.where(at.ids.flip(0) == at.e)[1]].sum(),
}


@pytest.mark.parametrize("how", NEAR.values(), ids=NEAR)
def test_what_is_no_sum_under_a_mask(how: Callable[[Here], Tensor | float]) -> None:
    """Whatever becomes of the layer, the statistic is eager's."""
    model, seen = Layer(how, detached=True, kept=True), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    x = torch.randn(6, H)
    before = model.importance.clone()
    expected, counted = model(x), model.importance.clone()
    model.importance = before
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(model.importance, counted)
