"""Sequences of one token, as in decoding: dimensions of size one, of which nobody can tell where a reshape has put them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

H, I, E, CAPACITY = 8, 6, 4, 64  # noqa: E741  (the letters of moefuse.spec)

Combine = Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """Top-1 with a capacity along the sequence. ``combine`` is given the experts, x [B, S, H], the probability and the mask [B, S, E]."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.combine, self.router = combine, nn.Linear(H, E)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.ReLU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        chosen = F.one_hot(p.argmax(-1), E)
        chosen = chosen * (chosen.cumsum(-2) <= CAPACITY)
        return self.combine(self.experts, x, p.max(-1).values, chosen).view(x.shape)


def slots_first(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    x, w, mask = x.view(-1, H), w.view(-1, 1), chosen.view(-1, 1, E).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        slot, token = torch.where(mask[hit].squeeze(0))
        out.index_add_(0, token, experts[hit[0]](x[None, token].reshape(-1, H)) * w[token, slot, None])  # type: ignore[index]
    return out


def tokens_first(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    x, w, mask = x.view(-1, H), w.view(-1, 1), chosen.view(-1, 1, E)
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        token, slot = torch.where(mask[:, :, e])
        out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
    return out


def by_place(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        b, s = chosen[..., e].nonzero(as_tuple=True)
        out[b, s] = expert(x[b, s]) * w[b, s, None]
    return out


def by_sequence(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """The number of the sequence alone, or of the place alone: all there is to know where the other has one."""
    axis = int(x.shape[0] == 1)
    flat, w = x.flatten(0, 1), w.flatten()
    out = torch.zeros_like(flat)
    for e, expert in enumerate(experts):
        token = torch.where(chosen[..., e])[axis]
        out.index_add_(0, token, expert(flat[token]) * w[token, None])
    return out


def first_place(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """A near miss: the expert is given the first token of the sequence, also where another one has chosen it."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        b, s = chosen[..., e].nonzero(as_tuple=True)
        out[b, s] = expert(x[:, 0][b]) * w[b, s, None]
    return out


def number_of_another(experts: nn.ModuleList, x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """A near miss: the place in the sequence is taken for the number of the token (there are more rows than tokens of a sequence)."""
    flat = x.flatten(0, 1)
    out = torch.zeros_like(flat)
    for e, expert in enumerate(experts):
        b, s = chosen[..., e].nonzero(as_tuple=True)
        out.index_add_(0, s, expert(flat[s]) * w[b, s, None])
    return out


def compare(combine: Combine, shape: tuple[int, int], grad: bool) -> Seen:
    torch.manual_seed(0)
    layer, x, seen = Layer(combine), torch.randn(*shape, H), Seen()
    twin = copy.deepcopy(layer)
    layer.compile(backend=capturing(seen))
    with torch.set_grad_enabled(grad):
        got, expected = layer(x), twin(x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        if grad:
            got.square().sum().backward()
            expected.square().sum().backward()
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, torch.zeros_like(mine) if other.grad is None else other.grad, rtol=1e-4, atol=1e-6)
    return seen


ALWAYS = [(slots_first, (1, 1)), (slots_first, (3, 1)), (tokens_first, (3, 1)), (by_place, (1, 4))]
OFTEN = [(c, s) for c in (slots_first, tokens_first, by_place, by_sequence) for s in ((1, 1), (3, 1), (1, 4)) if (c, s) not in ALWAYS]
OFTEN.remove((by_sequence, (1, 1)))  # no rule says which of the two is meant: below


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("combine", "shape"), [*ALWAYS, *(pytest.param(*one, marks=pytest.mark.sampled(3)) for one in OFTEN)])
def test_one_token(combine: Combine, shape: tuple[int, int]) -> None:
    for grad in (False, True):
        torch._dynamo.reset()
        seen = compare(combine, shape, grad)
        assert (len(seen.report.fused), seen.report.skipped) == (1, []), seen.report


ALIKE = [(by_sequence, (1, 1)), *itertools.product([first_place, number_of_another], [(3, 1), (2, 3)])]


@pytest.mark.parametrize(("combine", "shape"), ALIKE)
def test_what_only_looks_alike_with_one(combine: Combine, shape: tuple[int, int]) -> None:
    """With one token a sequence some of it is the same as above; whatever is fused is right."""
    compare(combine, shape, grad=False)


class OneExpert(nn.Module):
    """A model of one expert, whose flat weights are gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, 1), nn.Parameter(torch.randn(I, H)), nn.Parameter(torch.randn(H, I))

    def forward(self, x: Tensor) -> Tensor:
        w, ids = self.gate(x).softmax(-1).topk(1, -1)
        h = torch.einsum("th,tkih->tki", x, self.up.view(1, I, H)[ids]).relu()
        return (torch.einsum("tki,tkhi->tkh", h, self.down.view(1, H, I)[ids]) * w[..., None]).sum(1)


def test_one_expert() -> None:
    """Nothing depends on the router; a rule that looked for the experts' dimension raised."""
    layer, seen, x = OneExpert(), Seen(), torch.randn(5, H)
    torch.testing.assert_close(torch.compile(layer, backend=capturing(seen))(x), layer(x))
    assert [s.code for s in seen.report.skipped if s.code == "internal-error"] == []
