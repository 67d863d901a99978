"""Spellings of public repositories, in our own words: chosen ones of all outputs, top-1 without a sum, slots one by one, samples."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.base import E, H, I, K, Layer, Listed, fused, twin, unknown, unseen


class Several(Listed):
    """Several tokens of a sample beside each other: [tokens, H] are samples of two."""

    def samples(self, x: Tensor) -> Tensor:
        return x.reshape(-1, 2, H) if len(x) % 2 == 0 else x.reshape(-1, 1, H)


class OfAll(Listed):
    """The outputs of all experts, [tokens, E, H]."""

    def outputs(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts], dim=1)


@fused("slots")
class ChosenSlotBySlot(OfAll):
    """Gathered for one slot after another; the list of weights is the same in each."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y, out = self.outputs(x), torch.zeros_like(x)
        for k in range(K):
            at = ids[:, k].view(-1, 1, 1).expand(-1, 1, H)
            out = out + weights[:, k].unsqueeze(-1) * torch.gather(y, 1, at).squeeze(1)
        return out


@fused("slots")
class IndexedSlotBySlot(OfAll):
    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y, out = self.outputs(x), torch.zeros_like(x)
        for k in range(K):
            out = out + weights[:, k, None] * y[torch.arange(len(x)), ids[:, k]]
        return out


@fused("slots")
class IndexedBest(OfAll):
    """One expert a token, which nothing weighs."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)[torch.arange(len(x)), self.scores(x).argmax(-1)]


@fused("slots")
class GatheredBest(OfAll):
    """One expert a token and its weight, beside the token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, best = self.scores(x).max(-1)
        chosen = self.outputs(x).gather(1, best.view(-1, 1, 1).expand(-1, 1, H)).squeeze(1)
        return x + chosen * weights.to(x.dtype)[:, None]


class Matrices(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(E, H, I) / 3), nn.Parameter(torch.randn(E, I, H) / 3)


@fused("slots")
class BestMatrices(Matrices):
    """Switch's layer by gathered weights: with one expert a token there is no sum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, best = self.scores(x).max(-1)
        h = torch.bmm(x.unsqueeze(1), self.w1[best]).relu()
        return torch.bmm(h, self.w2[best]).squeeze(1) * weights.to(x.dtype)[:, None]


@fused("slots", "grouped")
class BestAdapter(Matrices):
    """A low-rank adapter for each token, beside the token itself."""

    def forward(self, x: Tensor) -> Tensor:
        best = self.scores(x).argmax(-1)
        return x + torch.einsum("ti,tih->th", torch.einsum("th,thi->ti", x, self.w1[best]), self.w2[best])


@fused("selected", several=True)
class UniqueOfASlot(Listed):
    """The experts that occur in one slot, for one slot after another."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for k in range(K):
            for e in torch.unique(ids[:, k]).tolist():
                rows = torch.nonzero(ids[:, k] == e, as_tuple=True)[0]
                out[rows] += self.experts[e](x[rows]) * weights[rows, k, None]
        return out


@fused("selected")
class SlotSearchedAgain(Listed):
    """The slot of each row, searched among the rows of the expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = (ids == e).nonzero(as_tuple=True)[0]
            if tok.numel() == 0:
                continue
            slot = (ids[tok] == e).nonzero(as_tuple=True)[1]
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot].unsqueeze(-1))
        return out


@fused("selected")
class ZerosLikeWeights(Listed):
    """``where`` with a tensor of zeros for the slots of others."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(-1)
            own = torch.where(ids[mask] == e, weights[mask], torch.zeros_like(weights[mask]))
            out[mask] += own.sum(-1, keepdim=True) * expert(x[mask])
        return out


@fused("selected")
class TableOfSamples(Several):
    """The table of weights has the dimensions of the samples, and its entries are compared."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(self.samples(x)).to(x.dtype)
        weights, ids = scores.topk(K, -1)
        table = torch.zeros_like(scores).scatter(-1, ids, weights).reshape(-1, E)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = table[:, e] > 0
            out[mask] += expert(x[mask]) * table[mask, e].unsqueeze(-1)
        return out


@fused("selected", "grouped")
class ConditionOfASample(Several):
    """Experts take a value of the sample beside the token (DiT, FiLM), spread over its tokens."""

    def forward(self, x: Tensor) -> Tensor:
        of = self.samples(x)
        given = of.mean(1).unsqueeze(1).expand(-1, of.shape[1], -1).reshape(-1, H)
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok] * torch.sigmoid(given[tok])) * weights[tok, slot, None])
        return out


@fused("selected")
class SharedInPlace(Listed):
    """The shared expert is added in place to what ``index_add_`` made of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        order = ids.flatten().argsort(stable=True)
        rows, counts = x[order // K], torch.bincount(ids.flatten(), minlength=E).tolist()
        y, start = torch.empty_like(rows), 0
        for e, n in enumerate(counts):
            y[start : start + n] = self.experts[e](rows[start : start + n])
            start += n
        out = torch.zeros_like(x).index_add_(0, order // K, y * weights.flatten()[order].unsqueeze(-1))
        out += self.shared(x)
        return out


@unknown(E, "conv1d")
class GroupedConvolutions(Layer):
    """All experts as two grouped convolutions over one place, of which the chosen groups are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(E * H, E * I, 1, groups=E), nn.Conv1d(E * I, E * H, 1, groups=E)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        h = self.up(x.repeat(1, E).unsqueeze(-1)).relu()  # at: GroupedConvolutions
        y = self.down(h).view(-1, E, H).gather(1, ids[..., None].expand(-1, -1, H))
        return (y * weights[..., None]).sum(1)


@unseen()
class BestChannels(Layer):
    """A convolution of each feature, of which a token keeps the best: as many groups as scores are as many as features, and no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.along = nn.Conv1d(H, H, 1, groups=H)

    def forward(self, x: Tensor) -> Tensor:
        y = self.along(x.unsqueeze(-1)).squeeze(-1)
        return torch.zeros_like(y).scatter(1, y.topk(K, -1).indices, 1.0) * y


@twin
class OtherSlot(OfAll):
    """Each slot's expert with the weight of the other one."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        y, out = self.outputs(x), torch.zeros_like(x)
        for k in range(K):
            out = out + weights[:, K - 1 - k, None] * y[torch.arange(len(x)), ids[:, k]]
        return out


@twin
class OtherTokens(OfAll):
    """The chosen expert's output for the token that stands opposite."""

    def forward(self, x: Tensor) -> Tensor:
        return self.outputs(x)[torch.arange(len(x)).flip(0), self.scores(x).argmax(-1)]


@twin
class UniqueOfTheOtherSlot(Listed):
    """The experts that occur in the first slot, for both slots: tokens of others get nothing in the second."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for k in range(K):
            for e in torch.unique(ids[:, 0]).tolist():
                rows = torch.nonzero(ids[:, k] == e, as_tuple=True)[0]
                out[rows] += self.experts[e](x[rows]) * weights[rows, k, None]
        return out


@twin
class MatricesOfTheSecond(Matrices):
    """The first product is by the best expert, the second by the one behind it."""

    def forward(self, x: Tensor) -> Tensor:
        _, ids = self.route(x)
        h = F.relu(torch.bmm(x.unsqueeze(1), self.w1[ids[:, 0]]))
        return torch.bmm(h, self.w2[ids[:, 1]]).squeeze(1)
