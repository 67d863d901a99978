"""Who is chosen, how often, and how the results are weighed and added."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.refused.plain import E, H, K, Layer, T


class ExpertsDiffer(Layer):
    """One expert has another activation."""

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        act = F.gelu if e == 2 else F.silu
        return F.linear(act(gate) * up, self.w_out[e])

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])  # at: experts-differ
        return out


class MissingExperts(Layer):
    """The last expert is left out (an off-by-one, or a zero expert)."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E - 1):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])  # at: missing-experts
        return out


class IdsNotDistinct(Layer):
    """Ids from hashing may repeat for one token, and the rows are assigned, not added."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        ids = ids // 2
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out[tok] += self.expert(e, x[tok]) * weights[tok, slot, None]  # at: ids-not-distinct
        return out


class IdsOutOfRange(Layer):
    """Ids from 1 to E, of which the last one is clamped to the last expert: two ids for one expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        ordered, order = (ids + 1).flatten().sort()
        at = ordered.clamp(max=E - 1)
        rows = x[order // K].unsqueeze(-1)
        gate, up = torch.bmm(self.w_in[at], rows).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(self.w_out[at], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])  # at: ids-out-of-range


class NotWeighted(Layer):
    """The bias of an expert is added for every token, chosen or not."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            w = (weights * (ids == e)).sum(-1, keepdim=True)
            out = out + (self.expert(e, x) * w + self.bias[e])  # at: not-weighted
        return out


class SumChanged(Layer):
    """The sum is clamped after each expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
            out = out.clamp(-1, 1)  # at: sum-changed
        return out


class NotCombined(Layer):
    """The experts' rows are returned side by side, and no token is ever summed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, _weights = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w_in[ids]).chunk(2, dim=-1)
        return torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out[ids])  # at: not-combined


class Capacity(Layer):
    """Room for three tokens in each expert."""

    def forward(self, x: Tensor) -> Tensor:
        probs, index = self.gate(x).softmax(-1).max(dim=-1)
        mask = F.one_hot(index, num_classes=E)
        place = (torch.cumsum(mask, dim=0) - 1) * mask
        mask = mask * (place < 3)
        where = F.one_hot((place * mask).sum(-1), num_classes=3).to(x.dtype)
        combine = torch.einsum("se,sc->sec", probs[:, None] * mask, where)
        rows = torch.einsum("sec,sm->ecm", combine.bool().to(x.dtype), x)  # at: capacity
        gate, up = torch.bmm(rows, self.w_in.transpose(1, 2)).chunk(2, dim=-1)
        return torch.einsum("sec,ecm->sm", combine, torch.bmm(F.silu(gate) * up, self.w_out.transpose(1, 2)))


class ExpertChoice(Layer):
    """Every expert takes its five best tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).t().topk(5, dim=-1)  # at: expert-choice
        rows = x[ids]
        gate, up = torch.bmm(rows, self.w_in.transpose(1, 2)).chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, self.w_out.transpose(1, 2)) * weights[..., None]
        return torch.zeros_like(x).index_add(0, ids.flatten(), y.flatten(0, 1))


class Threshold(Layer):
    """Each expert takes the tokens whose probability is above a number."""

    def forward(self, x: Tensor) -> Tensor:
        probs = self.gate(x).sigmoid()
        out = torch.zeros_like(x)
        for e in range(E):
            token = torch.where(probs[:, e] > 0.5)[0]
            rows = x[token]  # at: threshold
            out = out.index_add(0, token, self.expert(e, rows) * probs[token, e, None])
        return out


class AboveZero(Layer):
    """Each expert takes the tokens whose score ReLU leaves (ReMoE, arXiv 2412.14711)."""

    def forward(self, x: Tensor) -> Tensor:
        scores = F.relu(self.gate(x))
        out = torch.zeros_like(x)
        for e in range(E):
            token = scores[:, e].nonzero()[:, 0]
            rows = x[token]
            out = out.index_add(0, token, self.expert(e, rows) * scores[token, e, None])
        return out


class TokensDiffer(Layer):
    """The rows are token by token, their weights slot by slot."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        rows = x.repeat_interleave(K, dim=0)
        flat = ids.reshape(-1)
        gate, up = torch.bmm(self.w_in[flat], rows.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(self.w_out[flat], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        scale = weights.t().reshape(-1, 1)
        y = y * scale  # at: tokens-differ
        return y.view(T, K, H).sum(dim=1)
