"""How weights are held: in few bits, in two dtypes, by several processes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moefuse.runtime.groups import Terms
from tests.programs.refused.plain import E, H, K, Layer


class Unpacked(nn.Module):
    """Weights of eight bits, unpacked expert by expert; three tokens have six slots for eight experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scale = nn.Linear(H, 2 * E, bias=False), nn.Parameter(torch.rand(2 * E, H, 1) / 100)
        self.register_buffer("packed", torch.randint(-127, 127, (2 * E, H, H), dtype=torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:3]
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(2 * E):
            tok, slot = torch.where(ids == e)
            weight = self.packed[e].to(x.dtype) * self.scale[e]
            out.index_add_(0, tok, F.linear(x[tok], weight) * weights[tok, slot, None])  # at: encoding-unknown
        return out


class Unusual(Unpacked):
    """The same with scales that are not trained, and one for all of the first expert's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:3]
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(2 * E):
            tok, slot = torch.where(ids == e)
            weight = self.packed[e].to(x.dtype) * (self.scale[e] if e else self.scale[e, 0])
            out.index_add_(0, tok, F.linear(x[tok], weight) * weights[tok, slot, None])  # at: encoding-unsupported
        return out


class Packed(Layer):
    """Weights that are a tensor subclass."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(H, H, bias=False) for _ in range(E))
        for expert in self.experts:
            data = expert.weight.detach()
            expert.weight = nn.Parameter(TwoTensor(data, data.clone()))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            y = expert(x)  # at: quantised
            out = out + y * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Sharded(Layer):
    """One process computes some experts, and all add up what they have."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E // 2):
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return all_of(out)  # at: sharded


@torch.library.custom_op("collectives_like::all_reduce", mutates_args=())
def all_of(x: Tensor) -> Tensor:
    """Stands for a collective, which needs other processes."""
    return torch.stack((x, torch.zeros_like(x))).sum(0)


all_of.register_fake(torch.empty_like)
all_of.register_autograd(lambda _ctx, grad: grad)


_ON_ONE_RANK = Terms("one").text


class Gathered(nn.Module):
    """Weights that ``moefuse.parallelize`` has sharded are read, and not by experts: all of them are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(E, H, H))
        self.register_buffer("place", torch.arange(E, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        whole = torch.ops.moefuse.gathered.default(self.w, self.place, E, _ON_ONE_RANK)
        return x @ whole.mean(0)  # at: experts-gathered


class TwoDtypes(Layer):
    """Autocast that is switched off between the projections: the first computes in bfloat16, the second in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            ids, weights = self.route(x)
            out = torch.zeros_like(x)
            for e in range(E):
                tok, slot = torch.where(ids == e)
                gate, up = F.linear(x[tok], self.w_in[e]).chunk(2, dim=-1)
                with torch.autocast("cpu", enabled=False):
                    y = F.linear((F.silu(gate) * up).float(), self.w_out[e])  # at: dtype-unsupported
                out.index_add_(0, tok, y * weights[tok, slot, None])
        return out
