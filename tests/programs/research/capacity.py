"""Capacity: GShard and Switch dispatch and combine einsums, and loops that take no more than so many tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.base import E, H, K, Layer, Listed, Stacked, fused, mlp, refused, twin, unknown, unseen

LIMITED = "experts take a limited number of tokens here: "

FIXED = LIMITED + "`einsum` puts them into a fixed number of places of each expert, and the experts run on all places, filled or not"

SOME = (
    "`tok` is some of the tokens that chose an expert, and which depends on the others; to keep the first of each, a condition on the mask "
    "of all experts is fused, `mask * (mask.sum(1).cumsum(0) <= capacity)[:, None]` of `mask = one_hot(ids, E)` [tokens, K, E]"
)

CHOSEN = "experts choose their tokens here, not tokens their experts: every expert has the same number of rows"


def slots_of(scores: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Top-1: (combine weights [S, E, C], dispatch mask [S, E, C]); tokens behind ``capacity`` others of their expert are dropped."""
    gates, index = scores.max(dim=-1)
    mask = F.one_hot(index, num_classes=E)
    place = (torch.cumsum(mask, dim=0) - 1) * mask
    mask = mask * (place < capacity)
    gates = gates * mask.sum(dim=1)
    where = F.one_hot((place * mask).sum(dim=1), num_classes=capacity).to(scores.dtype)
    combine = torch.einsum("se,sc->sec", gates[:, None] * mask, where)
    return combine, combine.bool()


@refused("capacity", FIXED)
class DeepspeedTopOne(Listed):
    """DeepSpeed-MoE, fairscale, Tutel's plain path: ``einsum("sec,sm->ecm")``, a chunk for each expert, ``einsum("sec,ecm->sm")``."""

    capacity = 2

    def forward(self, x: Tensor) -> Tensor:
        combine_weights, dispatch_mask = slots_of(self.scores(x), self.capacity)
        dispatched = torch.einsum("sec,sm->ecm", dispatch_mask.to(x.dtype), x)  # at: DeepspeedTopOne
        chunks = dispatched.chunk(E, dim=0)
        expert_output = torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)], dim=0)
        return torch.einsum("sec,ecm->sm", combine_weights.to(x.dtype), expert_output)


@refused("capacity", FIXED)
class GshardTopTwo(Stacked):
    """GShard, lucidrains' mixture-of-experts: two choices, places after those of the first, batched products over experts."""

    capacity = 3

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        first = F.one_hot(scores.argmax(-1), num_classes=E)
        second = F.one_hot(scores.masked_fill(first.bool(), 0.0).argmax(-1), num_classes=E)
        at_first = torch.cumsum(first, dim=0) - first
        at_second = torch.cumsum(second, dim=0) - second + first.sum(dim=0, keepdim=True)
        combine = x.new_zeros(x.shape[0], E, self.capacity)
        for mask, place in ((first, at_first), (second, at_second)):
            mask = mask * (place < self.capacity)
            gate = (scores * mask).sum(-1)
            where = F.one_hot((place * mask).sum(-1), num_classes=self.capacity)
            combine = combine + (gate[:, None, None] * mask[:, :, None] * where[:, None, :]).to(x.dtype)
        rows = torch.einsum("tec,th->ech", combine.bool().to(x.dtype), x)  # at: GshardTopTwo
        h = F.silu(torch.bmm(rows, self.w1.transpose(1, 2))) * torch.bmm(rows, self.w3.transpose(1, 2))
        return torch.einsum("tec,ech->th", combine, torch.bmm(h, self.w2.transpose(1, 2)))


@refused("capacity", FIXED.replace("einsum", "matmul"))
class FlatPlaces(Listed):
    """Places of all experts in one dimension, and ``matmul`` there and back (Tutel, fairseq)."""

    def forward(self, x: Tensor) -> Tensor:
        combine, dispatch = slots_of(self.scores(x), 2)
        flat = dispatch.to(x.dtype).flatten(1)
        rows = (flat.t() @ x).view(E, -1, H)  # at: FlatPlaces
        y = torch.stack([expert(row) for expert, row in zip(self.experts, rows, strict=True)])
        return combine.to(x.dtype).flatten(1) @ y.view(-1, H)


@unknown(6, "linear")
class DepthRouter(Layer):
    """Mixture of depths: one score for each token, and one block for the best of them."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.block = nn.Linear(H, 1), mlp()

    def forward(self, x: Tensor) -> Tensor:
        weights, tokens = self.score(x).squeeze(-1).topk(max(1, x.shape[0] // 2), dim=0)
        return x.index_add(0, tokens, self.block(x[tokens]) * weights.sigmoid()[:, None])  # at: DepthRouter


@unseen()
class BestOfEachClass(Layer):
    """A detector's best places for each class: chosen along rows, and no weights behind."""

    def forward(self, x: Tensor) -> Tensor:
        best, places = self.gate(x).t().topk(1, dim=-1)
        return x + x[places[:, 0]].mean(0) * best.sum()


@fused("selected")
class SwitchDropped(Listed):
    """Switch transformers' PyTorch form: ``mask * (cumsum <= capacity)``, a loop over experts."""

    capacity = 2

    def forward(self, x: Tensor) -> Tensor:
        probs, index = self.scores(x).max(dim=-1)
        mask = F.one_hot(index, num_classes=E)
        mask = mask * (torch.cumsum(mask, dim=0) <= self.capacity)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = mask[:, e].nonzero().squeeze(-1)
            out.index_add_(0, tok, expert(x[tok]) * probs[tok, None].to(x.dtype))
        return out


@refused("capacity", LIMITED + SOME, whole=False)
class FirstOfEach(Listed):
    """``selected[:capacity]`` of an expert's tokens, however many there are."""

    capacity = 2

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = (ids == e).any(-1).nonzero().squeeze(-1)[: self.capacity]  # at: FirstOfEach
            w = (weights * (ids == e)).sum(-1)
            out.index_add_(0, tok, expert(x[tok]) * w[tok, None])
        return out


ASKS = "this branch depends on data, and it asks how many tokens an expert has; the graph breaks here as it would without moefuse"


@refused("not-captured", ASKS, whole=False)
class FirstIfMany(Listed):
    """makeMoE with a capacity: ``selected[:capacity]`` where an expert has more tokens than that."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out, capacity = torch.zeros_like(x), x.shape[0] // 2
        for e, expert in enumerate(self.experts):
            tok = (ids == e).any(-1).nonzero().squeeze(-1)
            tok = tok[:capacity] if tok.numel() > capacity else tok  # at: FirstIfMany
            w = (weights * (ids == e)).sum(-1)
            out.index_add_(0, tok, expert(x[tok]) * w[tok, None])
        return out


@fused("selected")
class RoomForAll(Listed):
    """A capacity that no expert can reach: as many tokens as there are."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = (ids == e).any(-1).nonzero().squeeze(-1)
            tok = tok[: len(x)] if tok.numel() > len(x) else tok
            w = (weights * (ids == e)).sum(-1)
            out.index_add_(0, tok, expert(x[tok]) * w[tok, None])
        return out


@refused("expert-choice", CHOSEN)
class ExpertChoice(Stacked):
    """Expert choice (Zhou et al.): each expert takes its ``c`` best tokens; einsum there and back."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        g, i = scores.T.topk(min(2, x.shape[0]), dim=-1)  # at: ExpertChoice
        p = F.one_hot(i, num_classes=x.shape[0]).to(x.dtype)
        rows = torch.einsum("ect,th->ech", p, x)
        gate = torch.einsum("ech,eih->eci", rows, self.w1)
        h = F.silu(gate) * torch.einsum("ech,eih->eci", rows, self.w3)
        y = torch.einsum("eci,ehi->ech", h, self.w2)
        return torch.einsum("ect,ec,ech->th", p, g.to(x.dtype), y)


@refused("expert-choice", CHOSEN)
class ExpertChoiceLoop(Listed):
    """Expert choice, a loop: ``topk`` along the tokens, ``index_add_`` back."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x)
        weights, tokens = torch.topk(scores.t(), k=min(3, x.shape[0]), dim=-1)  # at: ExpertChoiceLoop
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            out.index_add_(0, tokens[e], expert(x[tokens[e]]) * weights[e, :, None].to(x.dtype))
        return out


@refused("expert-choice", CHOSEN)
class ExpertChoiceGather(Stacked):
    """Expert choice with stacked weights: ``x[ids]``, bmm, ``index_add`` of all rows."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.scores(x).transpose(0, 1).topk(min(3, x.shape[0]), dim=1)  # at: ExpertChoiceGather
        rows = x[ids]
        h = F.silu(torch.bmm(rows, self.w1.transpose(1, 2))) * torch.bmm(rows, self.w3.transpose(1, 2))
        y = torch.bmm(h, self.w2.transpose(1, 2)) * weights.unsqueeze(-1).to(x.dtype)
        return torch.zeros_like(x).index_add(0, ids.flatten(), y.flatten(0, 1))


@twin
class CapacityOffByOne(Layer):
    """Dispatch drops one token more than combine knows of: its slot is zeros, and goes through the experts all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Listed().experts

    def forward(self, x: Tensor) -> Tensor:
        combine, _ = slots_of(self.scores(x), 3)
        _, dispatch = slots_of(self.scores(x), 2)
        dispatched = torch.einsum("sec,sm->ecm", F.pad(dispatch, (0, 1)).to(x.dtype), x)
        chunks = dispatched.chunk(E, dim=0)
        y = torch.cat([expert(chunk) for chunk, expert in zip(chunks, self.experts, strict=True)], dim=0)
        return torch.einsum("sec,ecm->sm", combine.to(x.dtype), y)


@twin
class OtherLengths(Listed):
    """The rows are the first two of an expert, the weights its last two."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = (ids == e).any(-1).nonzero().squeeze(-1)
            out[tok[:2]] += expert(x[tok[:2]]) * (weights * (ids == e)).sum(-1)[tok[-2:], None]
        return out


@twin
class TransposedChoice(Listed):
    """As many experts as slots: the ids of an expert's tokens taken for the experts of a token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.scores(x).t().topk(K, dim=0)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            slot, tok = torch.where(ids == e)
            out.index_add_(0, tok % x.shape[0], expert(x[tok % x.shape[0]]) * weights[slot, tok, None].to(x.dtype))
        return out + 0 * H
