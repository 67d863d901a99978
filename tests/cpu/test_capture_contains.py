"""Numbers out of tensors that are asked for by ``in``: to Dynamo no symbolic number is equal, so capture must not make them symbolic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H = 3, 8


def _flat(ids: Tensor) -> list[int]:
    return [e for e in range(E) if e in ids.flatten().tolist()]


def _unique(ids: Tensor) -> list[int]:
    chosen = torch.unique(ids).tolist()
    return [e for e in range(E) if e in chosen]


def _counts(ids: Tensor) -> list[int]:
    counts = torch.bincount(ids.flatten(), minlength=E).tolist()
    return [] if 0 in counts else list(range(E))


def _column(ids: Tensor) -> list[int]:
    return [e for e in range(E) if e in ids[:, 0].tolist()]


def _rows(ids: Tensor) -> list[int]:
    return [e for e in range(E) if any(e in row for row in ids.tolist())]


def _not_in(ids: Tensor) -> list[int]:
    return [e for e in range(E) if e not in tuple(ids[0].tolist())]


def _is(ids: Tensor) -> list[int]:
    return [e for e in range(E) if any(n is e for n in ids.flatten().tolist())]


def _is_true(ids: Tensor) -> list[int]:
    return [e for e in range(E) if e or (ids == 1).any().item() is True]


class Layer(nn.Module):
    def __init__(self, chosen: Callable[[Tensor], list[int]]) -> None:
        super().__init__()
        self.chosen = chosen
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 6), nn.ReLU(), nn.Linear(6, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in self.chosen(ids):
            token, slot = torch.where(ids == e)
            out = out.index_add(0, token, self.experts[e](x[token]) * weights[token, slot, None])
        return out


@pytest.mark.sampled(2)
@pytest.mark.parametrize("chosen", [_flat, _unique, _counts, _column, _rows, _not_in, _is, _is_true], ids=lambda f: f.__name__.strip("_"))
def test_in(chosen: Callable[[Tensor], list[int]]) -> None:
    """Every call is eager's; without this, all experts were passed over, or none, and the report said nothing."""
    torch.manual_seed(0)
    layer = Layer(chosen).double()
    inputs = [torch.randn(n, H, dtype=torch.float64) for n in (9, 9, 2, 1)]
    seen = Seen()
    with torch.no_grad():
        compiled = torch.compile(layer, backend=capturing(seen))
        for x in inputs:
            torch.testing.assert_close(compiled(x), layer(x), rtol=1e-12, atol=1e-12)
