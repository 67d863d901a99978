"""Top-1 experts whose rows are put where their tokens stand, or taken out of all experts' rows: every way to write it, one meaning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import Outcome, check_exact

T, H, I, E = 11, 12, 20, 3  # noqa: E741  (the letters of moefuse.spec)
VALID = torch.arange(T) % 4 != 1

Put = Callable[[Tensor, Tensor, Tensor], Tensor]


def _assigned(out: Tensor, at: Tensor, rows: Tensor) -> Tensor:
    out[at] = rows
    return out


PUTS: dict[str, Put] = {
    "assigned": _assigned,
    "index_copy": lambda out, at, rows: out.index_copy(0, at, rows),
    "index_copy_": lambda out, at, rows: out.index_copy_(-2, at, rows),
    "index_put": lambda out, at, rows: out.index_put((at,), rows),
    "index_put_": lambda out, at, rows: out.index_put_((at,), rows),
    "scatter": lambda out, at, rows: out.scatter(0, at[:, None].expand(-1, H), rows),
    "scatter_": lambda out, at, rows: out.scatter_(0, at[:, None].expand(-1, H), rows),
}
HITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all": lambda hit, valid: hit,
    "and": lambda hit, valid: hit & valid,
    "logical_and": lambda hit, valid: torch.logical_and(valid, hit),
    "mul": lambda hit, valid: hit * valid,
}


class Layer(nn.Module):
    """``top_k``: with two experts for a token the row that is put last hides the other."""

    def __init__(self, put: Put, hit: Callable[[Tensor, Tensor], Tensor], top_k: int = 1) -> None:
        super().__init__()
        self.put, self.hit, self.top_k = put, hit, top_k
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        gates, ids = self.router(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            at = torch.nonzero(self.hit((ids == e).any(-1) if self.top_k > 1 else ids[:, 0] == e, valid), as_tuple=True)[0]
            out = self.put(out, at, expert(x[at]))
        return out * gates[:, :1]


def check(model: nn.Module, *more: Tensor) -> Outcome:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        return check_exact(model, (torch.randn(T, H), *more))


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("hit", HITS)
@pytest.mark.parametrize("put", PUTS)
@pytest.mark.every_value
def test_rows_that_are_put_where_their_tokens_stand(put: str, hit: str) -> None:
    """With a mask of padding, too: tokens that are not valid have no expert, and stay zero."""
    outcome = check(Layer(PUTS[put], HITS[hit]), VALID)
    assert [(s.code, s.message) for s in outcome.skipped] == []
    assert len(outcome.fused) == 1


@pytest.mark.parametrize("put", ["index_copy", "scatter"])
def test_of_two_experts_the_last_one_stays(put: str) -> None:
    outcome = check(Layer(PUTS[put], HITS["all"], top_k=2), VALID)
    assert [s.code for s in outcome.skipped] == ["not-combined"]
    assert outcome.fused == [], "the first one, which is put into zeros, is no layer of its own"


@pytest.mark.parametrize("put", ["index_copy", "scatter"])
def test_rows_that_are_put_elsewhere(put: str) -> None:
    """The near miss: an expert's rows in the places of its tokens, in another order."""
    outcome = check(Layer(lambda out, at, rows: PUTS[put](out, at.flip(0), rows), HITS["all"]), VALID)
    assert outcome.fused == []


def test_a_part_of_each_row_is_no_row() -> None:
    outcome = check(Layer(lambda out, at, rows: out.scatter(0, at[:, None].expand(-1, H // 2), rows[:, : H // 2]), HITS["all"]), VALID)
    assert outcome.fused == []


class Selected(nn.Module):
    """A running select over experts that see every token, with scores that a bias moves: the router's rows are those of [B, S, H]."""

    def __init__(self, choose: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.choose = choose
        self.router, self.bias = nn.Linear(H, E, bias=False), nn.Parameter(torch.randn(E))
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        ids = self.choose(scores, self.bias)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = torch.where((ids == e).unsqueeze(-1), expert(x), y)
        return x + y * scores.gather(-1, ids.unsqueeze(-1))


CHOICES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bias": lambda s, b: (s + b).argmax(-1),
    "temperature": lambda s, b: (s / 0.5 - b).softmax(-1).max(-1)[1],
}


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("tokens", [(T, H), (2, 5, H)], ids=len)
def test_a_running_select(choose: str, tokens: tuple[int, ...]) -> None:
    outcome = check_exact(Selected(CHOICES[choose]), (torch.randn(tokens),))
    assert [(s.code, s.message) for s in outcome.skipped] == []
    assert len(outcome.fused) == 1


class Taken(nn.Module):
    """The chosen rows out of those of all experts."""

    def __init__(self, take: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.take = take
        self.router = nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        gates, ids = self.router(x).softmax(-1).topk(2, dim=-1)
        rows = self.take(torch.stack([expert(x) for expert in self.experts], 1), ids)
        return (rows * gates[: len(rows), :, None]).sum(1)


TAKES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dim=": lambda y, ids: torch.take_along_dim(y, ids[..., None], dim=1),
    "indices=": lambda y, ids: torch.take_along_dim(y, indices=ids.unsqueeze(-1), dim=-2),
    "method": lambda y, ids: y.take_along_dim(ids[..., None].expand(-1, -1, H), 1),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one row of ids for all": lambda y, ids: torch.take_along_dim(y, ids[:1, :, None], dim=1),
    "the first tokens": lambda y, ids: y.gather(1, ids[:3, :, None].expand(-1, -1, H)),
    "of all elements": lambda y, ids: torch.take_along_dim(y, ids[..., None].expand(-1, -1, H).reshape(-1)).view(T, 2, H),
}


@pytest.mark.parametrize("take", TAKES)
def test_rows_are_taken_along_the_experts(take: str) -> None:
    outcome = check_exact(Taken(TAKES[take]), (torch.randn(T, H),))
    assert [(s.code, s.message) for s in outcome.skipped] == []
    assert len(outcome.fused) == 1


@pytest.mark.parametrize("take", OTHERS)
def test_other_rows_are_taken(take: str) -> None:
    """Near misses of the same operations: right, and not fused."""
    assert check_exact(Taken(OTHERS[take]), (torch.randn(T, H),)).fused == []
