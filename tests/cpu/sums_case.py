"""Experts on sums of weights and low-rank terms, in any spelling: what is computed, what is kept for the gradients, what is said."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefuse.config import Options
from moefuse.passes.driver import GraphResult, fuse

E, K, H, INNER, R, T = 3, 2, 24, 16, 4, 11

Spelling = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""From W [E, out, in], B [E, out, r], A [E, r, in] and a Parameter without dimensions to the weight; for a list without E."""


class Layer(nn.Module):
    """Plain experts, their tokens chosen in a loop, or all experts on every row (``dense``). Base weights are trained, too."""

    def __init__(self, spelling: Spelling, dense: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.dense = spelling, dense
        self.router = nn.Linear(H, E, bias=False)
        self.w_in, self.w_out = nn.Parameter(torch.randn(E, INNER, H) * 0.2), nn.Parameter(torch.randn(E, H, INNER) * 0.2)
        self.a_in, self.b_in = nn.Parameter(torch.randn(E, R, H) * 0.3), nn.Parameter(torch.randn(E, INNER, R) * 0.3)
        self.a_out, self.b_out = nn.Parameter(torch.randn(E, R, INNER) * 0.3), nn.Parameter(torch.randn(E, H, R) * 0.3)
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        first = self.spelling(self.w_in, self.b_in, self.a_in, self.scale)
        last = self.spelling(self.w_out, self.b_out, self.a_out, self.scale)
        if self.dense:
            table = torch.zeros(len(x), E, dtype=x.dtype)
            hidden = F.silu(torch.einsum("th,eih->tei", x, first))
            return (torch.einsum("tei,ehi->teh", hidden, last) * table.scatter(1, ids, weights)[..., None]).sum(1)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, F.linear(F.silu(F.linear(x[token], first[e])), last[e]) * weights[token, slot, None])
        return out


class Listed(nn.Module):
    """The same with a Parameter for each expert, of which ``first`` and ``last`` have adapters on the first and the last projection.

    What of the others' adapters is here is in no sum. Experts have the ranks ``ranks``.
    """

    def __init__(self, spelling: Spelling, first: Collection[int], last: Collection[int] = (), ranks: Sequence[int] = (R,) * E) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spelling, self.first, self.last = spelling, first, last
        self.router = nn.Linear(H, E, bias=False)
        self.w_in, self.w_out = _list(INNER, [H] * E, 0.2), _list(H, [INNER] * E, 0.2)
        self.a_in, self.b_in = _list(ranks, [H] * E, 0.3), _list(INNER, ranks, 0.3)
        self.a_out, self.b_out = _list(ranks, [INNER] * E, 0.3), _list(H, ranks, 0.3)
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            token, slot = torch.where(ids == e)
            first, last = self.w_in[e], self.w_out[e]
            if e in self.first:
                first = self.spelling(first, self.b_in[e], self.a_in[e], self.scale)
            if e in self.last:
                last = self.spelling(last, self.b_out[e], self.a_out[e], self.scale)
            out.index_add_(0, token, F.linear(F.silu(F.linear(x[token], first)), last) * weights[token, slot, None])
        return out


def _list(rows: int | Sequence[int], columns: Sequence[int], by: float) -> nn.ParameterList:
    heights = [rows] * E if isinstance(rows, int) else rows
    return nn.ParameterList(nn.Parameter(torch.randn(o, i) * by) for o, i in zip(heights, columns, strict=True))


class Outcome:
    """One compiled run: its result and gradients, tensors kept for these (``large``: of the size of weights), what moefuse reports."""

    def __init__(self, layer: nn.Module, x: Tensor) -> None:
        torch._dynamo.reset()
        self.report = GraphResult()
        self.kept: list[Tensor] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
            self.report = fuse(gm, inputs, Options())
            return gm.forward

        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda t: t):
            out = compiled(x.requires_grad_())
        self.results = gradients(layer, x, out)
        given = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        sizes = {frozenset((H, INNER))}
        self.large = [t.shape for t in self.kept if frozenset(t.shape[-2:]) in sizes and t.untyped_storage().data_ptr() not in given]

    def _keep(self, value: Tensor) -> Tensor:
        if type(value) in (Tensor, nn.Parameter):  # what Dynamo runs as it traces is neither
            self.kept.append(value)
        return value

    @property
    def ranks(self) -> tuple[int, ...]:
        (fused,) = self.report.fused
        return fused.spec.lora


def gradients(layer: nn.Module, x: Tensor, out: Tensor) -> list[Tensor | None]:
    """The result, and the gradients of the input and of every parameter; None where there is none."""
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()], allow_unused=True)]


def checked(layer: nn.Module, tokens: int = T) -> Outcome:
    """A run whose result and gradients are those of the program in float64; none stands where the program has none."""
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(1))
    exact, wide = copy.deepcopy(layer).double(), x.double().requires_grad_()
    expected = gradients(exact, wide, exact(wide))
    found = Outcome(layer, x)
    for i, (mine, true) in enumerate(zip(found.results, expected, strict=True)):
        _same(i, mine, true)
    return found


def _same(which: Any, mine: Tensor | None, true: Tensor | None) -> None:
    if mine is None or true is None:
        empty = [t for t in (mine, true) if t is not None]
        assert all(not t.any() for t in empty), f"result {which}: a gradient where there is none"
        return
    error, size = float((mine.double() - true).norm()), float(true.norm())
    assert error <= 4e-6 * size + 1e-5, f"result {which}: {error:.2g} of {size:.2g}"
