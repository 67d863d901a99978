"""Loops over hits that cut gradients: the layer is fused, and has exactly the gradients that the program leaves it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.programs.loops.base import Hits, Layer, near_miss, positive


@positive
class DetachesInput(Hits):
    """The experts do not train what is below them."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x.detach(), ids, weights)


@positive
class DetachesRoutingWeights(Hits):
    """The router does not learn from the experts' outputs."""

    def body(self, row: Tensor, out: Tensor, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        super().body(row, out, x, ids, weights.detach())


@positive
class DetachesExpertWeight(Hits):
    """One projection is frozen: the slice of the parameter is cut off, not the parameter."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e].detach()).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


@positive
class DataOfExpertWeight(Hits):
    """The same through ``.data``."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e].data).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


@near_miss
class DetachesAccumulator(Layer):
    """Only the last expert with tokens has a gradient."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        out = torch.zeros_like(x)
        for row in self.hits(ids)[1].nonzero():
            tok, slot = torch.where(ids == row)
            out = out.detach().index_add(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class ExpertsWithoutGradient(Hits):
    """The router has a gradient, the experts have none."""

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().expert(e, x)


class TwoLayers(Layer):
    """Two sums over experts meet in an addition: two layers, with one routing or two."""

    shared_routing = True

    def once(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for row in self.hits(ids)[1].nonzero():
            tok, slot = torch.where(ids == row)
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(logits)
        other = (ids, weights) if self.shared_routing else self.route(logits.flip(-1))
        return self.once(x, ids, weights) + self.once(x * 2, *other)


class TwoRoutings(TwoLayers):
    shared_routing = False
