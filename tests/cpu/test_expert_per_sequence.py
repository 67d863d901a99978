"""One choice for a whole sequence or image: masked loops in which an id per batch item selects the expert of all its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import check_exact

E, H, WIDTH = 4, 12, 20


class Layer(nn.Module):
    """Experts over [B, S, H], each output times its gate."""

    def __init__(self, gates: Callable[[Tensor], list[Tensor]]) -> None:
        super().__init__()
        self.gates = gates
        self.first = nn.ModuleList(nn.Linear(H, WIDTH) for _ in range(E))
        self.last = nn.ModuleList(nn.Linear(WIDTH, H) for _ in range(E))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for first, last, gate in zip(self.first, self.last, self.gates(ids), strict=True):
            out = out + last(torch.nn.functional.gelu(first(x))) * gate
        return out


def per_item(ids: Tensor) -> list[Tensor]:
    return [(ids == e)[:, None, None] for e in range(E)]


def per_item_float(ids: Tensor) -> list[Tensor]:
    return [(ids == e).view(-1, 1, 1).float() for e in range(E)]


def out_of_a_table(ids: Tensor) -> list[Tensor]:
    """Two choices for an item, with weights."""
    two = torch.stack([ids, (ids + 1) % E], -1)
    weights = torch.softmax(two.float(), -1)
    table = torch.zeros(ids.shape[0], E).scatter(1, two, weights)
    return [table[:, e][:, None, None] for e in range(E)]


def per_position(ids: Tensor) -> list[Tensor]:
    """The near miss: an id for each place in the sequence, the same in every item."""
    return [(ids == e)[None, :, None] for e in range(E)]


def inputs(batch: int, length: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """x [B, S, H] and ids [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, H, generator=generator), torch.randint(0, E, (count,), generator=generator)


@pytest.mark.every_value
@pytest.mark.parametrize("gates", [per_item, per_item_float])
@pytest.mark.parametrize("sizes", [(3, 5), (2, 1), (5, 5), (1, 7)], ids=str)
def test_an_expert_for_each_item(gates: Any, sizes: tuple[int, int]) -> None:
    """Also where a dimension is one, and where items are as many as places."""
    outcome = check_exact(Layer(gates), inputs(*sizes, sizes[0]), inputs(*sizes, sizes[0], seed=1))
    assert len(outcome.fused) == 1, outcome
    assert outcome.fused[0].spec.num_experts == E


def test_weights_out_of_a_table() -> None:
    """Right; ids that arithmetic made may repeat, for all that is known, so this one is refused."""
    outcome = check_exact(Layer(out_of_a_table), inputs(3, 5, 3), inputs(3, 5, 3, seed=1))
    assert [s.code for s in outcome.skipped] == ["ids-not-distinct"]


def test_two_experts_for_each_item() -> None:
    """Chosen by a router that sees the mean of the sequence."""

    class Routed(Layer):
        def __init__(self) -> None:
            super().__init__(lambda ids: [])
            self.router = nn.Linear(H, E)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            weights, chosen = torch.softmax(self.router(x.mean(1)), -1).topk(2)
            table = torch.zeros(x.shape[0], E).to(weights).scatter(1, chosen, weights)
            out = torch.zeros_like(x)
            for e in range(E):
                out = out + self.last[e](torch.nn.functional.gelu(self.first[e](x))) * table[:, e][:, None, None]
            return out

    outcome = check_exact(Routed(), inputs(3, 5, 3), inputs(3, 5, 3, seed=1))
    assert len(outcome.fused) == 1, outcome
    assert outcome.fused[0].spec.top_k == 2


def test_sizes_that_change() -> None:
    outcome = check_exact(Layer(per_item), inputs(3, 5, 3), inputs(4, 9, 4, seed=1), dynamic=True)
    assert (len(outcome.fused), outcome.graphs) == (1, 1), outcome


@pytest.mark.parametrize("sizes", [(3, 5), (5, 5)], ids=str)
def test_an_expert_for_each_place_is_not_one_for_each_item(sizes: tuple[int, int]) -> None:
    """Right, fused or not; with as many items as places only the dimension tells them apart."""
    check_exact(Layer(per_position), inputs(*sizes, sizes[1]), inputs(*sizes, sizes[1], seed=1))


def test_ids_out_of_range_choose_nobody() -> None:
    x, _ = inputs(3, 4, 3)
    check_exact(Layer(per_item), (x, torch.tensor([0, E, -1])))
