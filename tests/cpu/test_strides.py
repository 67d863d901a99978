"""The strides of a result are those that eager gives it: a program may read them, and views depend on them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import moefuse

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H = 4, 16


class Layer(nn.Module):
    def __init__(self, spelling: str, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.spelling, self.after = spelling, after
        self.gate = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 12), nn.ReLU(), nn.Linear(12, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.spelling == "masked":
                out = out + expert(x) * ((ids == e) * weights).sum(-1, keepdim=True)
            elif self.spelling == "masked in place":
                out += expert(x) * ((ids == e) * weights).sum(-1, keepdim=True)
            else:
                token, slot = torch.where(ids == e)
                out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return self.after(out)


def step(run: Callable[[Tensor], Tensor], layer: Layer, x: Tensor) -> list[Tensor]:
    """The result and the gradients of one call."""
    layer.zero_grad()
    fed = x.detach().requires_grad_()
    out = run(fed)
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum().backward()
    return [out.detach(), fed.grad, *(torch.zeros_like(p) if p.grad is None else p.grad for p in layer.parameters())]  # type: ignore[list-item]


def _as_it_is(out: Tensor) -> Tensor:
    return out


def _flat(out: Tensor) -> Tensor:
    return out.t().view(-1) if out.stride(0) == 1 and out.dim() == 2 else out.view(-1)


def _raw(out: Tensor) -> Tensor:
    return out.as_strided((out.numel(),), (1,))


def _channels_first(n: int) -> Tensor:
    """[2, n, H] tokens of an image whose channels come first in memory."""
    return torch.randn(2, H, n, dtype=torch.float64).transpose(1, 2)


def _columns(n: int) -> Tensor:
    return torch.randn(H, n, dtype=torch.float64).t()


def _sequence_first(n: int) -> Tensor:
    return torch.randn(n, 2, H, dtype=torch.float64).transpose(0, 1)


def _every_other(n: int) -> Tensor:
    return torch.randn(n, 2 * H, dtype=torch.float64)[:, ::2]


@pytest.mark.sampled(9)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("after", [_as_it_is, _flat, _raw], ids=lambda f: f.__name__.strip("_"))
@pytest.mark.parametrize("spelling", ["selected", "masked", "masked in place"])
def test_transposed_tokens(spelling: str, after: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    """Values under as_strided were a transposed matrix's; a view that eager allows stopped with an error."""
    _agrees(Layer(spelling, after), [_columns(n) for n in (9, 5)], dynamic)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tokens", [_channels_first, _sequence_first, _every_other], ids=lambda f: f.__name__.strip("_"))
def test_other_layouts(tokens: Callable[[int], Tensor]) -> None:
    """Three dimensions in any order, and tokens with gaps, whose result has none."""
    _agrees(Layer("masked", _as_it_is), [tokens(n) for n in (9, 5)], None)


def test_one_token() -> None:
    """The stride of a dimension of one element means nothing, to torch neither."""
    _agrees(Layer("selected", _as_it_is), [_columns(1)], False)


def _agrees(layer: Layer, inputs: list[Tensor], dynamic: bool | None) -> None:
    torch.manual_seed(0)
    layer = layer.double()
    compiled = torch.compile(layer, backend="moefuse", dynamic=dynamic)
    for x in inputs:
        expected, got = step(layer, layer, x), step(compiled, layer, x)
        steps = [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1] for t in (got[0], expected[0])]
        assert steps[0] == steps[1]
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    assert moefuse.last_report().fused
