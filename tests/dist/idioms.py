"""Ways to write experts, ways to choose them and things around them, each with each: what the property test draws programs from.

Tokens [T, H] come with ``nudge`` [T, E], which is added to the scores and so decides the routing, or is the ids themselves.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, I, LATENT = 8, 12, 4  # noqa: E741  (the letters of moefuse.spec)


class Stack(nn.Module):
    """[E, 2 I, W] and [E, W, I]."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * I, width) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, width, I) * 0.3)


class Loop(Stack):
    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, (F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]).to(out.dtype))
        return out


class OnInput(Stack):
    """Routing weights multiply the token."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token] * weights[token, slot, None], self.gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, F.linear(F.silu(gate) * up, self.down[e]).to(out.dtype))
        return out


class Biased(Stack):
    """Gate and up projection row by row."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, width)
        self.gate_up_bias, self.down_bias = nn.Parameter(torch.randn(experts, 2 * I)), nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            h = F.linear(x[token], self.gate_up[e], self.gate_up_bias[e])
            h = F.linear(F.silu(h[..., ::2]) * h[..., 1::2], self.down[e], self.down_bias[e])
            out.index_add_(0, token, (h * weights[token, slot, None]).to(out.dtype))
        return out


class Gathered(Stack):
    """The weights of each slot's expert are read, and multiplied as a batch."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("th,tkoh->tko", x, self.gate_up[ids]).chunk(2, -1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.down[ids])
        return (y * weights[..., None]).sum(1)


class Dense(Stack):
    """Every expert for every token, most of them times zero."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        table = torch.zeros(len(x), len(self.gate_up), dtype=weights.dtype, device=x.device).scatter(1, ids, weights)
        gate, up = torch.bmm(x.expand(len(self.gate_up), -1, -1), self.gate_up.transpose(1, 2)).chunk(2, -1)
        y = torch.bmm(F.silu(gate) * up, self.down.transpose(1, 2))
        return (y * table.t()[:, :, None]).sum(0)


class Sorted(Stack):
    """Slots in the order of experts, a piece of them for each."""

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        rows = x[order // ids.shape[1]]
        counts = torch.bincount(flat, minlength=len(self.gate_up)).tolist()
        pieces, start = [], 0
        for e, count in enumerate(counts):
            gate, up = F.linear(rows[start : start + count], self.gate_up[e]).chunk(2, -1)
            pieces.append(F.linear(F.silu(gate) * up, self.down[e]))
            start += count
        y = torch.cat(pieces) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // ids.shape[1], y.to(x.dtype))


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, I), nn.Linear(I, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class List(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.items = nn.ModuleList(Mlp(width) for _ in range(experts))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.items):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


class Dict(nn.Module):
    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.items = nn.ModuleDict({f"expert_{e}": Mlp(width) for e in range(experts)})

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.items)):
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, (self.items[f"expert_{e}"](x[token]) * weights[token, slot, None]).to(out.dtype))
        return out


class Odd(nn.Module):
    """An activation that no template has: grouped products around it."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(experts, I, width) * 0.3), nn.Parameter(torch.randn(experts, width, I) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.up)):
            token, slot = torch.where(ids == e)
            h = F.linear(x[token], self.up[e])
            y = F.linear(torch.tanh(h).pow(2) * torch.cos(h), self.down[e])
            out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
        return out


class Adapted(Stack):
    """Low-rank terms that every rank has whole, as PEFT holds them: [R E, W] and [2 I, R E]."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, width)
        self.a, self.b = nn.Parameter(torch.randn(3 * experts, width) * 0.3), nn.Parameter(torch.randn(2 * I, 3 * experts) * 0.3)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, count = torch.zeros_like(x), len(self.gate_up)
        a, b = self.a.reshape(count, 3, -1), self.b.reshape(2 * I, 3, count).permute(2, 0, 1)
        gate_up = torch.baddbmm(self.gate_up, b, a, alpha=0.5)
        for e in range(count):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], gate_up[e]).chunk(2, -1)
            out.index_add_(0, token, (F.linear(F.silu(gate) * up, self.down[e]) * weights[token, slot, None]).to(out.dtype))
        return out


class Scaled(Stack):
    """A number of each expert and a vector for all experts, trained; every rank has them whole."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, width)
        self.scale, self.tone = nn.Parameter(torch.rand(experts) + 0.5), nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[e]) * self.scale[e]
            out.index_add_(0, token, (y * self.tone * weights[token, slot, None]).to(out.dtype))
        return out


class Own(Stack):
    """What a rank knows of its own tokens is in its experts: a statistic that is a buffer, a mean of the call, their number."""

    scale: Tensor

    def __init__(self, experts: int, width: int) -> None:
        super().__init__(experts, width)
        self.register_buffer("scale", torch.ones(experts))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out, tone = torch.zeros_like(x), torch.cat([x.detach(), torch.ones_like(x[:1])]).mean(0)
        for e in range(len(self.gate_up)):
            token, slot = torch.where(ids == e)
            gate, up = F.linear(x[token], self.gate_up[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down[e]) * self.scale[e] * tone / (len(x) + 1)
            out.index_add_(0, token, (y * weights[token, slot, None]).to(out.dtype))
        return out


BODIES: dict[str, type[nn.Module]] = {
    body.__name__.lower(): body for body in (Loop, OnInput, Biased, Gathered, Dense, Sorted, List, Dict, Odd, Adapted, Scaled, Own)
}
ROUTERS = ("softmax", "sigmoid", "nested", "given")
AROUND = ("nothing", "latent", "shared", "gated", "scaled", "twice", "counts")
"""``"counts"``: what each expert gets is added to a buffer. ``"twice"``: in the second pass the graph knows a number of tokens that experts
of several ranks have been in front of."""
ANY_IDS = ("loop", "biased", "list", "dict", "odd", "oninput", "adapted", "scaled", "own")
"""Bodies in which an expert may be named twice for a token, and a number that is no expert's means nothing."""


class Layer(nn.Module):
    """Experts of one body, chosen and surrounded in one way."""

    load: Tensor

    def __init__(self, body: str, router: str, around: str, experts: int, top_k: int) -> None:
        super().__init__()
        self.how, self.around, self.top_k = router, around, top_k
        width = LATENT if around == "latent" else H
        self.router = nn.Linear(H, experts, bias=False)
        self.experts = BODIES[body](experts, width)
        if around == "latent":
            self.into, self.out_of = nn.Linear(H, LATENT, bias=False), nn.Linear(LATENT, H, bias=False)
        if around in ("shared", "gated", "scaled"):
            self.shared = Mlp(H)
        if around == "gated":
            self.share = nn.Linear(H, 1)
        if around == "counts":
            self.register_buffer("load", torch.zeros(experts))

    def forward(self, x: Tensor, nudge: Tensor | None = None) -> Tensor:
        ids, weights = self.route(x, torch.zeros_like(self.router(x)) if nudge is None else nudge)
        if self.around == "latent":
            out: Tensor = self.out_of(self.experts(self.into(x), ids, weights))
            return out
        y: Tensor = self.experts(x, ids, weights)
        if self.around == "shared":
            return y + self.shared(x)
        if self.around == "gated":
            return y + self.shared(x) * self.share(x).sigmoid()
        if self.around == "counts":
            self.load += (ids[..., None] == torch.arange(len(self.load), device=x.device)).sum((0, 1))
        if self.around == "scaled":
            return y * 1.5 + self.shared(x) * 0.5
        return y

    def route(self, x: Tensor, nudge: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights [T, K]."""
        scores = self.router(x)
        if self.how == "given":
            return nudge[:, : self.top_k].long(), scores[:, : self.top_k].sigmoid()
        scores = scores + nudge
        if self.how == "nested":
            groups = scores.unflatten(-1, (-1, 2))
            best = groups.amax(-1).topk(max(1, groups.shape[1] - 1)).indices
            keep = torch.zeros(groups.shape[:2], dtype=torch.bool, device=x.device).scatter(1, best, True)
            scores = groups.masked_fill(~keep[..., None], float("-inf")).flatten(1)
        scores = scores.sigmoid() if self.how == "sigmoid" else scores.softmax(-1)
        weights, ids = scores.topk(self.top_k)
        return ids, weights / weights.sum(-1, keepdim=True)


class Block(nn.Module):
    """A norm, experts, and what goes past them."""

    def __init__(self, body: str, router: str, around: str, experts: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), Layer(body, router, around, experts, top_k)

    def forward(self, x: Tensor, nudge: Tensor) -> Tensor:
        out: Tensor = x + self.mlp(self.norm(x), nudge)
        return out + self.mlp(self.norm(out), nudge).view(x.shape) if self.mlp.around == "twice" else out
