"""Weights gathered for every slot, and contracted by einsum or baddbmm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.base import E, H, I, K, Layer, Stacked, fused, twin


@fused("slots")
class GatheredEinsum(Stacked):
    """gpt-fast and its derivatives: ``einsum("ti,taoi->tao")`` over weights of the chosen experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        x1 = F.silu(torch.einsum("ti,taoi->tao", x, self.w1[ids]))
        x3 = torch.einsum("ti,taoi->tao", x, self.w3[ids])
        y = torch.einsum("tao,taio->tai", x1 * x3, self.w2[ids])
        return torch.einsum("tai,ta->ti", y, weights)


@fused("slots")
class WeightFirst(Stacked):
    """The weight is the first operand of every einsum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = torch.einsum("tkoh,th->tko", self.w1[ids], x)
        h = F.silu(h) * torch.einsum("tkoh,th->tko", self.w3[ids], x)
        y = torch.einsum("tkho,tko->tkh", self.w2[ids], h)
        return torch.einsum("tk,tkh->th", weights, y)


@fused("slots")
class ThreeOperands(Stacked):
    """The weighted sum and the last projection in one einsum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = F.silu(torch.einsum("tkoh,th->tko", self.w1[ids], x)) * torch.einsum("tkoh,th->tko", self.w3[ids], x)
        return torch.einsum("tkho,tko,tk->th", self.w2[ids], h, weights)


class _Biased(Layer):
    """(in, out) weights with biases, as batched products take them."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(E, H, I) / 3), nn.Parameter(torch.randn(E, I) / 3)
        self.w2, self.b2 = nn.Parameter(torch.randn(E, I, H) / 3), nn.Parameter(torch.randn(E, H) / 3)


@fused("slots")
class Baddbmm(_Biased):
    """``torch.baddbmm`` with biases of the chosen experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        flat = ids.reshape(-1)
        rows = x.repeat_interleave(K, dim=0).unsqueeze(1)
        h = F.gelu(torch.baddbmm(self.b1[flat].unsqueeze(1), rows, self.w1[flat]))
        y = torch.baddbmm(self.b2[flat].unsqueeze(1), h, self.w2[flat])
        return (y.view(-1, K, H) * weights.unsqueeze(-1)).sum(1)


@fused("slots")
class VmapLike(Stacked):
    """``matmul`` of [T, K, out, in] weights and a column vector for each slot."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        column = x[:, None, :, None]
        h = F.silu(self.w1[ids] @ column) * (self.w3[ids] @ column)
        y = (self.w2[ids] @ h).squeeze(-1)
        return (weights.unsqueeze(1) @ y).squeeze(1)


@twin
class ShiftedIds(Stacked):
    """The last projection takes the weights of another token's experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = F.silu(torch.einsum("ti,taoi->tao", x, self.w1[ids])) * torch.einsum("ti,taoi->tao", x, self.w3[ids])
        y = torch.einsum("tao,taio->tai", h, self.w2[ids.roll(1, 0)])
        return torch.einsum("tai,ta->ti", y, weights)


@twin
class SlotsSummedTwice(Stacked):
    """Three operands, where the weights are summed over slots of their own."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = F.silu(torch.einsum("tkoh,th->tko", self.w1[ids], x)) * torch.einsum("tkoh,th->tko", self.w3[ids], x)
        return torch.einsum("tkho,tko,tl->th", self.w2[ids], h, weights)
