"""What stands around the experts: latent projections, shared experts, noise on gates and inputs, product keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.research.base import E, Gated, H, I, K, Layer, Listed, Stacked, fused, mlp, twin, unknown, unseen


def looped(experts: nn.ModuleList, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The plain loop."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(experts):
        tok, slot = torch.where(ids == e)
        out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
    return out


@fused("selected")
class Latent(Layer):
    """A shared projection down before the experts, one up behind them (LatentMoE, nemotron)."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(H, 4, bias=False), nn.Linear(4, H, bias=False)
        self.experts = nn.ModuleList(Gated(4) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return self.up(looped(self.experts, self.down(x), ids, weights))  # type: ignore[no-any-return]


@fused("selected", "grouped")
class LatentInside(Layer):
    """The shared projections are applied to each expert's rows in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(H, 4, bias=False), nn.Linear(4, H, bias=False)
        self.experts = nn.ModuleList(Gated(4) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.up(expert(self.down(x[tok]))) * weights[tok, slot, None])
        return out


@fused("selected")
class SharedBeside(Listed):
    """A gated shared expert beside the routed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.shared_gate = Gated(), nn.Linear(H, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return looped(self.experts, x, ids, weights) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


@fused("selected")
class SharedAsOneMore(Layer):
    """The shared expert is the last of the list, and every token has its number as one more id."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(E + 1))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], E)], dim=-1)
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], dim=-1)
        return looped(self.experts, x, ids, weights)


@fused("selected")
class SharedLastTurn(Layer):
    """One more turn of the loop: the last expert takes every token."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Gated() for _ in range(E + 1))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E + 1):
            if e == E:
                out = out + self.experts[e](x)
                continue
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@fused("selected")
class SharedFirst(Listed):
    """The sum starts from the shared expert's output."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Gated()

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = self.shared(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out = out.index_add(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@fused("selected")
class NoisyTopK(Listed):
    """Shazeer's noisy gate: softplus noise, softmax over the best k."""

    def __init__(self) -> None:
        super().__init__()
        self.w_noise = nn.Parameter(torch.zeros(H, E))

    def forward(self, x: Tensor) -> Tensor:
        clean = self.gate(x)
        noisy = clean + torch.randn_like(clean) * (F.softplus(x @ self.w_noise) + 1e-2)
        top, ids = noisy.topk(K, dim=1)
        return looped(self.experts, x, ids, top.softmax(1))


@fused("selected")
class Jitter(Listed):
    """Switch's jitter: the router's input times uniform noise, in place of x."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.9, 1.1)
        weights, ids = self.route(x)
        return looped(self.experts, x, ids, weights)


class Dispatcher:
    """The sparse dispatcher of tensor2tensor in PyTorch (D. Rau's mixture-of-experts): ``nonzero(gates).sort(0)``, split, stitched."""

    def __init__(self, gates: Tensor) -> None:
        sorted_experts, index_sorted_experts = torch.nonzero(gates).sort(0)
        _, self.expert_index = sorted_experts.split(1, dim=1)
        self.batch_index = torch.nonzero(gates)[index_sorted_experts[:, 1], 0]
        self.part_sizes = (gates > 0).sum(0).tolist()
        self.nonzero_gates = torch.gather(gates[self.batch_index.flatten()], 1, self.expert_index)

    def dispatch(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(x[self.batch_index].squeeze(1), self.part_sizes, dim=0)

    def combine(self, out: list[Tensor], like: Tensor) -> Tensor:
        stitched = torch.cat(out, 0).mul(self.nonzero_gates)
        return torch.zeros_like(like).index_add(0, self.batch_index, stitched)


@fused("selected")
class SparseDispatcher(Layer):
    """A table of gates, scattered from the softmax of the best k, and that dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, top.softmax(1))
        dispatcher = Dispatcher(gates)
        inputs = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[i](inputs[i]) for i in range(E)], x)


@fused("selected")
class DispatcherWithLoss(Layer):
    """The whole layer: noise, one more choice than is used for the load, importance and load in a loss, a float accumulator."""

    leaf = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(E))
        self.w_noise = nn.Parameter(torch.zeros(H, E))

    def gates(self, x: Tensor) -> Tensor:
        clean = self.gate(x)
        logits = (clean + torch.randn_like(clean) * (F.softplus(x @ self.w_noise) + 1e-2)).softmax(1)
        top_logits, top_indices = logits.topk(min(K + 1, E), dim=1)
        top_k_logits, top_k_indices = top_logits[:, :K], top_indices[:, :K]
        top_k_gates = top_k_logits / (top_k_logits.sum(1, keepdim=True) + 1e-6)
        return torch.zeros_like(logits, requires_grad=self.leaf).scatter(1, top_k_indices, top_k_gates)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gates(x)
        importance, load = gates.sum(0), (gates > 0).sum(0)
        loss = importance.var() / (importance.mean() ** 2 + 1e-10) + load.float().var()
        dispatcher = Dispatcher(gates)
        inputs = dispatcher.dispatch(x)
        stitched = torch.cat([self.experts[i](inputs[i]) for i in range(E)], 0).mul(dispatcher.nonzero_gates)
        zeros = torch.zeros(gates.size(0), stitched.size(1), dtype=x.dtype, device=stitched.device, requires_grad=self.leaf)
        return zeros.index_add(0, dispatcher.batch_index, stitched) + loss.to(x.dtype)


@fused("selected")
class DispatcherAsPublished(DispatcherWithLoss):
    """With ``zeros_like(logits, requires_grad=True)``, of a leaf that nobody keeps."""

    leaf = True


@fused("selected")
class RectifiedGates(Layer):
    """Weights that are zero for some of the chosen experts: those are not in the dispatcher's list."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp() for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        dispatcher = Dispatcher(torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, F.relu(top - 0.1)))
        inputs = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[i](inputs[i]) for i in range(E)], x)


@fused("selected")
class AboveZero(Listed):
    """Signed gates, of which a loop takes those above zero."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, top.tanh())
        mask, out = gates > 0, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = torch.where(mask[:, e])[0]
            out = out.index_add(0, tok, expert(x[tok]) * gates[tok, e, None])
        return out


@unknown(3, "einsum")
class ProductKeys(Layer):
    """PEER: a million experts of one neuron, found by product keys, as embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 3, H // 2))
        self.down, self.up = nn.Embedding(9, H), nn.Embedding(9, H)

    def forward(self, x: Tensor) -> Tensor:
        halves = x.view(-1, 2, H // 2)
        scores, places = torch.einsum("tpd,pnd->ptn", halves, self.keys).topk(K, dim=-1)
        both = (scores[0][:, :, None] + scores[1][:, None, :]).flatten(1)
        numbers = (places[0][:, :, None] * 3 + places[1][:, None, :]).flatten(1)
        best, at = both.topk(K, dim=-1)
        ids = numbers.gather(-1, at)
        h = F.gelu(torch.einsum("td,tkd->tk", x, self.down(ids))) * best.softmax(-1)  # at: ProductKeys
        return torch.einsum("tk,tkd->td", h, self.up(ids))


@unseen()
class EmbeddingBag(Layer):
    """A memory layer: the chosen values, weighted, by ``embedding_bag``."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        return F.embedding_bag(ids, self.values, per_sample_weights=weights, mode="sum")


@unseen()
class SoftMoE(Stacked):
    """Soft MoE: every slot is a mix of all tokens; nothing is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(H, E, 2) / 3)

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("td,des->tes", x, self.phi)
        slots = torch.einsum("tes,td->esd", logits.softmax(0), x)
        h = F.silu(torch.bmm(slots, self.w1.transpose(1, 2))) * torch.bmm(slots, self.w3.transpose(1, 2))
        y = torch.bmm(h, self.w2.transpose(1, 2))
        return torch.einsum("tes,esd->td", logits.flatten(1).softmax(1).view_as(logits), y)


@twin
class NoiseInside(Listed):
    """The noise is drawn for each expert's rows."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok] * torch.rand_like(x[tok])) * weights[tok, slot, None])
        return out


@twin
class OtherGates(SparseDispatcher):
    """Weights are read from another table than tokens are chosen by."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, top.softmax(1))
        dispatcher = Dispatcher(gates)
        dispatcher.nonzero_gates = Dispatcher(gates.flip(0)).nonzero_gates
        inputs = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[i](inputs[i]) for i in range(E)], x)


@fused("selected", "grouped")
class SharedTwice(Layer):
    """The expert that every token has is an expert of the router, too: an id twice in a token, whose weights are added."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(H, I) for _ in range(E))
        self.back = nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        ids = torch.cat([ids, torch.full_like(ids[:, :1], E - 1)], dim=-1)
        weights = torch.cat([weights, torch.ones_like(weights[:, :1])], dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(-1)
            out[mask] += self.back(F.relu(expert(x[mask]))) * (weights * (ids == e)).sum(-1)[mask, None]
        return out


@twin
class ScaledOnly(SparseDispatcher):
    """The list is of gates above a bound that is not zero."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, top.softmax(1))
        places = torch.nonzero(gates > 0.4)
        out = torch.zeros_like(x)
        for e in range(E):
            tok = places[places[:, 1] == e, 0]
            out = out.index_add(0, tok, self.experts[e](x[tok]) * gates[tok, e, None])
        return out


@twin
class OrderOfTokens(SparseDispatcher):
    """The list is sorted by token where it should be by expert."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        gates = torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, top.softmax(1))
        dispatcher = Dispatcher(gates)
        dispatcher.batch_index = torch.nonzero(gates)[torch.nonzero(gates).sort(0)[1][:, 0], 0]
        inputs = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[i](inputs[i]) for i in range(E)], x)


@twin
class PerhapsNegative(SparseDispatcher):
    """Nothing says that gates are above zero: the list has all that are not zero, the counts are of those above."""

    def forward(self, x: Tensor) -> Tensor:
        top, ids = self.gate(x).topk(K, dim=1)
        dispatcher = Dispatcher(torch.zeros(x.shape[0], E, dtype=x.dtype).scatter(1, ids, 2 + top.tanh()))
        inputs = dispatcher.dispatch(x)
        return dispatcher.combine([self.experts[i](inputs[i]) for i in range(E)], x)


@twin
class WrittenInBetween(Listed):
    """One expert's rows are added to other tokens, in the middle of a loop that skips experts without tokens."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            if tok.numel() == 0:
                continue
            if e == E // 2:
                out.index_add_(0, torch.arange(4), expert(x[1:5]))
            else:
                out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out
