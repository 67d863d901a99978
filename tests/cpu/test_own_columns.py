"""The weight of expert i from column i of a table, for rows that chose it: ``prob[chosen][:, i:i + 1]``, and other ways to write that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.programs.check import check_read

E, H, WIDTH = 3, 12, 20
COLUMNS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "sliced": lambda p, at, i: p[at][:, i : i + 1],
    "picked": lambda p, at, i: p[at][:, i].unsqueeze(-1),
    "last": lambda p, at, i: p[at][..., i, None],
    "from the end": lambda p, at, i: p[at][:, i - E, None],
    "at once": lambda p, at, i: p[at, i : i + 1],
    "at once, picked": lambda p, at, i: p[at, i, None],
    "before": lambda p, at, i: p[..., i : i + 1][at],
    "picked before": lambda p, at, i: p[..., i][at][:, None],
    "narrow": lambda p, at, i: p[at].narrow(1, i, 1),
    "narrow before": lambda p, at, i: p.narrow(-1, i, 1)[at],
    "split": lambda p, at, i: p[at].split(1, dim=-1)[i],
    "select": lambda p, at, i: p[at].select(1, i).view(-1, 1),
}


class Layer(nn.Module):
    def __init__(self, column: Callable[[Tensor, Tensor, int], Tensor], top_k: int, rows: bool) -> None:
        super().__init__()
        self.column, self.top_k, self.rows, self.router = column, top_k, rows, nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, WIDTH), nn.ReLU(), nn.Linear(WIDTH, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        prob = self.router(x).softmax(-1)
        ids = prob.topk(self.top_k).indices
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            at = (ids == i).any(-1)
            at = torch.where(at)[0] if self.rows else at
            out[at] += expert(x[at]) * self.column(prob, at, i)
        return out


@pytest.fixture(autouse=True)
def _same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.every_value
@pytest.mark.parametrize("form", ["mask", "rows", "sequences"])
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_the_column_of_an_expert_is_its_weight(column: Callable[[Tensor, Tensor, int], Tensor], top_k: int, form: str) -> None:
    outcome = check_read(Layer(column, top_k, form == "rows"), *((2, 5) if form == "sequences" else (9,)), H)
    assert [s.message for s in outcome.skipped] == []
    assert [f.spec.activation for f in outcome.fused] == ["relu"]


@pytest.mark.parametrize("top_k", [1, 2])
def test_another_experts_column(top_k: int) -> None:
    outcome = check_read(Layer(lambda p, at, i: p[at][:, (i + 1) % E, None], top_k, False), 9, H)
    assert (outcome.fused, [s.code for s in outcome.skipped]) == ([], ["experts-differ"])


@pytest.mark.every_value
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("at_once", [False, True])
def test_one_column_for_all_experts(at_once: bool, top_k: int) -> None:
    """Column 0 is the one of expert 0 by its number only."""
    outcome = check_read(Layer(lambda p, at, i: p[at, 0, None] if at_once else p[at][:, :1], top_k, False), 9, H)
    assert [f.spec.num_experts for f in outcome.fused] == [E], outcome
