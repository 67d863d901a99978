"""Layers that choose or weigh experts in a way that no rule reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.suspects.parts import E, Expert, H, I, K, Layer, have


@have
class TokenByToken(Layer):
    """A list of experts at a number read out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        rows = [sum(weights[t, k] * self.experts[int(ids[t, k].item())](x[t]) for k in range(K)) for t in range(3)]
        return torch.stack(rows)  # type: ignore[arg-type]


@have
class OneForAll(Layer):
    """One expert for the whole batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[int((x.mean(0) @ self.w_gate).argmax().item())](x)  # type: ignore[no-any-return]


class Two(nn.Module):
    """Two experts as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.first, self.second = nn.Linear(H, 2), Expert(), Expert()


@have
class TwoByWhere(Two):
    """Both run on all tokens, and a condition takes one."""

    def forward(self, x: Tensor) -> Tensor:
        p = self.router(x).softmax(-1)
        i = p.argmax(-1, keepdim=True)
        return torch.where(i == 0, self.first(x), self.second(x)) * p.gather(1, i)


@have
class TwoByMask(Two):
    """Each runs on its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.router(x).argmax(-1) == 0
        out = torch.zeros_like(x)
        out[first] = self.first(x[first])
        out[~first] = self.second(x[~first])
        return out


@have
class Threshold(Layer):
    """Experts whose probability reaches that of the second best."""

    def forward(self, x: Tensor) -> Tensor:
        p = (x @ self.w_gate).softmax(-1)
        p = p * (p >= p.topk(K)[0][:, -1:])
        return sum(p[:, e, None] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


@have
class StraightThrough(Layer):
    """Gates that are one-hot forward and soft backward."""

    def forward(self, x: Tensor) -> Tensor:
        p = (x @ self.w_gate).softmax(-1)
        gates = torch.zeros_like(p).scatter(1, p.topk(1).indices, 1.0) - p.detach() + p
        return sum(gates[:, e, None] * expert(x) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


@have
class Soft(Layer):
    """Every expert for every token: there is nothing to leave out, which the user reads."""

    def forward(self, x: Tensor) -> Tensor:
        p = (x @ self.w_gate).softmax(-1)
        return torch.einsum("te,teh->th", p, torch.stack([expert(x) for expert in self.experts], 1))


@have
class OneLine(Layer):
    """One comprehension, with a router that is asked in it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.experts[i](row) for row, i in zip(x, (x @ self.w_gate).argmax(-1).tolist(), strict=True)])


@have
class Rectified(Layer):
    """Gates that are zero or not (ReMoE, Wang et al. 2024), and an expert without tokens is left out."""

    def forward(self, x: Tensor) -> Tensor:
        gates, out = F.relu(x @ self.w_gate), torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if gates[:, e].any():
                out = out + gates[:, e, None] * expert(x)
        return out


@have
class Normed(Layer):
    """Statistics of an expert's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(H, I), nn.InstanceNorm1d(I), nn.Linear(I, H)) for _ in range(E))
