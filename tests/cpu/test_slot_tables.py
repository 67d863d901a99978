"""A table of outputs for each slot, weighted and summed behind the loops: ``(torch.stack(tables, 1) * weights[..., None]).sum(1)``.

A token has the row of one expert in each table, or nothing. Near misses mix up slots, or leave in a table what stood there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import Outcome, check_read

E, K, H, WIDTH = 4, 2, 12, 16
ENDS: dict[str, Callable[[list[Tensor], Tensor], Tensor]] = {
    "stack": lambda tables, w: (torch.stack(tables, 1) * w[..., None]).sum(1),
    "slots first": lambda tables, w: (torch.stack(tables) * w.t().unsqueeze(-1)).sum(0),
    "slots last": lambda tables, w: torch.stack(tables, -1).mul(w.unsqueeze(1)).sum(-1),
    "einsum": lambda tables, w: torch.einsum("tkh,tk->th", torch.stack(tables, 1), w),
    "bmm": lambda tables, w: torch.bmm(w.unsqueeze(1), torch.stack(tables, 1)).squeeze(1),
    "one by one": lambda tables, w: sum((t * w[:, k, None] for k, t in enumerate(tables)), torch.zeros_like(tables[0])),
}
BEGINS: dict[str, Callable[[Tensor], Tensor]] = {"zeros": torch.zeros_like, "empty": torch.empty_like}


class Layer(nn.Module):
    def __init__(self, end: str = "stack", begin: str = "zeros") -> None:
        super().__init__()
        self.router, self.end, self.begin = nn.Linear(H, E), ENDS[end], BEGINS[begin]
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, H)
        weights, ids = self.router(x).softmax(-1).topk(K)
        return self.mixed(x, weights, ids).reshape(shape)

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.end(list(self.tables(x, ids)), weights)

    def tables(self, x: Tensor, ids: Tensor) -> Iterator[Tensor]:
        for k in range(K):
            table = self.begin(x)
            for e, expert in enumerate(self.experts):
                mask = ids[:, k] == e
                table[mask] = expert(x[mask])
            yield table


class OneTensor(Layer):
    """All tables are slices of one tensor."""

    def place(self, k: int) -> int:
        return k

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = x.new_zeros(len(x), K, H)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                mask = ids[:, k] == e
                out[mask, self.place(k)] = expert(x[mask])
        return (out * weights.unsqueeze(-1)).sum(1)


class Again(Layer):
    """One table, which each slot fills with its own rows. (The copy is for backward.)"""

    def numbers(self, ids: Tensor) -> Tensor:
        return ids

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out, table, ids = torch.zeros_like(x), self.begin(x), self.numbers(ids)
        for k in range(K):
            for e, expert in enumerate(self.experts):
                mask = ids[:, k] == e
                table[mask] = expert(x[mask])
            out = out + table.clone() * weights[:, k, None]
        return out


class NotAll(Again):
    """Where nobody knows that each token has an expert in each slot, its row of the slot before stays."""

    def numbers(self, ids: Tensor) -> Tensor:
        return torch.where(ids == E - 1, E, ids)


class Swapped(Layer):
    def tables(self, x: Tensor, ids: Tensor) -> Iterator[Tensor]:
        yield from reversed(list(super().tables(x, ids)))


class OneTwice(Layer):
    def tables(self, x: Tensor, ids: Tensor) -> Iterator[Tensor]:
        first, *_ = super().tables(x, ids)
        yield from [first] * K


class OtherRows(Layer):
    def tables(self, x: Tensor, ids: Tensor) -> Iterator[Tensor]:
        for k, (table, other) in enumerate(zip(super().tables(x, ids), super().tables(x * 2, ids), strict=True)):
            yield other if k else table


class OtherSlot(OneTensor):
    """Rows of a slot are put where another slot's belong."""

    def place(self, k: int) -> int:
        return K - 1 - k


class Most(Layer):
    """No sum."""

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return (torch.stack(list(self.tables(x, ids)), 1) * weights[..., None]).amax(1)


class Kept(Layer):
    """What stood in a table is left where a token has no expert."""

    def tables(self, x: Tensor, ids: Tensor) -> Iterator[Tensor]:
        for k in range(K):
            table = x.clone()
            for e, expert in enumerate(self.experts[:-1]):
                mask = ids[:, k] == e
                table[mask] = expert(x[mask])
            yield table


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


def one_layer(outcome: Outcome) -> None:
    assert [s.message for s in outcome.skipped] == []
    assert [(f.spec.num_experts, f.spec.top_k, f.spec.activation) for f in outcome.fused] == [(E, K, "relu")]


@pytest.mark.every_value
@pytest.mark.parametrize("verify", ["off", "probe"])
@pytest.mark.parametrize("shape", [(11,), (2, 6)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("begin", BEGINS)
@pytest.mark.parametrize("end", ENDS)
def test_a_table_for_each_slot(end: str, begin: str, shape: tuple[int, ...], verify: str) -> None:
    one_layer(check_read(Layer(end, begin), *shape, H, verify=verify))


@pytest.mark.parametrize("verify", ["off", "probe"])
def test_one_tensor_of_all_slots(verify: str) -> None:
    one_layer(check_read(OneTensor(), 2, 6, H, verify=verify))


@pytest.mark.parametrize("begin", BEGINS)
def test_one_table_that_each_slot_fills_again(begin: str) -> None:
    one_layer(check_read(Again(begin=begin), 11, H, verify="probe"))


@pytest.mark.parametrize("kind", [NotAll, Swapped, OneTwice, OtherRows, OtherSlot, Kept, Most])
def test_near_misses(kind: type[Layer]) -> None:
    outcome = check_read(kind(), 11, H)
    assert outcome.fused == []
    assert outcome.skipped
