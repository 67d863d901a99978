"""Layers with experts, as people write them; every one takes tokens [T, H] and has E experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

H, I, K = 8, 12, 2  # noqa: E741  (the letters of moefuse.spec)


class Routed(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(H, experts, bias=False)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(K)
        return weights / weights.sum(-1, keepdim=True), ids


class Stacked(Routed):
    """[E, 2 I, H] and [E, H, I], an expert at a time."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * I, H) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, H, I) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, x[token], weights[token, slot, None]))
        return out

    def expert(self, e: int, rows: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up[e]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down[e]) * weight


class Hit(Stacked):
    """Only experts that have tokens, as transformers has it: a rank without tokens runs nothing that reads a weight."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, len(self.gate_up)).permute(2, 1, 0)
        for hit in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            e = hit[0]
            slot, token = torch.where(mask[e])
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


class Skipping(Stacked):
    """Asks how many tokens an expert has: where a rank has none at all, torch knows the answer when it traces."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            if token.numel() == 0:
                continue
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


class Buffers(Stacked):
    """A bias for each expert that is no Parameter."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.register_buffer("bias", torch.randn(experts, 2 * I))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e], self.bias[e]).chunk(2, -1)  # type: ignore[index]
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


class Transposed(Routed):
    """[E, H, I] with biases, every expert for every token."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.up, self.up_bias = nn.Parameter(torch.randn(experts, H, I) * 0.3), nn.Parameter(torch.randn(experts, I) * 0.3)
        self.down, self.down_bias = nn.Parameter(torch.randn(experts, I, H) * 0.3), nn.Parameter(torch.randn(experts, H) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        table = torch.zeros(len(x), len(self.up), dtype=x.dtype, device=x.device).scatter(1, ids, weights)
        h = F.gelu(torch.bmm(x.expand(len(self.up), -1, -1), self.up) + self.up_bias[:, None])
        out = torch.bmm(h, self.down) + self.down_bias[:, None]
        return (out * table.t()[:, :, None]).sum(0)


class Listed(Routed):
    """An ``nn.ModuleList`` of MLPs."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


class ByProjection(Routed):
    """A list for each projection."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.up, self.down = (nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(experts)) for sizes in ((H, I), (I, H)))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.down[e](F.gelu(self.up[e](x[token]))) * weights[token, slot, None])
        return out


class Projection(nn.Module):
    """One of all experts, on rows in their order."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, outputs, inputs) / 3)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        return torch.cat([F.linear(some, w) for some, w in zip(rows.split(counts), self.weight, strict=True)])


class ByModule(Routed):
    """A module of stacked weights for each projection, as in JetMoe."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.up, self.down = Projection(experts, H, I), Projection(experts, I, H)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=len(self.up.weight)).tolist()
        token = order // ids.shape[1]
        y = self.down(F.gelu(self.up(x[token], counts)), counts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, token, y)


class Distinct(Listed):
    """A loop over the ids that occur, as numbers."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in torch.unique(ids).tolist():
            token, slot = torch.where(ids == e)
            out[token] += weights[token, slot, None] * self.experts[e](x[token])
        return out


class Again(Listed):
    """Computed again in backward, in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(torch.tanh(self.gate(x)).pow(2) * torch.cos(self.up(x)))
        return out


class Grouped(Routed):
    """An activation that no template has: grouped products around the code as it is."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(Own() for _ in range(experts))

    forward = Listed.forward


class OfTheSum(Grouped):
    """A function of the sum over hidden units."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.experts = nn.ModuleList(nn.Sequential(Own(), nn.Tanh()) for _ in range(experts))


class Shared(Stacked):
    """With an expert that every token takes, weighted by a gate of its own."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.shared, self.share = nn.Sequential(nn.Linear(H, I), nn.SiLU(), nn.Linear(I, H)), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) + self.shared(x) * self.share(x).sigmoid()
        return out


class Counting(Stacked):
    """Counts in a buffer what its experts get, as a bias that balances them is made of."""

    load: Tensor

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.load += F.one_hot(self.route(x)[1], len(self.load)).sum((0, 1))
        return out


class Inner(Routed):
    """Weights are another module's than the router."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.held = Stacked(experts)
        del self.held.router

    def forward(self, x: Tensor) -> Tensor:
        self.held.route = self.route  # type: ignore[method-assign]
        out: Tensor = self.held(x)
        return out


class Blocks(nn.Module):
    """One layer of a kind in two blocks."""

    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        self.first = Around(kind(experts))
        self.second = Around(self.first.layer)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x))
        return out


class Around(nn.Module):
    """A residual connection."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)  # type: ignore[no-any-return]


class OnInput(Stacked):
    """Routing weights multiply the token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token] * weights[token, slot, None], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]))
        return out


class Twice(Stacked):
    """Weights are asked for their size, read once more, and detached."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        assert self.gate_up.element_size() == self.down.element_size()
        both, last, unread = self.gate_up.detach(), self.down.detach(), self.down.detach().view(-1)
        out = torch.zeros_like(x)
        for e in range(len(last)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], both[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, last[e]) * weights[token, slot, None])
        del unread
        return out


class Scaled(Stacked):
    """Weights times a Parameter, in each call."""

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.scale = nn.Parameter(torch.rand(experts, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out, both = torch.zeros_like(x), self.gate_up * self.scale
        for e in range(len(self.down)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], both[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None])
        return out


class Interleaved(Stacked):
    """Gate and up projection row by row, with biases."""

    TURNS = True

    def __init__(self, experts: int) -> None:
        super().__init__(experts)
        self.gate_up_bias, self.down_bias = nn.Parameter(torch.randn(experts, 2 * I)), nn.Parameter(torch.randn(experts, H))

    def expert(self, e: int, rows: Tensor, weight: Tensor) -> Tensor:
        h = F.linear(rows, self.gate_up[e], self.gate_up_bias[e])
        return F.linear(F.silu(h[..., ::2]) * h[..., 1::2], self.down[e], self.down_bias[e]) * weight


class OwnMerged(Interleaved):
    """The same weights and what no template has between them; without ``TURNS`` gate and up projection one behind the other."""

    TURNS = False

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.where(gate > 0.2, gate.clamp(max=1.5) * up.sin(), gate / (1 + up.abs()))

    def expert(self, e: int, rows: Tensor, weight: Tensor) -> Tensor:
        h = F.linear(rows, self.gate_up[e], self.gate_up_bias[e])
        gate, up = (h[..., ::2], h[..., 1::2]) if self.TURNS else h.chunk(2, -1)
        h = self.between(gate, up) * weight.sqrt() + rows.mean(-1, keepdim=True)  # numbers of a row are of each unit, too
        return F.linear(h, self.down[e], self.down_bias[e]) / 2 * weight


class OwnInTurns(OwnMerged):
    TURNS = True


class OfAllUnits(OwnMerged):
    """A norm of all hidden units of a token."""

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.layer_norm(gate.cos() * up, (I,))


class Mixed(Stacked):
    """Rows of an expert are mixed: refused, so its weights are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            h = (F.silu(gate) * up).cumsum(0)
            out.index_add_(0, token, F.linear(h, self.down[e]) * weights[token, slot, None])
        return out


class One(nn.Module):
    """A layer of a kind behind a norm: for what does not change with the number of layers, and takes half of the time to compile."""

    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(H), kind(experts)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two layers of a kind, with a norm."""

    def __init__(self, kind: type[nn.Module], experts: int) -> None:
        super().__init__()
        self.first, self.norm, self.second = kind(experts), nn.LayerNorm(H), kind(experts)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        out: Tensor = x + self.second(self.norm(x))
        return out
