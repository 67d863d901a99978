"""Layers that no rule or no graph has, and what moefuse or a device cannot do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.refused.plain import E, H, I, K, Layer, Plain


class NotRecognised(Layer):
    """Each expert moves the result towards its own by its gate."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.GELU(), nn.Linear(I, H)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            gate = (weights * (ids == e)).sum(-1, keepdim=True)
            out = torch.lerp(out, expert(x), gate)  # at: not-recognised
        return out


class NothingFound(Layer):
    """Whether an expert runs is asked of a sum of weights, at which Dynamo gives up."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        table = torch.zeros(len(x), E).scatter(1, ids, weights)
        out = torch.zeros_like(x)
        for e in range(E):
            if table[:, e].sum() == 0:  # at: nothing-found
                continue
            out = out + self.expert(e, x) * table[:, e, None]
        return out


class NotCaptured(Layer):
    """The loop over experts with tokens counts them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out, active = torch.zeros_like(x), 0
        for e in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero():  # at: not-captured
            tok, slot = torch.where(ids == e[0])
            out.index_add_(0, tok, self.expert(e[0], x[tok]) * weights[tok, slot, None])  # type: ignore[arg-type]
            active += 1
        return out / active


class Counting(Plain):
    """A buffer that is written to beside the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(K))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(x.detach().mean(0)[:K])  # at: effects-differ
        return super().forward(x)


class Batched(Layer):
    """Gathered weights: no shape depends on the routing, so it also runs on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w_in[ids]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out[ids])
        return (y * weights[..., None]).sum(dim=1)  # at: device-unsupported


class NotLowered(Layer):
    """One number per expert as its bias, which torch broadcasts over the features and the op does not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E, 1))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok]) + self.bias[e]
            out.index_add_(0, tok, y * weights[tok, slot, None])  # at: not-lowered
        return out
