"""Layers whose experts are in other modules or functions, or kept away from Dynamo."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.parts import E, Expert, H, I, K, Layer, have


class Disabled(Layer):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@have
class HoldingDisabled(nn.Module):
    """The whole layer is kept away from Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(H, H), Disabled()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))  # type: ignore[no-any-return]


class DisabledExperts(Layer):
    @torch.compiler.disable
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.route(x))


have(DisabledExperts)


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, E)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.linear(x).softmax(-1).topk(K)
        return weights, ids


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleDict({f"e{e}": Expert() for e in range(E)})
        self.load: dict[str, int] = {}

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, (name, expert) in enumerate(self.items.items()):
            tok, slot = torch.where(ids == e)
            self.load[name] = tok.numel()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class InModules(nn.Module):
    """The choice in a router of its own, the loop and a dict of experts in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = TopKRouter(), Container()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.router(x))  # type: ignore[no-any-return]


def run_experts(layer: Layer, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        tok, slot = torch.where(ids == e)
        layer.load[e] += tok.numel()
        out.index_add_(0, tok, layer.experts[e](x[tok]) * weights[tok, slot, None])
    return out


@have
class ByHelper(Layer):
    """The loop in a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return run_experts(self, x, *self.route(x))


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList(Expert() for _ in range(E))


@have
class InBlock(nn.Module):
    """A block has the router and the loop, another module only holds the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.bank, self.counts = nn.LayerNorm(H), nn.Linear(H, E), Bank(), [0] * E

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = torch.topk(F.softmax(self.gate(h), dim=-1), K)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > self.counts[e]:
                self.counts[e] = tok.numel()
            x = x.index_add(0, tok, self.bank.items[e](h[tok]) * weights[tok, slot, None])
        return x


@have
class Numbered(nn.Module):
    """Experts as attributes with numbers, by ``getattr``, and a shared one of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(H, E), Expert()
        for e in range(E):
            setattr(self, f"expert{e}", Expert())
        self.load = [0] * E

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = self.shared(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load[e] = tok.numel()
            out.index_add_(0, tok, getattr(self, f"expert{e}")(x[tok]) * weights[tok, slot, None])
        return out


class Codes(nn.Module):
    """A weight that is no Parameter: codes and scales in buffers, and the graph breaks where they are multiplied."""

    def __init__(self, inputs: int, features: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-9, 9, (features, inputs), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(features, 1) / 40)

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return F.linear(x, self.codes.to(x.dtype) * self.scale)


class CodesExpert(Expert):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.up, self.down = Codes(H, I), Codes(I, H)


@have
class InBuffers(Layer):
    """Nothing of an expert is a Parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(CodesExpert() for _ in range(E))
