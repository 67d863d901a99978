"""Small models for the question whether there are experts in them: those that have some that moefuse cannot fuse, and those without any."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T, H, I, E, K = 12, 16, 24, 4, 2  # noqa: E741  (the letters of moefuse.spec)

Make = Callable[[], nn.Module]
HAVE: list[Make] = []
"""Models with experts: a warning, and an error under ``strict``."""
HAVE_NOT: list[Make] = []
"""Models without: not a word."""

log = logging.getLogger(__name__)


def have(make: Make) -> Make:
    HAVE.append(make)
    return make


def have_not(make: Make) -> Make:
    HAVE_NOT.append(make)
    return make


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, I), nn.Linear(I, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(Expert):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Layer(nn.Module):
    """A router that is a matrix, and a list of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.experts = nn.ModuleList(Expert() for _ in range(E))
        self.load = [0] * E

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        return weights, ids

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class Counting(Layer):
    """A router [H, E], and Python counts the tokens of each expert."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            self.load[e] = tok.numel()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class Logging(Layer):
    """The count is only logged."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            log.info("expert %d: %d", e, tok.numel())
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


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


@have
class Listed(nn.Module):
    """Experts as lists of matrices, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.w1 = nn.ParameterList(nn.Parameter(torch.randn(H, I)) for _ in range(E))
        self.w2 = nn.ParameterList(nn.Parameter(torch.randn(I, H)) for _ in range(E))
        self.load: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load.append(tok.numel())
            out.index_add_(0, tok, F.relu(x[tok] @ self.w1[e]) @ self.w2[e] * weights[tok, slot, None])
        return out


@have
class Stacked(nn.Module):
    """Stacked experts, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.w_gate = nn.Parameter(torch.randn(H, E))
        self.w1, self.w2 = nn.Parameter(torch.randn(E, H, I)), nn.Parameter(torch.randn(E, I, H))
        self.load: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = (x @ self.w_gate).softmax(-1).topk(K)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load.append(len(tok))
            out.index_add_(0, tok, F.relu(x[tok] @ self.w1[e]) @ self.w2[e] * weights[tok, slot, None])
        return out


class Disabled(Layer):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@have
class HoldingDisabled(nn.Module):
    """The whole layer is kept away from Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.moe = nn.Linear(H, H), Disabled()

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(self.first(x))  # type: ignore[no-any-return]


class DisabledExperts(Layer):
    @torch.compiler.disable
    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.route(x))


have(DisabledExperts)


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
class SecondLost(nn.Module):
    """One layer is fused, and the one behind it counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


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


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, E)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.linear(x).softmax(-1).topk(K)
        return weights, ids


class Container(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleDict({f"e{e}": Expert() for e in range(E)})
        self.load: dict[str, int] = {}

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, (name, expert) in enumerate(self.items.items()):
            tok, slot = torch.where(ids == e)
            self.load[name] = tok.numel()
            out.index_add_(0, tok, expert(x[tok]) * weights[tok, slot, None])
        return out


@have
class InModules(nn.Module):
    """The choice in a router of its own, the loop and a dict of experts in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = TopKRouter(), Container()

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.router(x))  # type: ignore[no-any-return]


def run_experts(layer: Layer, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(E):
        tok, slot = torch.where(ids == e)
        layer.load[e] += tok.numel()
        out.index_add_(0, tok, layer.experts[e](x[tok]) * weights[tok, slot, None])
    return out


@have
class ByHelper(Layer):
    """The loop in a function of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return run_experts(self, x, *self.route(x))


@have
class Mixed(Layer):
    """Experts of two kinds, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList((Expert(), nn.Linear(H, H), Expert(), nn.Linear(H, H)))

    forward = Counting.forward


@have
class Generating(Layer):
    """The tokens of each expert come from a generator that stops at empty ones."""

    def hits(self, ids: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if len(tok) == 0:
                return
            yield e, tok, slot

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e, tok, slot in self.hits(ids):
            out.index_add_(0, tok, self.experts[e](x[tok]) * weights[tok, slot, None])
        return out


@have
class Stack(nn.Module):
    """Counting layers in a decoder with a head of as many classes as it has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(H), "mlp": Counting()}) for _ in range(3))
        self.head = nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](layer["norm"](x))  # type: ignore[index]
        return self.head(x)  # type: ignore[no-any-return]


@have
class Hashed(Layer):
    """No router: the tokens say by themselves where they go, and are counted."""

    def __init__(self) -> None:
        super().__init__()
        del self.w_gate

    def forward(self, x: Tensor) -> Tensor:
        ids, out = (x[:, 0] * 100).long() % E, torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok = torch.where(ids == e)[0]
            self.load[e] += len(tok)
            out.index_add_(0, tok, expert(x[tok]))
        return out


@have
class DeepRouter(Layer):
    """Scores of two layers with noise, as in Shazeer 2017."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.Linear(H, H), nn.Tanh(), nn.Linear(H, E))
        self.w_noise = nn.Parameter(torch.zeros(H, E))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        best, ids = (logits + torch.zeros_like(logits) * F.softplus(x @ self.w_noise)).topk(K)
        return best.softmax(-1), ids

    forward = Counting.forward


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList(Expert() for _ in range(E))


@have
class InBlock(nn.Module):
    """A block has the router and the loop, another module only holds the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.bank, self.counts = nn.LayerNorm(H), nn.Linear(H, E), Bank(), [0] * E

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights, ids = torch.topk(F.softmax(self.gate(h), dim=-1), K)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            if tok.numel() > self.counts[e]:
                self.counts[e] = tok.numel()
            x = x.index_add(0, tok, self.bank.items[e](h[tok]) * weights[tok, slot, None])
        return x


@have
class Numbered(nn.Module):
    """Experts as attributes with numbers, by ``getattr``, and a shared one of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.shared = nn.Linear(H, E), Expert()
        for e in range(E):
            setattr(self, f"expert{e}", Expert())
        self.load = [0] * E

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        out = self.shared(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            self.load[e] = tok.numel()
            out.index_add_(0, tok, getattr(self, f"expert{e}")(x[tok]) * weights[tok, slot, None])
        return out


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


# --- without experts -----------------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """As many equal blocks as classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(E)), nn.Linear(H, E)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


have_not(Backbone)


@have_not
class Classes(Backbone):
    """A class is chosen by the head."""

    def forward(self, x: Tensor) -> Any:
        scores = self.head(self.features(x))
        return scores.softmax(-1), scores.argmax(-1), scores.topk(2).indices


@have_not
class BreakBehind(Backbone):
    """The graph breaks between blocks and head."""

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        if x.sum() > 0:
            x = x * 2
        return self.head(x).argmax(-1)


@have_not
class BreakAmong(Backbone):
    """The graph breaks in each block."""

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)).topk(2)


class OutOfGraphs(Backbone):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x)).softmax(-1).argmax(-1)


@have_not
class HoldingOutOfGraphs(nn.Module):
    """A classifier that is kept away from Dynamo."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rest = nn.Linear(H, H), OutOfGraphs()

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))  # type: ignore[no-any-return]


@have_not
class EarlyExit(Backbone):
    """Blocks run until the head is sure."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
            if self.head(x).softmax(-1).max().item() > 0.99:
                break
        return self.head(x)


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList(Expert() for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        return torch.stack([member(x) for member in self.members]).mean(0)


have_not(Ensemble)


@have_not
class Votes(Ensemble):
    """An ensemble that agrees on a class."""

    def forward(self, x: Tensor) -> Any:
        p = torch.stack([member(x).softmax(-1) for member in self.members])
        return p.mean(0), p.mean(0).argmax(-1), p.var(0)


@have_not
class Minimum(Ensemble):
    """The lowest of several values."""

    def forward(self, x: Tensor) -> Any:
        return torch.stack([member(x) for member in self.members]).min(0).values


@have_not
class Critics(nn.Module):
    """Four critics beside a policy of four actions."""

    def __init__(self) -> None:
        super().__init__()
        self.critics, self.policy = nn.ModuleList(nn.Linear(H, E) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        logits = self.policy(x)
        values = torch.stack([critic(x) for critic in self.critics])
        return logits.log_softmax(-1), values.mean(0), values.std(0)


@have_not
class Hashes(nn.Module):
    """Four tables of embeddings, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.head = nn.ModuleList(nn.Embedding(9, H) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        keys = (x[:, :1] * 100).long()
        h = sum(table((keys * (n + 3) % 9).squeeze(1)) for n, table in enumerate(self.tables))
        return self.head(x + h)


@have_not
class Levels(nn.Module):
    """One layer for the rows of each level, with another factor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Any:
        level, out = torch.arange(T) % 3, torch.zeros_like(x)
        for k in range(3):
            rows = torch.where(level == k)[0]
            out[rows] = self.linear(x[rows]) * (k + 1)
        return out


@have_not
class Pooling(Levels):
    """The sum of each group, through one layer."""

    def forward(self, x: Tensor) -> Any:
        group = torch.arange(T) % E
        return torch.stack([self.linear(x[(group == g).nonzero().squeeze(-1)]).sum(0) for g in range(E)])


@have_not
class Pruning(Backbone):
    """Each block is followed by one token less; T is the number of blocks, by chance, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Any:
        x = x[None, : E + 3]
        for block in self.blocks:
            x = block(x)
            kept = self.score(x).squeeze(-1).topk(x.shape[1] - 1, dim=-1)[1]
            x = x.gather(1, kept[..., None].expand(-1, -1, H))
        return x


@have_not
class UNet(nn.Module):
    """Down and up, two classes for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, H, 3, padding=1)
        self.up1, self.up2, self.head = nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, H, 3, padding=1), nn.Conv1d(H, 2, 1)

    def forward(self, x: Tensor) -> Any:
        x = x.t()[None]
        first = F.relu(self.down1(x))
        h = F.relu(self.down2(F.max_pool1d(first, 2)))
        h = F.interpolate(F.relu(self.up1(h)), scale_factor=2.0) + first
        return self.head(F.relu(self.up2(h))).argmax(1)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, to: Tensor, of: Tensor) -> Tensor:
        return x + torch.zeros_like(x).index_add(0, to, self.linear(x[of]))


@have_not
class Graphs(nn.Module):
    """Messages along edges, twice, and two classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = Convolution(), Convolution(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        of, to = torch.arange(30) % T, torch.arange(30) * 7 % T
        return self.head(self.conv2(F.relu(self.conv1(x, to, of)), to, of)).argmax(-1)


@have_not
class Towers(nn.Module):
    """Two towers on one trunk, and a domain of two."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.click, self.buy, self.domain = nn.Linear(H, H), Expert(), Expert(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.trunk(x))
        return self.click(h).sigmoid() * self.buy(h).sigmoid(), self.domain(h).softmax(-1)


@have_not
class Codes(nn.Module):
    """Residual quantisation with four books, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.books, self.head = nn.ParameterList(nn.Parameter(torch.randn(8, H)) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        left, total = x, torch.zeros_like(x)
        for book in self.books:
            code = F.embedding(torch.cdist(left, book).argmin(-1), book)
            left, total = left - code, total + code
        return self.head(x + (total - x).detach()).softmax(-1)


@have_not
class Beams(nn.Module):
    """The best continuations, through four blocks again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.embedding = Backbone(), nn.Linear(H, 8), nn.Embedding(8, H)

    def forward(self, x: Tensor) -> Any:
        best, at = self.head(self.body.features(x)).log_softmax(-1).flatten().topk(E)
        x = x[at // 8] + self.embedding(at % 8)
        return best[:, None] + self.head(self.body.features(x))


@have_not
class Boxes(nn.Module):
    """Boxes without those that overlap a better one."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.score = nn.Linear(H, 4), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Any:
        order = self.score(x).squeeze(-1).argsort(descending=True)
        box = self.box(x)[order]
        near = torch.cdist(box, box) < 0.5
        return box[~near.triu(1).any(0)]


@have_not
class Answers(nn.Module):
    """Attention, and where an answer begins and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))
        self.span = nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        h = (self.q(x) @ self.k(x).t()).softmax(-1) @ self.v(x)
        return self.span(x + self.o(h)).argmax(0)


@have_not
class Cell(nn.Module):
    """Four gates of a recurrent cell, and four outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.ModuleList(nn.Linear(H, H) for _ in range(E)), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(H)
        for row in x[:3]:
            i, f, o, g = (gate(row + state) for gate in self.gates)
            state = o.sigmoid() * torch.tanh(f.sigmoid() * state + i.sigmoid() * g.tanh())
        return self.head(state).argmax()


@have_not
class Narrow(nn.Module):
    """As many features as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(H, E), nn.ModuleList(nn.Linear(E, E) for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = x + F.relu(block(x)) * x.mean()
        return x.softmax(-1)


@have_not
class Streams(nn.Module):
    """Two streams, weighed softly by a gate: both always run."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.image, self.text = nn.Linear(H, 2), Expert(), Expert()

    def forward(self, x: Tensor) -> Any:
        p = self.gate(x).softmax(-1)
        return p[:, :1] * self.image(x) + p[:, 1:] * self.text(x.flip(0))


@have_not
class Vision(nn.Module):
    """Patches, positions, four blocks of attention, four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.token = nn.Parameter(torch.randn(1, T + 1, H)), nn.Parameter(torch.randn(1, 1, H))
        layer = nn.TransformerEncoderLayer(H, 2, 2 * H, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, E, enable_nested_tensor=False), nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        h = torch.cat((self.token, x[None]), 1) + self.positions
        return self.head(self.encoder(h)[:, 0]).argmax(-1)


@have_not
class Residual(nn.Module):
    """Stages of convolutions in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(nn.Conv1d(H, H, 3, padding=1), nn.BatchNorm1d(H), nn.ReLU()) for _ in range(E))
        self.head = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        h = x.t()[None]
        for stage in self.stages:
            h = h + stage(h)
        return self.head(h.mean(-1))


@have_not
class Unused(nn.Module):
    """A second layer that this call does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x: Tensor, both: bool = False) -> Any:
        return self.second(self.first(x)) if both else self.first(x)


@have_not
class UnusedBehindBreak(Unused):
    """As above, and there is a break."""

    def forward(self, x: Tensor, both: bool = False) -> Any:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x) if both else x * 2


@have_not
class Recycled(Backbone):
    """As many rounds as blocks, and the last one is another; rows without a value are left out before."""

    def forward(self, x: Tensor) -> Any:
        x = x[x.isfinite().all(-1)]
        for n, block in enumerate(self.blocks):
            last = n == E - 1
            x = block(x)
            if n == 0 or not last:
                x = x * 0.5
        return self.head(x).max(-1)


@have_not
class Numbers(nn.Module):
    """A classifier that logs how many rows it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.fc = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        rows = torch.where(x[:, 0] > -10)[0]
        log.info("rows %d", rows.numel())
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x[rows]))))).softmax(-1).argmax(-1)


@have_not
class Anchors(nn.Module):
    """The best of the first stage's places go through decoder layers, with a head for each (DETR in two stages)."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.layers = nn.Linear(H, 1), nn.ModuleList(Block() for _ in range(E))
        self.heads = nn.ModuleList(nn.Linear(H, E) for _ in range(E))

    def forward(self, x: Tensor) -> Any:
        x, found = x[self.score(x).squeeze(-1).topk(5).indices], []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x)
            found.append(head(x))
        return torch.stack(found).softmax(-1)


@have_not
class Squeeze(nn.Module):
    """Channels weighed by what all places say; as many channels in between as blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.down, self.up = nn.ModuleList(Block() for _ in range(E)), nn.Linear(H, E), nn.Linear(E, H)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
            x = x * self.up(F.relu(self.down(x.mean(0)))).sigmoid()
        return x


@have_not
class Contrast(nn.Module):
    """Two encoders of one kind, all pairs compared."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.head = Expert(), Expert(), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Any:
        pairs = self.image(x) @ self.text(x.flip(0)).t()
        return pairs.softmax(-1), pairs.argmax(-1), self.head(x).softmax(-1)


@have_not
class Mask(nn.Module):
    """Learned positions of [layers, places, features] beside a classifier, and a sampled token."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.blocks = nn.Parameter(torch.randn(E, 2, H)), nn.ModuleList(Block() for _ in range(E))
        self.head = nn.Linear(H, E)

    def forward(self, x: Tensor) -> Any:
        for n, block in enumerate(self.blocks):
            x = block(torch.cat((self.prompts[n], x)))[2:]
        return self.head(x).softmax(-1).argmax(-1)
