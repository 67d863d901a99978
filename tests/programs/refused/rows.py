"""What the rows of an expert go through, or who else reads and writes them."""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.refused.plain import E, H, I, Layer, T


class NoRule(Layer):
    """An operation that no transfer rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = torch.digamma(self.expert(e, x[tok]).abs() + 1)  # at: no-rule
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class NotRowLocal(Layer):
    """Batch statistics of the rows that were routed to one expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y = y - y.mean(dim=0)  # at: not-row-local
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Random(Layer):
    """Noise on what the experts computed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y = y + torch.randn_like(y)  # at: random
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Hook(Layer):
    """A gradient hook on what the experts computed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)  # at: hook
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class ValueEscapes(Layer):
    """An auxiliary loss on the size of what the experts computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = self.route(x)
        out, penalty = torch.zeros_like(x), x.new_zeros(())
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            out.index_add_(0, tok, y * weights[tok, slot, None])
            penalty = penalty + y.square().sum()  # at: value-escapes
        return out, penalty


class Mutation(Layer):
    """The tokens are changed while the loop over experts still reads them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        h = x * 1.0
        out = torch.zeros_like(h)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, h[tok]) * weights[tok, slot, None])
            h.mul_(0.5)  # at: mutation
        return out


class Overlap(Layer):
    """The last token is written to while the loop reads all of them, and torch does not know that it is one of them."""

    def __init__(self) -> None:
        super().__init__()
        memory = numpy.ones((T, H), dtype=numpy.float32)
        self.window, self.last = torch.from_numpy(memory), torch.from_numpy(memory[-1:])

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, self.window[tok]) * weights[tok, slot, None])
            self.last.fill_(1)  # at: overlap
        return out


class Alias(Layer):
    """The experts' rows are scaled through a view, and read again under their own name."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y[:, : H // 2].mul_(0.5)  # at: alias
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Transformed(Layer):
    """What the layer's result gains by a change of the tokens: torch.func runs the experts."""

    def layer(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True)  # at: transformed
        return out

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda tokens: self.layer(tokens).square().sum())(x)


class ContextDiffers(Layer):
    """The experts are frozen by no_grad, their weighted sum is not."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            with torch.no_grad():
                y = F.linear(F.silu(F.linear(x[tok], self.w_in[e, :I])), self.w_out[e])  # at: context-differs
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out
