"""Every expert on every token of [B, S, H], weighted by a table [B * S, E] that is viewed as [E, B, S] (Qwen3-VL in transformers 4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.test_rows_by_slot import WIDTH, E, H
from tests.programs.check import Outcome, light


class Dense(nn.Module):
    def __init__(self, shaped: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.shaped = shaped
        self.router = nn.Linear(H, E)
        self.first = nn.Parameter(torch.randn(E, H, 2 * WIDTH) / H**0.5)
        self.last = nn.Parameter(torch.randn(E, WIDTH, H) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        weights, ids = self.router(x.reshape(-1, H)).softmax(-1).topk(2, -1)
        table = torch.zeros(weights.shape[0], E).scatter(1, ids, weights)
        rows = x.reshape(-1, H).repeat(E, 1).view(E, -1, H)
        gate, up = torch.bmm(rows, self.first).chunk(2, -1)
        out = torch.bmm(torch.nn.functional.silu(gate) * up, self.last).reshape(E, batch, -1, H)
        return (out * self.shaped(table.transpose(0, 1), batch)[..., None]).sum(0)


def by_batch(table: Tensor, batch: int) -> Tensor:
    return table.view(E, batch, -1)


def the_other_way(table: Tensor, batch: int) -> Tensor:
    """The near miss: with as many items as places only the values tell."""
    return table.reshape(E, -1, batch).transpose(1, 2)


def check(model: nn.Module, *inputs: Tensor, dynamic: bool = False) -> Outcome:
    torch._dynamo.reset()
    outcome = Outcome()
    compiled = torch.compile(model, backend=light(outcome), fullgraph=True, dynamic=dynamic)
    for x in inputs:
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
    return outcome


def tokens(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, H, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize("sizes", [(3, 5), (4, 4), (1, 6), (5, 1)], ids=str)
def test_a_table_viewed_by_batch(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    outcome = check(Dense(by_batch), tokens(*sizes))
    assert [f.spec.top_k for f in outcome.fused] == [2], outcome


def test_sizes_that_change() -> None:
    torch.manual_seed(0)
    outcome = check(Dense(by_batch), tokens(3, 5), tokens(4, 7), dynamic=True)
    assert (len(outcome.fused), outcome.graphs) == (1, 1), outcome


@pytest.mark.parametrize("sizes", [(3, 5), (4, 4)], ids=str)
def test_transposed_it_is_another_table(sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    assert check(Dense(the_other_way), tokens(*sizes)).fused == []
