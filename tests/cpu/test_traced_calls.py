"""Functions that a program tells Dynamo not to look into (``allow_in_graph``), called for each expert that has tokens.

One that is given nothing and gives nothing runs while a graph is traced, and no compiler leaves anything of it for calls. So it does not
depend on who has tokens. Any other may.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse

E, K, H = 4, 2, 16
LOADED: list[int] = []


@torch._dynamo.allow_in_graph
def load() -> None:
    LOADED.append(1)


@torch._dynamo.allow_in_graph
def noted(rows: Tensor) -> None:
    LOADED.append(len(rows.shape))


@torch._dynamo.allow_in_graph
def numbered(expert: int) -> None:
    LOADED.append(expert)


@torch._dynamo.allow_in_graph
def made() -> Tensor:
    return torch.ones(())


class Layer(nn.Module):
    """A loop over experts with tokens."""

    def __init__(self, call: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.router, self.call = nn.Linear(H, E, bias=False), call
        self.up, self.down = nn.Parameter(torch.randn(E, 24, H)), nn.Parameter(torch.randn(E, H, 24))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero().flatten():
            tok, slot = torch.where(ids == e)
            rows = x[tok]
            found = self.call(rows)
            rows = rows if found is None else rows * found
            out.index_add_(0, tok, F.linear(F.silu(F.linear(rows, self.up[e])), self.down[e]) * weights[tok, slot, None])
        return out


CALLS: dict[str, tuple[Callable[[Tensor], Tensor | None], bool]] = {
    "nothing": (lambda _: load(), True),
    "rows": (noted, False),
    "a number": (lambda _: numbered(3), False),
    "a value": (lambda _: made(), False),
}


@pytest.mark.sampled(1)
@pytest.mark.code_once
@pytest.mark.parametrize("name", CALLS)
def test_a_call_for_each_expert(name: str, fresh_dynamo: None) -> None:
    call, fused = CALLS[name]
    torch.manual_seed(0)
    model, x = Layer(call), torch.randn(1, H)
    compiled = torch.compile(model, backend="moefuse", dynamic=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        if fused:
            before = len(LOADED)
            compiled(x)
            assert len(LOADED) == before
    report = moefuse.last_report()
    assert report is not None
    assert bool(report.fused) == fused, str(report)
