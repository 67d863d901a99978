"""Counters of shares, whose number of tokens is a symbol from the second one on: the loop stays fused, and the counter is eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

E, H = 4, 8
SHARES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "of slots": lambda tok, ids: tok.numel() / ids.numel(),
    "of tokens": lambda tok, ids: 100.0 * tok.numel() / ids.shape[0],
    "times tokens": lambda tok, ids: tok.numel() * ids.shape[0],
    "of an average": lambda tok, ids: 0.1 * (len(tok) / ids.numel()),
}


class Layer(nn.Module):
    usage: Tensor

    def __init__(self, share: Callable[[Tensor, Tensor], float]) -> None:
        super().__init__()
        self.share = share
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, H), nn.SiLU(), nn.Linear(H, H)) for _ in range(E))
        self.register_buffer("usage", torch.zeros(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            self.usage[e] += self.share(tok, ids)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
def test_a_share_of_any_number_of_tokens(share: Callable[[Tensor, Tensor], float]) -> None:
    torch.manual_seed(0)
    model, seen = Layer(share), Seen()
    compiled = torch.compile(model, backend=capturing(seen))
    for tokens in (16, 12, 7):
        x = torch.randn(tokens, H)
        before = model.usage.clone()
        expected = model(x)
        counted = model.usage.clone()
        model.usage.copy_(before)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(model.usage, counted)
    assert (len(seen.report.fused), seen.report.skipped) == (2, []), "for the first number, and for any other"


class Dead(Layer):
    """A table of counts that nobody reads, as what is left of a print."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out, counts = torch.zeros_like(x), torch.zeros(E)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            counts[e] = tok.numel()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_counter_that_nobody_reads() -> None:
    """It keeps sizes in the graph that depend on data, and goes with what is dead."""
    torch.manual_seed(0)
    model, seen, x = Dead(SHARES["of slots"]), Seen(), torch.randn(9, H)
    torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x), model(x))
    assert (len(seen.report.fused), seen.report.skipped) == (1, [])
