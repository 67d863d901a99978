"""What every refused layer is one statement away from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, H, I, E, K = 10, 8, 12, 4, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """The parts of a small mixture-of-experts layer; each program below writes its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w_in = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.w_out = nn.Parameter(torch.randn(E, H, I) * I**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        return ids, weights

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


class Plain(Layer):
    """The positive that every negative is one statement away from."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, y)  # at: plain
        return out


class Model(nn.Module):
    """A layer inside a model, so that it has a module path."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Teacher(Plain):
    """A layer that is only evaluated, inside a program that is trained: times are of the forward op alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return x + y
