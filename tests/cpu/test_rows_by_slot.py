"""Experts around code that sees one row for each slot: mixture of attention projects each slot's query, and each slot's result, by experts.

Ainslie et al., CoLT5; Shen et al., JetMoE. The rows go in or come out one for each (token, slot), sorted by expert in between.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import Outcome, check_exact

E, H, WIDTH = 4, 12, 10


class Base(nn.Module):
    """A router, projections [E, WIDTH, H] and back, and what lies between them."""

    def __init__(self, top_k: int, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.top_k, self.between = top_k, between
        self.router = nn.Linear(H, E)
        self.first = nn.Parameter(torch.randn(E, WIDTH, H) / H**0.5)
        self.last = nn.Parameter(torch.randn(E, H, WIDTH) / WIDTH**0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k, -1)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        return weights.flatten(), order, flat[order]

    def to_slots(self, rows: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_add(0, order, rows)

    def from_slots(self, slots: Tensor, order: Tensor) -> Tensor:
        return slots[order]

    def forward(self, x: Tensor) -> Tensor:
        weights, order, expert = self.route(x)
        token = order // self.top_k
        query = self.to_slots(torch.einsum("ri,roi->ro", x[token], self.first[expert]), order)
        seen = self.between(query.view(-1, self.top_k, WIDTH)).reshape(-1, WIDTH)
        rows = torch.einsum("ri,roi->ro", self.from_slots(seen, order), self.last[expert])
        return torch.zeros_like(x).index_add(0, token, rows * weights[order, None])


class Assigned(Base):
    def to_slots(self, rows: Tensor, order: Tensor) -> Tensor:
        out = torch.zeros_like(rows)
        out[order] = rows
        return out


class Inverse(Base):
    def to_slots(self, rows: Tensor, order: Tensor) -> Tensor:
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return rows[inverse]


class SortedAgain(Base):
    """The near miss: rows go to the places of the inverse permutation, which is right for no slot."""

    def to_slots(self, rows: Tensor, order: Tensor) -> Tensor:
        return torch.zeros_like(rows).index_add(0, order.argsort(), rows)


class OtherRows(Base):
    """The near miss: each slot takes the row of its neighbour."""

    def from_slots(self, slots: Tensor, order: Tensor) -> Tensor:
        return slots.roll(1, 0)[order]


def mixing(rows: Tensor) -> Tensor:
    """Something like attention: every token sees the ones before it, slot by slot."""
    return torch.tanh(rows).cumsum(0)


def check(model: nn.Module, *inputs: Tensor, dynamic: bool = False) -> Outcome:
    return check_exact(model, *((x,) for x in inputs), dynamic=dynamic, tolerance=2e-4)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", [Base, Assigned, Inverse])
@pytest.mark.parametrize("count", [1, 7])
def test_projections_around_other_code(kind: type[Base], count: int) -> None:
    """Two regions: rows come out one for each slot, and go in one for each slot."""
    outcome = check(kind(2, mixing), tokens(count), tokens(count, 1))
    assert [(s.code, s.message) for s in outcome.skipped] == []
    assert [(f.spec.num_experts, f.spec.top_k) for f in outcome.fused] == [(E, 2), (E, 2)]


def test_one_slot_per_token() -> None:
    """With one slot, a row per slot is a row per token."""
    assert len(check(Base(1, mixing), tokens(7), tokens(7, 1)).fused) == 2


def test_sizes_that_change() -> None:
    outcome = check(Base(2, mixing), tokens(7), tokens(11, 1), dynamic=True)
    assert (len(outcome.fused), outcome.graphs) == (2, 1), outcome


def test_nothing_between_is_one_layer() -> None:
    """Without code that mixes rows it is an ordinary layer, and becomes one region."""
    outcome = check(Base(2, torch.nn.functional.silu), tokens(7), tokens(7, 1))
    assert [f.tier for f in outcome.fused] == ["fused"]


@pytest.mark.parametrize("kind", [SortedAgain, OtherRows])
def test_near_misses_stay_right(kind: type[Base]) -> None:
    check(kind(2, mixing), tokens(7), tokens(7, 1))
