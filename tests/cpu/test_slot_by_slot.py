"""One slot after another: ``e = ids[:, k]; out = out + w[:, k:k + 1] * (W[e] @ x)``. All of them are one layer; less is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.check import check_read

E, H, WIDTH = 5, 12, 20
WEIGHTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "slice": lambda w, k: w[..., k : k + 1],
    "picked": lambda w, k: w[..., k].unsqueeze(-1),
    "none": lambda w, k: w[..., k, None],
}
PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda w, x: torch.matmul(w, x.unsqueeze(-1)).squeeze(-1),
    "einsum": lambda w, x: torch.einsum("...oi,...i->...o", w, x),
}


def from_zero(shares: Iterable[Tensor], x: Tensor) -> Tensor:
    total: Tensor | int = 0
    for share in shares:
        total = total + share
    return total  # type: ignore[return-value]


def from_zeros(shares: Iterable[Tensor], x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for share in shares:
        total += share
    return total


def from_the_first(shares: Iterable[Tensor], x: Tensor) -> Tensor:
    first, *rest = shares
    for share in rest:
        first = share + first
    return first


class Layer(nn.Module):
    def __init__(
        self,
        top_k: int = 2,
        total: Callable[[Iterable[Tensor], Tensor], Tensor] = from_zero,
        weight: str = "slice",
        product: str = "matmul",
    ) -> None:
        super().__init__()
        self.router, self.top_k, self.total, self.weight, self.product = nn.Linear(H, E), top_k, total, WEIGHTS[weight], PRODUCTS[product]
        self.w_in, self.b_in = nn.Parameter(torch.randn(E, WIDTH, H) * 0.3), nn.Parameter(torch.randn(E, WIDTH))
        self.w_out, self.b_out = nn.Parameter(torch.randn(E, H, WIDTH) * 0.3), nn.Parameter(torch.randn(E, H))

    def slots(self) -> Iterable[int]:
        return range(self.top_k)

    def share(self, x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
        e = ids[..., k]
        hidden = F.relu(self.product(self.w_in[e], x) + self.b_in[e])
        return self.weight(weights, k) * (self.product(self.w_out[e], hidden) + self.b_out[e])

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(self.top_k)
        return self.total([self.share(x, ids, weights, k) for k in self.slots()], x)


class NotAll(Layer):
    def slots(self) -> Iterable[int]:
        return range(self.top_k - 1)


class OneTwice(Layer):
    def slots(self) -> Iterable[int]:
        return (*range(self.top_k - 1), 0)


class OtherWeight(Layer):
    def share(self, x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
        return super().share(x, ids, weights.flip(-1) if k else weights, k)


class Swapped(Layer):
    def share(self, x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
        return super().share(x, torch.stack([ids[..., self.top_k - 1 - i] for i in self.slots()], -1), weights, k)


class OtherRows(Layer):
    def share(self, x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
        return super().share(x if k == 0 else x * 2, ids, weights, k)


class OtherBody(Layer):
    def share(self, x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
        return super().share(x, ids, weights, k) * (1 + k)


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("shape", [(9,), (2, 5)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("total", [from_zero, from_zeros, from_the_first], ids=lambda f: f.__name__)
@pytest.mark.parametrize("top_k", [2, 3])
def test_all_slots_are_one_layer(
    top_k: int, total: Callable[[Iterable[Tensor], Tensor], Tensor], weight: str, product: str, shape: tuple[int, ...]
) -> None:
    outcome = check_read(Layer(top_k, total, weight, product), *shape, H)
    assert [s.message for s in outcome.skipped] == []
    assert [(f.spec.num_experts, f.spec.top_k, f.spec.activation) for f in outcome.fused] == [(E, top_k, "relu")]


@pytest.mark.parametrize("kind", [NotAll, OneTwice, OtherWeight, OtherRows, OtherBody, Swapped])
def test_slots_that_are_no_layer(kind: type[Layer]) -> None:
    outcome = check_read(kind(3), 9, H)
    assert outcome.fused == []
    assert {s.code for s in outcome.skipped} <= {"missing-experts", "experts-differ", "tokens-differ", "not-recognised"}, outcome
    assert outcome.skipped


class Given(Layer):
    def forward(self, x: Tensor) -> Tensor:
        """Ids that may be anything: ``W[e]`` raises, or counts from the end."""
        ids = (x[..., : self.top_k] * 100).long() % E - 2
        weights = self.router(x)[..., : self.top_k]
        return self.total([self.share(x, ids, weights, k) for k in self.slots()], x)


def test_ids_that_count_from_the_end() -> None:
    """The op leaves out what is below zero, and the program does not."""
    assert check_read(Given(), 9, H).fused == []
