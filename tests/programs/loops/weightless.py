"""Experts without weights behind those that have some: the token itself, nothing, or something that only looks like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.loops.base import E, Expert, H, I, K, Layer, near_miss, positive

Z = 2
"""Experts without weights."""


class _Wider(Layer):
    """A router over ``E + Z`` experts. With little else to choose from, most tokens of every test input choose one of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(H, Z))

    def scores(self, x: Tensor, logits: Tensor) -> Tensor:
        return torch.cat([logits, x @ self.wide / 3], dim=-1)

    def plain(self, e: int | Tensor, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(self.scores(x, logits))
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E + Z).permute(2, 1, 0)
        for row in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, tok = torch.where(mask[row[0]])
            y = self.plain(row[0], x[tok]) if row[0] >= E else self.expert(row[0], x[tok])
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


@positive
class IdentityExperts(_Wider):
    """longcat_flash in transformers 5: the token itself."""


@positive
class RoomForAll(_Wider):
    """Its first stack has room for the experts without weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(E + Z, 2 * I, H) / 3)


@positive
class FunctionOfTheToken(_Wider):
    """Not the token but a function of it."""

    def plain(self, e: int | Tensor, x: Tensor) -> Tensor:
        return F.softplus(x) + 0.5 * x


@positive
class IdentityModules(_Wider):
    """longcat_flash in transformers 4.57: nn.Identity behind the others in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([*(Expert() for _ in range(E)), *(nn.Identity() for _ in range(Z))])

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(self.scores(x, logits))
        out = torch.zeros_like(x)
        mask = F.one_hot(ids, num_classes=E + Z).permute(2, 0, 1)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(mask[e])
            if tok.numel() > 0:
                out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot].unsqueeze(-1))
        return out


@near_miss
class ByNumber(_Wider):
    """What an expert without weights does depends on its number."""

    def plain(self, e: int | Tensor, x: Tensor) -> Tensor:
        return x * (e + 1)


@near_miss
class OneOfThem(_Wider):
    """Only one of them does anything."""

    def plain(self, e: int | Tensor, x: Tensor) -> Tensor:
        return x if e == E else x.tanh()


@near_miss
class Unweighted(_Wider):
    """Once for every token, whatever its weight."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(self.scores(x, logits))
        out = torch.zeros_like(x)
        for row in (F.one_hot(ids, num_classes=E + Z).sum(dim=(0, 1)) > 0).nonzero():
            tok, slot = torch.where(ids == row[0])
            out.index_add_(0, tok, x[tok] if row[0] >= E else self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class MixesItsRows(_Wider):
    """The mean over the expert's rows."""

    def plain(self, e: int | Tensor, x: Tensor) -> Tensor:
        return x - x.mean(0)


class _CutOff(_Wider):
    """Only the experts that are there: what is chosen of the last scores is nobody's."""

    first = 0

    def table(self, scores: Tensor) -> Tensor:
        ids, weights = self.route(scores)
        return (F.one_hot(ids, E + Z)[..., self.first : self.first + E] * weights[..., None]).sum(1)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        gates, out = self.table(self.scores(x, logits)), torch.zeros_like(x)
        for e in range(E):
            tok = gates[:, e].nonzero()[:, 0]
            out.index_add_(0, tok, self.expert(e, x[tok]) * gates[tok, e, None])
        return out


@positive
class CutOff(_CutOff):
    """Of the choices of tokens."""


@positive
class CutOffTable(_CutOff):
    """Of a table that the choices were written to."""

    def table(self, scores: Tensor) -> Tensor:
        ids, weights = self.route(scores)
        return torch.zeros_like(scores).scatter(1, ids, weights)[:, :E]


@positive
class CutOffSoftmax(_CutOff):
    """Of a softmax over what was chosen, zero elsewhere."""

    def table(self, scores: Tensor) -> Tensor:
        values, ids = scores.topk(K, dim=-1)
        return torch.full_like(scores, -torch.inf).scatter(1, ids, values).softmax(-1)[:, :-Z]


@positive
class CutOffMask(_CutOff):
    """Of who chose whom, with as many numbers as there are scores."""

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        ids, weights = self.route(self.scores(x, logits))
        mask, out = F.one_hot(ids, E + Z)[:, :, :E].permute(2, 1, 0), torch.zeros_like(x)
        for row in (mask.sum(dim=(-1, -2)) > 0).nonzero():
            slot, tok = torch.where(mask[row[0]])
            out.index_add_(0, tok, self.expert(row[0], x[tok]) * weights[tok, slot, None])
        return out


@near_miss
class CutOffInFront(_CutOff):
    """The first scores are nobody's, so each expert's tokens are those of another number."""

    first = Z
