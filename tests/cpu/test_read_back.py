"""Accumulators that do not begin with zeros and are read back: ``out = x.clone(); out[m] += w[m] * expert(x[m])``.

The experts are added to what stood there, however the addition is written. Near misses read something else, or scale what they read.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import check_read

E, H, WIDTH = 3, 12, 20
BASES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "clone": lambda layer, x: x.clone(),
    "times one": lambda layer, x: x * 1,
    "shared": lambda layer, x: layer.shared(x),  # type: ignore[operator]
    "zeros": lambda layer, x: torch.zeros_like(x),
}
Index = Tensor | tuple[Tensor, ...]


def iadd(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] += y


def assigned(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = out[at] + y


def turned(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = y + out[at]


def halves(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = out[at] + y * 0.5 + y * 0.5


def put(out: Tensor, at: Index, y: Tensor) -> None:
    out.index_put_(at if isinstance(at, tuple) else (at,), out[at] + y)


def scaled(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = 0.5 * out[at] + y


def twice(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = out[at] + out[at] + y


def stale(out: Tensor, at: Index, y: Tensor) -> None:
    old = out[at]
    out.mul_(0.5)
    out[at] = old + y


def replaced(out: Tensor, at: Index, y: Tensor) -> None:
    out[at] = y


class Layer(nn.Module):
    def __init__(self, base: str, write: Callable[[Tensor, Index, Tensor], None], top_k: int, form: str = "mask", rounds: int = 1) -> None:
        super().__init__()
        self.base, self.write, self.top_k, self.form = BASES[base], write, top_k, form
        self.routers, self.shared = nn.ModuleList(nn.Linear(H, E) for _ in range(rounds)), nn.Linear(H, H)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        for router in self.routers:
            weights, ids = router(x).softmax(-1).topk(self.top_k)
            out = self.base(self, x)
            for e, expert in enumerate(self.experts):
                if self.form == "mask":
                    at: Index = (ids == e).any(-1)
                    w = weights[at] if self.top_k == 1 else (weights * (ids == e)).sum(-1)[at].unsqueeze(-1)
                else:
                    *tokens, slot = torch.where(ids == e)
                    at = tuple(tokens) if x.dim() > 2 else tokens[0]
                    w = weights[(*tokens, slot)].unsqueeze(-1)
                self.write(out, at, w * expert(x[at]))
            x = out
        return x


class AllReadFirst(Layer):
    """Every expert's rows are read before any is written: of what two add to one token, the first is lost."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.routers[0](x).softmax(-1).topk(self.top_k)
        out = self.base(self, x)
        found = [torch.where(ids == e) for e in range(E)]
        old = [out[tok] for tok, _ in found]
        for (tok, slot), before, expert in zip(found, old, self.experts, strict=True):
            out[tok] = before + weights[tok, slot, None] * expert(x[tok])
        return out


class OfAnother(Layer):
    """What is read back is another tensor's."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.routers[0](x).softmax(-1).topk(self.top_k)
        out = self.base(self, x)
        other = out * 2
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] = other[tok] + weights[tok, slot, None] * expert(x[tok])
        return out


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("shape", [(9,), (2, 5)], ids=["tokens", "sequences"])
@pytest.mark.parametrize("form", ["mask", "rows"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("write", [iadd, assigned, turned, halves, put], ids=lambda f: f.__name__)
@pytest.mark.parametrize("base", BASES)
def test_what_stood_there_is_what_is_added_to(
    base: str, write: Callable[[Tensor, Index, Tensor], None], top_k: int, form: str, shape: tuple[int, ...]
) -> None:
    """The read-back is no part of the experts: their body stays the one that the fused op knows."""
    outcome = check_read(Layer(base, write, top_k, form), *shape, H)
    assert [s.message for s in outcome.skipped] == []
    assert [f.spec.activation for f in outcome.fused] == ["custom" if write is halves else "relu"]


@pytest.mark.parametrize("top_k", [1, 2])
def test_one_round_behind_another(top_k: int) -> None:
    """The next round's tokens are the last one's sum, and its accumulator begins with that."""
    outcome = check_read(Layer("clone", iadd, top_k, rounds=2), 9, H)
    assert [f.spec.activation for f in outcome.fused] == ["relu", "relu"], outcome


@pytest.mark.every_value
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("base", ["clone", "shared"])
@pytest.mark.parametrize("write", [scaled, twice, stale], ids=lambda f: f.__name__)
def test_what_is_read_back_and_not_added_once(write: Callable[[Tensor, Index, Tensor], None], base: str, top_k: int) -> None:
    outcome = check_read(Layer(base, write, top_k, "rows"), 9, H)
    assert outcome.fused == []
    assert {s.code for s in outcome.skipped} <= {"not-combined", "sum-changed"}, outcome


def test_rows_replaced_where_a_token_has_two_experts() -> None:
    outcome = check_read(Layer("clone", replaced, 2, "rows"), 9, H)
    assert (outcome.fused, [s.code for s in outcome.skipped]) == ([], ["not-combined"])


@pytest.mark.every_value
@pytest.mark.parametrize("base", ["clone", "zeros"])
@pytest.mark.parametrize("kind", [AllReadFirst, OfAnother])
def test_what_is_added_to_is_not_what_stands_there(kind: type[Layer], base: str) -> None:
    """With two experts for a token. That no more than one expert of four is fused is what counts: alone, it is right."""
    outcome = check_read(kind(base, iadd, 2), 9, H)
    assert [f.spec.num_experts for f in outcome.fused] in ([], [1]), outcome
    assert outcome.skipped
