"""``out=`` writes to a tensor that is not the first argument: what a layer reads before the write is not what is there behind it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing
from tests.programs.loops import E, H, I, logits_for

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Written(nn.Module):
    """A loop in the middle of which (or behind which) ``name`` is written to."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.up, self.down = nn.Parameter(torch.randn(E, I, H)), nn.Parameter(torch.randn(E, H, I))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        weights, ids = logits.softmax(-1).topk(2)
        weights, rows, out = weights.clone(), x.clone(), torch.zeros_like(x)
        ones, zeros = torch.ones_like(weights), torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(F.silu(F.linear(rows[tok], self.up[e])), self.down[e]) * weights[tok, slot, None])
            if e == 1 and self.name == "weights":
                torch.add(ones, ones, out=weights)
            if e == 1 and self.name == "tokens":
                torch.add(zeros, 3.0, out=rows)
            if e == 1 and self.name == "ids":
                torch.zeros(ids.shape, dtype=ids.dtype, out=ids)
            if e == 1 and self.name == "sum":
                torch.add(zeros, 1.0, out=out)
        if self.name == "weights afterwards":
            torch.add(ones, ones, out=weights)
        return out * weights.sum()


@pytest.mark.parametrize("name", ["weights", "tokens", "ids", "sum", "weights afterwards"])
def test_what_out_writes_to(name: str) -> None:
    torch.manual_seed(0)
    model, seen = Written(name), Seen()
    x, logits = torch.randn(5, H), logits_for("random", 5)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=capturing(seen))(x, logits), model(x, logits), rtol=1e-5, atol=1e-4)
    assert len(seen.report.fused) == (name == "weights afterwards")
