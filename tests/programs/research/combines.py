"""Ways to add rows to their tokens, and to cut sorted slots."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.around import looped
from tests.programs.research.base import E, Gated, H, K, Layer, Listed, Stacked, fused, twin


class _Loop(Listed):
    """A loop over selections; subclasses add the rows."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out = self.add(out, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@fused("selected")
class IndexPut(_Loop):
    """``index_put_(accumulate=True)``."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.index_put_((tok,), y, accumulate=True)


@fused("selected")
class ScatterAdd(_Loop):
    """``scatter_add_`` with an expanded index."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.scatter_add_(0, tok.unsqueeze(-1).expand_as(y), y)


@fused("selected")
class ScatterReduce(_Loop):
    """``scatter_reduce`` with a repeated index. (In place, autograd refuses a second one.)"""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.scatter_reduce(0, tok.view(-1, 1).repeat(1, H), y, reduce="sum")


@fused("selected")
class IndexReduced(_Loop):
    """``torch.index_add`` out of place."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return torch.index_add(out, 0, tok, y)


@fused("selected")
class NewBuffers(_Loop):
    """A buffer of zeros for each expert, added up."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out + torch.zeros_like(out).index_add(0, tok, y)


class _Cut(Stacked):
    """Sorted slots cut by offsets; subclasses count."""

    def ends(self, ids: Tensor) -> list[int]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = torch.argsort(ids.flatten(), stable=True)
        tokens, start = order // K, 0
        out = torch.zeros_like(x)
        for e, end in enumerate(self.ends(ids)):
            rows = tokens[start:end]
            h = F.silu(x[rows] @ self.w1[e].t()) * (x[rows] @ self.w3[e].t())
            out.index_add_(0, rows, h @ self.w2[e].t() * weights.flatten()[order[start:end]].unsqueeze(-1))
            start = end
        return out


@fused("selected")
class BincountOffsets(_Cut):
    """``bincount`` and ``cumsum``."""

    def ends(self, ids: Tensor) -> list[int]:
        return torch.bincount(ids.flatten(), minlength=E).cumsum(0).tolist()  # type: ignore[no-any-return]


@fused("selected")
class HistcOffsets(_Cut):
    """``histc`` of floats, as megablocks-like code counts."""

    def ends(self, ids: Tensor) -> list[int]:
        return torch.histc(ids.flatten().float(), bins=E, min=0, max=E - 1).int().cumsum(0).tolist()  # type: ignore[no-any-return]


@fused("selected")
class UniqueCounts(_Cut):
    """One-hot masks summed, and their running sum in Python's list."""

    def ends(self, ids: Tensor) -> list[int]:
        return F.one_hot(ids.flatten(), E).sum(0).cumsum(0).tolist()  # type: ignore[no-any-return]


@twin
class OneBinTooFew(_Cut):
    """The last expert's slots are counted to nobody."""

    def ends(self, ids: Tensor) -> list[int]:
        return torch.bincount(ids.flatten().clamp(max=E - 2), minlength=E).cumsum(0).tolist()  # type: ignore[no-any-return]


@twin
class LargestRow(_Loop):
    """The largest of a token's rows."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.scatter_reduce(0, tok.view(-1, 1).repeat(1, H), y, reduce="amax")


@twin
class WithoutSelf(_Loop):
    """What was there is left out of the sum."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.scatter_reduce(0, tok.view(-1, 1).repeat(1, H), y, reduce="sum", include_self=False)


@twin
class HalfTheFeatures(_Loop):
    """The index reaches fewer features than there are."""

    def add(self, out: Tensor, tok: Tensor, y: Tensor) -> Tensor:
        return out.scatter_add(0, tok.view(-1, 1).repeat(1, H // 2), y[:, : H // 2].contiguous())


@fused("selected")
class CastInTheLoop(Listed):
    """The sum is cast to the dtype that it has, "for 16 bits" (HiDream, DiT-MoE)."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            y = expert(x[tok]) * weights[tok, slot, None]
            out = out.to(y.dtype)
            out.index_add_(0, tok, y)
        return out


@twin
class RoundedInTheLoop(Listed):
    """The sum is rounded to 16 bits behind every expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, expert(x[tok]) * weights[tok, slot, None])
            out = out.to(torch.bfloat16).to(x.dtype)
        return out


class InSlices(Gated):
    """``pretraining_tp`` of transformers: projections in slices, put beside each other or added."""

    def forward(self, x: Tensor) -> Tensor:
        width = self.gate_proj.out_features // 2
        gates, ups = self.gate_proj.weight.split(width, dim=0), self.up_proj.weight.split(width, dim=0)
        gate = torch.cat([F.linear(x, w) for w in gates], dim=-1)
        up = torch.cat([F.linear(x, w) for w in ups], dim=-1)
        middle, downs = (F.silu(gate) * up).split(width, dim=-1), self.down_proj.weight.split(width, dim=1)
        out: Tensor = sum(F.linear(h, w) for h, w in zip(middle, downs, strict=True))  # type: ignore[assignment]
        return out


@fused("selected", "grouped")
class BodiesInSlices(Layer):
    """A loop over such experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(InSlices() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return looped(self.experts, x, ids, weights)


@fused("masked", "grouped")
class MaskedBodiesInSlices(BodiesInSlices):
    """The same experts on every token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


@fused("selected")
class AdaptersOnABase(Layer):
    """LoRA experts are added to the rows of a base layer, by an index of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(H, H)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, 2, bias=False), nn.Linear(2, H, bias=False)) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = self.base(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] += expert(x[tok]) * weights[tok, slot, None]
        return out


@twin
class AdaptersOnTheSum(AdaptersOnABase):
    """Each expert sees what those before it have left in the sum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = self.base(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out[tok] += expert(out[tok]) * weights[tok, slot, None]
        return out
