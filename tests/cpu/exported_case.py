"""The README's five spellings as modules, to be exported."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 2, 64, 48

Mix = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def expert(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    gate, up = F.linear(x, w_in).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, w_out)


def selected(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(ids == e)
        out.index_add_(0, token, expert(x[token], w_in[e], w_out[e]) * weights[token, slot, None])
    return out


def masked(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        out = out + expert(x, w_in[e], w_out[e]) * (weights * (ids == e)).sum(-1, keepdim=True)
    return out


def slots(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    gate, up = torch.einsum("th,tkih->tki", x, w_in[ids]).chunk(2, dim=-1)
    y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, w_out[ids])
    return (y * weights[..., None]).sum(dim=1)


def sorted_by_expert(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    order = ids.flatten().argsort()
    ends = F.one_hot(ids.flatten(), EXPERTS).sum(0).cumsum(0).to(torch.int32)
    rows = x[order // TOP_K].bfloat16()
    gate, up = F.grouped_mm(rows, w_in.bfloat16().transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, w_out.bfloat16().transpose(1, 2), offs=ends).to(x.dtype)
    return torch.zeros_like(x).index_add_(0, order // TOP_K, y * weights.flatten()[order].unsqueeze(-1))


def dense(x: Tensor, ids: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    table = torch.zeros(x.size(0), EXPERTS).scatter(1, ids, weights)
    gate, up = torch.einsum("th,eih->tei", x, w_in).chunk(2, dim=-1)
    return torch.einsum("teh,te->th", torch.einsum("tei,ehi->teh", F.silu(gate) * up, w_out), table)


SPELLINGS: dict[str, Mix] = {mix.__name__: mix for mix in (selected, masked, slots, sorted_by_expert, dense)}


class Model(nn.Module):
    """A residual block around one spelling, with stacked weights."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.router = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.w_in = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) * 0.1)
        self.w_out = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * 0.1)
        self.mix = SPELLINGS[mix]

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        weights, ids = self.router(rows).softmax(-1).topk(TOP_K)
        return x + self.mix(rows, ids, weights, self.w_in, self.w_out)


def tokens(count: int = 13) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(1))


def exported(mix: str, *, decomposed: bool, dynamic: bool) -> torch.export.ExportedProgram:
    """The model as torch.export gives it, or as the operators that ``run_decompositions()`` leaves."""
    sizes = {"x": {0: torch.export.Dim("tokens", min=2, max=4096)}} if dynamic else None
    with torch.no_grad():
        program = torch.export.export(Model(mix).eval(), (tokens(),), dynamic_shapes=sizes)
        return program.run_decompositions() if decomposed else program
