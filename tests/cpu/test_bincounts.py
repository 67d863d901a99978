"""``torch.bincount`` of the router's ids, kept as a tensor: no break of the graph where its length is known, and eager's values always."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
E, H, K = 3, 8, 2

Count = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of scores [T, E], weights and ids [T, K]."""


def _after_a_write(scores: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    ids = ids.clone()
    ids.view(-1)[:3] = E  # an id that no score has
    return torch.bincount(ids.flatten(), minlength=E)


def _after_a_write_elsewhere(scores: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    ids = ids.clone()
    seen = ids.flatten()
    ids.data[0, 0] = E
    return torch.bincount(seen, minlength=E)


KNOWN: dict[str, Count] = {
    "plain": lambda p, w, ids: torch.bincount(ids.flatten(), minlength=E),
    "by name": lambda p, w, ids: torch.bincount(input=ids.view(-1), weights=None, minlength=E),
    "a method": lambda p, w, ids: ids.reshape(-1).bincount(minlength=E).float() / ids.numel(),
    "longer than there are experts": lambda p, w, ids: torch.bincount(ids.ravel(), minlength=E + 3),
    "bytes": lambda p, w, ids: torch.bincount(ids.to(torch.uint8).flatten(), minlength=E),
    "32 bits": lambda p, w, ids: ids.int().flatten().bincount(minlength=E),
    "one slot": lambda p, w, ids: torch.bincount(ids[:, 1], minlength=E),
    "the best score": lambda p, w, ids: torch.bincount(p.argmax(dim=-1), minlength=E),
    "sorted": lambda p, w, ids: torch.bincount(ids.flatten().sort()[0], minlength=E),
    "weights": lambda p, w, ids: torch.bincount(ids.flatten(), weights=w.detach().flatten(), minlength=E),
    "weights, positional, of 64 bits": lambda p, w, ids: torch.bincount(ids.flatten(), w.detach().flatten().double(), E),
    "weights that are integers": lambda p, w, ids: torch.bincount(ids.flatten(), ids.flatten(), minlength=E),
}
UNKNOWN: dict[str, Count] = {
    "no length": lambda p, w, ids: torch.bincount(ids.flatten()).sum(),
    "shorter than there are experts": lambda p, w, ids: torch.bincount(ids.flatten(), minlength=E - 1),
    "ids that were written to": _after_a_write,
    "ids that were written to by another view": _after_a_write_elsewhere,
    "weights that have gradients": lambda p, w, ids: torch.bincount(ids.flatten(), w.flatten(), minlength=E),
    "places among all scores": lambda p, w, ids: torch.bincount(p.argmax().view(1), minlength=E),
}


class Layer(nn.Module):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.count = count
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.SiLU(), nn.Linear(H, H)) for _ in range(E))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.router(x).softmax(-1)
        w, ids = scores.topk(K)
        counts = self.count(scores, w, ids)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            t, k = torch.where(ids == e)
            if t.numel() == 0:
                continue
            out.index_add_(0, t, expert(x[t]) * w[t, k, None])
        return out, counts


def _check(model: Layer, sizes: tuple[int, ...] = (6, 6, 9)) -> Seen:
    """Values, dtypes and gradients are eager's; the first tokens are all one, so that some expert has none."""
    seen = Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for training in (True, False):
        model.train(training)
        for size in sizes if training else sizes[-1:]:
            x = torch.randn(1, H).repeat(size, 1) if size == sizes[0] else torch.randn(size, H)
            results = []
            for call in (model, compiled):
                model.zero_grad()
                with torch.set_grad_enabled(training):
                    out, counts = call(x)
                if training:
                    out.square().sum().backward()
                grad = model.router.weight.grad
                results.append((out.detach(), counts.detach(), counts.requires_grad, torch.zeros(()) if grad is None else grad.clone()))
            torch.testing.assert_close(results[1], results[0])
    return seen


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", KNOWN)
def test_no_break_where_the_length_is_known(how: str) -> None:
    """The counts are a plain tensor of the graph, and the loop beside them is fused in it."""
    seen = _check(Layer(KNOWN[how]))
    assert len(seen.report.fused) == len(seen.graphs) > 0
    assert not seen.report.graph_breaks


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", UNKNOWN)
def test_left_to_torch(how: str) -> None:
    """Where the counts may be longer than they say the graph breaks, and they are as long as in eager."""
    _check(Layer(UNKNOWN[how]))


def test_an_error_stays() -> None:
    """Weights of another length are an error in eager, and here."""
    model = Layer(lambda p, w, ids: torch.bincount(ids.flatten(), weights=w[:, 0], minlength=E))
    compiled = torch.compile(model, backend=capturing(Seen()))
    for call in (model, compiled):
        with pytest.raises(RuntimeError, match="weights"):
            call(torch.randn(6, H))
