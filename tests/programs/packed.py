"""Quantised experts, in the ways in which people write that by hand; each next to a twin that reads plain weights.

What a program takes for a weight is the only statement in which a twin differs. The operation that a refusal must name is marked with a
comment ``# at: <spelling>``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

H, E, K, G = 16, 5, 2, 8
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Spelling:
    """``store`` makes what holds the weights of all experts, ``weight`` those of some of it, and ``unread`` is the operation to name."""

    store: Callable[[], tuple[Tensor, ...]]
    weight: Callable[..., Tensor]
    unread: str


def _bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def of_channels(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale  # at: channel


def of_blocks(q: Tensor, scale: Tensor) -> Tensor:
    return q.float() * scale.repeat_interleave(G, -2).repeat_interleave(G, -1)  # at: block


def of_split_blocks(q: Tensor, scale: Tensor) -> Tensor:
    lead = q.shape[:-2]
    return (q.float().reshape(*lead, H // G, G, H // G, G) * scale[..., :, None, :, None]).reshape(*lead, H, H)  # at: split block


def of_scaled_floats(q: Tensor, scale: Tensor) -> Tensor:
    lead = q.shape[:-2]
    return (q.reshape(*lead, H // G, G, H) * scale[..., None, None]).reshape(*lead, H, H)


def of_nibbles(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = torch.stack((q & 15, q >> 4), -1)  # at: nibbles
    return ((codes.flatten(-2).float().unflatten(-1, (-1, G)) - zero[..., None]) * scale[..., None]).flatten(-2)


def of_levels(q: Tensor, exponent: Tensor) -> Tensor:
    low, high = (q & 15).long(), (q >> 4).long()  # at: levels
    levels = torch.tensor(LEVELS)
    values = torch.stack((levels[low], levels[high]), -1).flatten(-2).unflatten(-1, (-1, G))
    return torch.ldexp(values, (exponent.int() - 127)[..., None]).flatten(-2)


def of_words(q: Tensor, scale: Tensor, group: Tensor) -> Tensor:
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    codes = torch.bitwise_right_shift(q.unsqueeze(-2), shifts.unsqueeze(-1)).to(torch.int8) & 15  # at: words
    codes = codes.reshape(*q.shape[:-2], H, H)
    return (scale[..., group.long(), :] * (codes - 8)).transpose(-1, -2)


SPELLINGS = {
    "channel": Spelling(lambda: (torch.randint(-127, 127, (E, H, H), dtype=torch.int8), torch.rand(E, H, 1) / 99), of_channels, "mul"),
    "block": Spelling(lambda: (torch.randn(E, H, H).to(torch.float8_e4m3fn), torch.rand(E, 2, 2)), of_blocks, "repeat_interleave"),
    "split block": Spelling(lambda: (torch.randn(E, H, H).to(torch.float8_e4m3fn), torch.rand(E, 2, 2)), of_split_blocks, "reshape"),
    "floats": Spelling(lambda: (torch.randn(E, H, H), torch.rand(E, 2)), of_scaled_floats, "linear"),
    "nibbles": Spelling(lambda: (_bytes(E, H, H // 2), torch.rand(E, H, H // G), torch.rand(E, H, H // G) * 15), of_nibbles, "bitwise_and"),
    "levels": Spelling(lambda: (_bytes(E, H, H // 2), _bytes(E, H, H // G) // 64 + 125), of_levels, "bitwise_and"),
    "words": Spelling(lambda: (torch.randint(-(2**31), 2**31, (E, H // 8, H), dtype=torch.int32), torch.rand(E, H // G, H)),
                      lambda q, scale: of_words(q, scale, torch.arange(H) // G), "bitwise_right_shift"),
}  # fmt: skip


class Layer(nn.Module):
    """``plain``: the weights are unpacked when the layer is made, not when it runs."""

    def __init__(self, spelling: str, *, plain: bool = False) -> None:
        super().__init__()
        self.gate, self.unpack = nn.Linear(H, E, bias=False), SPELLINGS[spelling].weight
        self.parts = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in SPELLINGS[spelling].store())
        self.whole = nn.Parameter(self.unpack(*self.parts), requires_grad=False) if plain else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        return ids, weights

    def weight(self, of: int | Tensor) -> Tensor:
        return self.unpack(*(part[of] for part in self.parts)) if self.whole is None else self.whole[of]


class Each(Layer):
    """Every expert's weight is unpacked when it runs."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(x[tok], self.weight(e)).tanh() * weights[tok, slot, None])
        return out


class Hit(Layer):
    """Only experts with tokens run."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for hit in (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero():
            tok, slot = torch.where(ids == hit[0])
            out.index_add_(0, tok, F.linear(x[tok], self.weight(hit[0])).tanh() * weights[tok, slot, None])
        return out


class Gated(nn.Module):
    """Experts of two projections, the first with a gate; ``hit``: only those with tokens run."""

    def __init__(self, spelling: str, *, hit: bool = False) -> None:
        super().__init__()
        self.hit, self.router = hit, nn.Linear(H, E, bias=False)
        self.gate, self.up, self.down = (Layer(spelling) for _ in range(3))

    def expert(self, e: int | Tensor, x: Tensor) -> Tensor:
        gate, up, down = (part.weight(e) for part in (self.gate, self.up, self.down))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E) if not self.hit else (F.one_hot(ids, E).sum((0, 1)) > 0).nonzero():
            of = e if isinstance(e, int) else e[0]
            tok, slot = torch.where(ids == of)
            out.index_add_(0, tok, self.expert(of, x[tok]) * weights[tok, slot, None])
        return out


class Gathered(Layer):
    """What is unpacked is what the slots chose."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        y = torch.einsum("th,tkoh->tko", x, self.weight(ids)).tanh()
        return (y * weights[..., None]).sum(1)


class Assigned(nn.Module):
    """Nibbles that are written into the halves of an empty tensor: no operation on it has the packed weights among its arguments."""

    def __init__(self, *, tokens: int) -> None:
        super().__init__()
        self.gate, self.tokens = nn.Linear(H, E, bias=False), tokens
        self.packed = nn.ParameterList(nn.Parameter(_bytes(H // 2, H), requires_grad=False) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        x = x[: self.tokens]
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            weight = torch.empty(H, H)
            weight[: H // 2] = self.packed[e] >> 4
            weight[H // 2 :] = self.packed[e] & 15
            out.index_add_(0, tok, F.linear(x[tok], (weight - 7.5) * 0.1).tanh() * weights[tok, slot, None])
        return out


def by_ids(rows: Tensor, weights: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """What a library's kernel computes that takes the ids of experts."""
    return torch.einsum("sh,soh->so", rows, (weights.float() * scale)[ids])


def by_ends(rows: Tensor, weights: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
    """What a library's kernel computes that takes rows sorted by expert."""
    expert = torch.searchsorted(ends, torch.arange(len(rows)), right=True)
    return by_ids(rows, weights, scale, expert)


_NAME = "kernels_0a1b2c::w8a8_block_dynamic_matmul"
_KERNELS = {kernel: torch.library.custom_op(f"{_NAME}_{kernel.__name__}", kernel, mutates_args=()) for kernel in (by_ids, by_ends)}
for _op in _KERNELS.values():
    _op.register_fake(lambda rows, weights, _scale, _of: rows.new_empty(len(rows), weights.shape[1]))


class Batched(Layer):
    """An operator of a library multiplies each slot's row by the weight that its id says."""

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__("channel")
        self.product = by_ids if plain else _KERNELS[by_ids]

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        y = self.product(x.repeat_interleave(K, 0), *self.parts, ids.flatten()).tanh()
        return (y * weights.reshape(-1, 1)).view(-1, K, H).sum(1)


class Grouped(Layer):
    """An operator of a library multiplies rows that are sorted by expert."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        ordered, order = ids.flatten().sort()
        ends = torch.histc(ordered.float(), bins=E, min=0, max=E - 1).cumsum(0).int()
        y = _KERNELS[by_ends](x[order // K], *self.parts, ends).tanh()
        return torch.zeros_like(x).index_add(0, order // K, y * weights.flatten()[order, None])


class Pruned(nn.Module):
    """Weights of which a mask in bytes leaves some: they are held as what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E, bias=False)
        self.dense = nn.ParameterList(nn.Parameter(torch.randn(H, H) / 4) for _ in range(E))
        self.kept = nn.ParameterList(nn.Parameter(torch.randint(2, (H, H), dtype=torch.uint8), requires_grad=False) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        x = x[:2]
        weights, ids = torch.topk(self.gate(x).softmax(-1), K, dim=-1)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, F.linear(x[tok], self.dense[e] * self.kept[e]).tanh() * weights[tok, slot, None])
        return out


class Embedded(nn.Module):
    """Tokens out of an embedding of few bits: no weights of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(_bytes(99, H), requires_grad=False), nn.Parameter(torch.rand(99, 1) / 99)
        self.layer = Each("channel", plain=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.table[tokens].float() * self.scale[tokens])  # type: ignore[no-any-return]


class Between(nn.Module):
    """Projections of few bits, which an operator of a library multiplies, in front of and behind a layer of plain experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Each("channel", plain=True)
        self.q = nn.ParameterList(
            nn.Parameter(torch.randint(-127, 127, (1, H, H), dtype=torch.int8), requires_grad=False) for _ in range(6)
        )
        self.scale = nn.Parameter(torch.rand(1, H, 1) / 99)

    def forward(self, x: Tensor) -> Tensor:
        one = torch.zeros(len(x), dtype=torch.int64)
        for q in self.q[:3]:
            x = _KERNELS[by_ids](x, q, self.scale, one)
        x = self.layer(x)
        for q in self.q[3:]:
            x = _KERNELS[by_ids](x, q, self.scale, one)
        return x


class Restored(Each):
    """Each expert's storage is put back, or changed, as soon as its weight is unpacked, as libraries do that hold it in two places."""

    def __init__(self, write: Literal["set", "change"]) -> None:
        super().__init__("channel")
        codes = list(self.parts[0])
        self.write = write
        self.codes = nn.ParameterList(nn.Parameter(q.clone(), requires_grad=False) for q in codes)
        self.held = nn.ParameterList(nn.Parameter(torch.zeros_like(q), requires_grad=False) for q in codes)

    def weight(self, of: int | Tensor) -> Tensor:
        assert isinstance(of, int)
        weight = self.codes[of].float() * self.parts[1][of]
        if self.write == "set":
            self.held[of].data = self.codes[of]
        else:
            self.codes[of].bitwise_xor_(1)
        return weight


LOADED: list[str] = []
"""What was loaded, and when, where a test asks."""


@torch._dynamo.allow_in_graph  # type: ignore[untyped-decorator]
def load_kernel() -> None:
    """Libraries fetch a kernel when a layer first runs, in a node of the graph that gives nothing."""
    LOADED.append("kernel")


class Loading(Layer):
    """Kernels are loaded for a layer of an operator's, and for one that computes with plain weights."""

    def __init__(self) -> None:
        super().__init__("channel")
        self.foreign, self.plain = Batched(), Each("channel", plain=True)

    def forward(self, x: Tensor) -> Tensor:
        load_kernel()
        x = self.foreign(x)
        load_kernel()
        return self.plain(x)  # type: ignore[no-any-return]


class Drafting(nn.Module):
    """The best word goes through three projections of few bits: what was chosen by scores is no expert."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, H), nn.Linear(H, 40)
        self.q = nn.ParameterList(nn.Parameter(_bytes(H, H // 2), requires_grad=False) for _ in range(3))
        self.scale, self.zero = nn.Parameter(torch.rand(H, H // G) / 9), nn.Parameter(torch.rand(H, H // G) * 15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(self.head(x).topk(5, -1).indices[:, 0])
        for q in self.q:
            x = F.linear(x, of_nibbles(q, self.scale, self.zero)).tanh()
        return self.head(x)


class Other(Each):
    """Weights that are read, and an operation behind them that is not."""

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.route(x)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, torch.digamma(F.linear(x[tok], self.weight(e)).abs() + 1) * weights[tok, slot, None])
        return out
