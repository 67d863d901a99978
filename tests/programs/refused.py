"""Layers that are refused: one for each way to lose what a rewrite needs, each one statement away from :class:`Plain`.

They are written as users write them. The statement that a refusal must name is marked with a comment ``# at: <code>``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from moefuse.runtime.groups import Terms

T, H, I, E, K = 10, 8, 12, 4, 2  # noqa: E741  (the letters of moefuse.spec)


class Layer(nn.Module):
    """The parts of a small mixture-of-experts layer; each program below writes its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.w_in = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.w_out = nn.Parameter(torch.randn(E, H, I) * I**-0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        return ids, weights

    def expert(self, e: int, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.w_in[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_out[e])


class Plain(Layer):
    """The positive that every negative is one statement away from."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok]) * weights[tok, slot, None]
            out.index_add_(0, tok, y)  # at: plain
        return out


class NoRule(Layer):
    """An operation that no transfer rule knows."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = torch.digamma(self.expert(e, x[tok]).abs() + 1)  # at: no-rule
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class NotRowLocal(Layer):
    """Batch statistics of the rows that were routed to one expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y = y - y.mean(dim=0)  # at: not-row-local
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Random(Layer):
    """Dropout inside the experts, in training mode."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = F.dropout(self.expert(e, x[tok]), 0.25, training=self.training)  # at: random
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class Hook(Layer):
    """A gradient hook on what the experts computed."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            if y.requires_grad:
                y.register_hook(lambda grad: grad * 0.5)  # at: hook
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


class ValueEscapes(Layer):
    """An auxiliary loss on the size of what the experts computed."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        ids, weights = self.route(x)
        out, penalty = torch.zeros_like(x), x.new_zeros(())
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            out.index_add_(0, tok, y * weights[tok, slot, None])
            penalty = penalty + y.square().sum()  # at: value-escapes
        return out, penalty


class Mutation(Layer):
    """The tokens are changed while the loop over experts still reads them."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        h = x * 1.0
        out = torch.zeros_like(h)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, h[tok]) * weights[tok, slot, None])
            h.mul_(0.5)  # at: mutation
        return out


class Alias(Layer):
    """The experts' rows are scaled through a view, and read again under their own name."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            y = self.expert(e, x[tok])
            y[:, : H // 2].mul_(0.5)  # at: alias
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


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
    return x.clone()


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


class Batched(Layer):
    """Gathered weights: no shape depends on the routing, so it also runs on the meta device."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        gate, up = torch.einsum("th,tkih->tki", x, self.w_in[ids]).chunk(2, dim=-1)
        y = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, self.w_out[ids])
        return (y * weights[..., None]).sum(dim=1)  # at: device-unsupported


class Transformed(Layer):
    """What the layer's result gains by a change of the tokens: torch.func runs the experts."""

    def layer(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True)  # at: transformed
        return out

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda tokens: self.layer(tokens).square().sum())(x)


class ContextDiffers(Layer):
    """The experts are frozen by no_grad, their weighted sum is not."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            with torch.no_grad():
                y = F.linear(F.silu(F.linear(x[tok], self.w_in[e, :I])), self.w_out[e])  # at: context-differs
            out.index_add_(0, tok, y * weights[tok, slot, None])
        return out


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


class Model(nn.Module):
    """A layer inside a model, so that it has a module path."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Plain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class Teacher(Plain):
    """A layer that is only evaluated, inside a program that is trained: times are of the forward op alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = super().forward(x)
        return x + y
