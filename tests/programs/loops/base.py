"""What all loops start from: the layer, its experts, its routing, and the lists of programs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

E, K, H, I = 4, 2, 8, 6  # noqa: E741  (the letters of moefuse.spec)


class Expert(nn.Module):
    """A gated expert with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(H, I, bias=False), nn.Linear(H, I, bias=False), nn.Linear(I, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Stacked weights, a ModuleList of experts, and top-k routing; subclasses write the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(E, 2 * I, H) / 3)
        self.w_out = nn.Parameter(torch.randn(E, H, I) / 3)
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.register_buffer("total", torch.zeros(E))
        self.register_buffer("step", torch.zeros(()))
        self.calls = 0
        self.seen: list[int] = []

    def route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(logits.softmax(-1), K, dim=-1)
        return ids, weights / weights.sum(-1, keepdim=True)

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])

    def in_parts(self, e: int | Tensor, x: Tensor) -> Tensor:
        """The expert, its last projection in slices of the weight."""
        expert = self.experts[e]  # type: ignore[index]
        h = F.silu(expert.gate(x)) * expert.up(x)  # type: ignore[operator]
        return torch.cat([F.linear(h, part) for part in expert.down.weight.split(H // 2, dim=0)], dim=-1)  # type: ignore[operator, union-attr]

    def hits(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(mask [E, K, T], which experts have tokens [E])."""
        mask = F.one_hot(ids, num_classes=E).permute(2, 1, 0)
        return mask, torch.greater(mask.sum(dim=(-1, -2)), 0)


POSITIVE: dict[str, type[Layer]] = {}
NEAR_MISS: dict[str, type[Layer]] = {}


def positive(cls: type[Layer]) -> type[Layer]:
    POSITIVE[cls.__name__] = cls
    return cls


def near_miss(cls: type[Layer]) -> type[Layer]:
    NEAR_MISS[cls.__name__] = cls
    return cls


def logits_for(kind: str, tokens: int) -> Tensor:
    """Router logits: ``random``; ``skewed`` (the last two experts get nothing); ``one`` (the first two do not either)."""
    out = torch.randn(tokens, E)
    if kind == "skewed":
        out[:, 2:] -= 100
    elif kind == "upper":
        out[:, :2] -= 100
    return out


KINDS = ("random", "skewed", "upper")
Make = Callable[[], Layer]


class Hits(Layer):
    """A loop over hits with one statement that makes a difference; subclasses fill it in."""

    def mask(self, ids: Tensor) -> Tensor:
        return self.hits(ids)[1]

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        tok, slot = torch.where(ids == row)
        out.index_add_(0, tok, self.expert(row, x[tok]) * weights[tok, slot, None])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.mask(ids).nonzero():
            self.body(row[0], out, x, ids, weights)
        return out


class Counted(Layer):
    """A loop over all experts with a branch on the number of tokens; subclasses change one thing."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if self.some(e, ids, tok):
                out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out

    def some(self, e: int, ids: Tensor, tok: Tensor) -> bool:
        raise NotImplementedError
