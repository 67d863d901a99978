"""The program around quantised experts: which rows the experts run on, and where in it their weights are unpacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.programs.packed import of_blocks, of_channels, of_levels, of_nibbles

H, WIDE, E, K, G = 16, 24, 8, 2, 8
Domain = Literal["loop", "masked", "slots", "bmm", "bmm_left", "matmul", "sorted", "grouped", "dense", "bmm_dense"]
WHOLE: tuple[Domain, ...] = ("loop", "masked", "slots", "bmm", "bmm_left", "matmul", "sorted", "grouped", "dense", "bmm_dense")
GATHERED: tuple[Domain, ...] = ("slots", "bmm", "bmm_left", "matmul", "sorted")
Unpack = Callable[..., Tensor]


@dataclass(frozen=True)
class Held:
    """``store`` makes what holds the weights [E, n, k] of all experts, ``weight`` those of any part of it."""

    store: Callable[[int, int], tuple[Tensor, ...]]
    weight: Unpack


def _bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


HELD = {
    "channel": Held(lambda n, k: (torch.randint(-127, 127, (E, n, k), dtype=torch.int8), torch.rand(E, n, 1) / 99), of_channels),
    "block": Held(lambda n, k: (torch.randn(E, n, k).to(torch.float8_e4m3fn), torch.rand(E, n // G, k // G)), of_blocks),
    "nibbles": Held(lambda n, k: (_bytes(E, n, k // 2), torch.rand(E, n, k // G) / 9, torch.rand(E, n, k // G) * 15), of_nibbles),
    "levels": Held(lambda n, k: (_bytes(E, n, k // 2), _bytes(E, n, k // G) // 64 + 122), of_levels),
}


class Packed(nn.Module):
    """One projection of all experts."""

    def __init__(self, held: str, n: int, k: int) -> None:
        super().__init__()
        self.unpack = HELD[held].weight
        self.parts = nn.ParameterList(nn.Parameter(part, requires_grad=False) for part in HELD[held].store(n, k))

    def whole(self) -> Tensor:
        return self.unpack(*self.parts)

    def of(self, index: int | Tensor) -> Tensor:
        """Of one expert, or of each slot."""
        return self.unpack(*(part[index] for part in self.parts))


class Form(nn.Module):
    """Experts of two projections, the first with a gate; ``whole``: stacks are unpacked as a whole, else what is used of them."""

    def __init__(self, held: str, domain: Domain, *, whole: bool) -> None:
        super().__init__()
        self.domain, self.router, self.experts, self.dtype = domain, nn.Linear(H, E, bias=False), E, torch.float32
        self.gate, self.up, self.down = Packed(held, WIDE, H), Packed(held, WIDE, H), Packed(held, H, WIDE)
        self.all = whole
        if domain == "grouped":
            import transformers.integrations.moe  # noqa: F401  (registers the op, which a compiled function cannot)

    def between(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def stacks(self) -> list[Tensor]:
        return [p.whole() for p in (self.gate, self.up, self.down)]

    def weights(self) -> list[Callable[[int | Tensor], Tensor]]:
        if not self.all:
            return [self.gate.of, self.up.of, self.down.of]
        return [w.__getitem__ for w in self.stacks()]

    def body(self, product: Callable[[Tensor, Tensor], Tensor], x: Tensor, index: int | Tensor | slice) -> Tensor:
        gate, up, down = (weight(index) for weight in self.weights())  # type: ignore[arg-type]
        return product(self.between(product(x, gate), product(x, up)), down)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.router(x).softmax(-1), K, dim=-1)
        return _DOMAINS[self.domain](self, x.to(self.dtype), ids, weights.to(self.dtype))


def _loop(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, (gate, up, down) = torch.zeros_like(x), form.weights()
    for e in range(form.experts):
        tok, slot = torch.where(ids == e)
        rows = x[tok]
        y = F.linear(form.between(F.linear(rows, gate(e)), F.linear(rows, up(e))), down(e))
        out.index_add_(0, tok, y * weights[tok, slot, None])
    return out


def _masked(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    out, (gate, up, down) = torch.zeros_like(x), form.weights()
    for e in range(form.experts):
        y = F.linear(form.between(F.linear(x, gate(e)), F.linear(x, up(e))), down(e))
        out = out + y * ((ids == e) * weights).sum(-1, keepdim=True)
    return out


def _slots(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up, down = (weight(ids) for weight in form.weights())
    y = form.between(torch.einsum("th,tkoh->tko", x, gate), torch.einsum("th,tkoh->tko", x, up))
    return (torch.einsum("tki,tkoi->tko", y, down) * weights[..., None]).sum(1)


def _bmm(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = form.body(lambda rows, w: torch.bmm(rows, w.transpose(1, 2)), x.repeat_interleave(K, 0)[:, None], ids.reshape(-1))
    return (y[:, 0] * weights.reshape(-1, 1)).view(-1, K, x.shape[1]).sum(1)


def _bmm_left(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = form.body(lambda rows, w: torch.bmm(w, rows), x.repeat_interleave(K, 0)[:, :, None], ids.reshape(-1))
    return (y[:, :, 0] * weights.reshape(-1, 1)).view(-1, K, x.shape[1]).sum(1)


def _matmul(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    y = form.body(lambda rows, w: torch.matmul(w, rows), x[:, None, :, None].expand(-1, K, -1, -1), ids)
    return (y.squeeze(-1) * weights[..., None]).sum(1)


def _order(ids: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.reshape(-1).argsort(stable=True)
    return order, ids.reshape(-1)[order]


def _added(x: Tensor, order: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, order // K, y * weights.reshape(-1)[order, None])


def _sorted(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order, expert = _order(ids)
    y = form.body(lambda rows, w: torch.einsum("sh,soh->so", rows, w), x[order // K], expert)
    return _added(x, order, y, weights)


def _grouped(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    order, _ = _order(ids)
    ends = torch.histc(ids.reshape(-1).float(), form.experts, 0, form.experts - 1).cumsum(0).int()

    def product(rows: Tensor, w: Tensor) -> Tensor:
        found: Tensor = torch.ops.transformers.grouped_mm_fallback(rows, w.transpose(1, 2), offs=ends)
        return found

    return _added(x, order, form.body(product, x[order // K], slice(None)), weights)


def _dense(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up, down = form.stacks()
    y = form.between(torch.einsum("th,eoh->teo", x, gate), torch.einsum("th,eoh->teo", x, up))
    table = torch.zeros(len(x), form.experts, dtype=weights.dtype).scatter(1, ids, weights)
    return (torch.einsum("tei,eoi->teo", y, down) * table[..., None]).sum(1)


def _bmm_dense(form: Form, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up, down = (w.transpose(1, 2) for w in form.stacks())
    rows = x[None].expand(form.experts, -1, -1)
    y = torch.bmm(form.between(torch.bmm(rows, gate), torch.bmm(rows, up)), down)
    table = torch.zeros(len(x), form.experts, dtype=weights.dtype).scatter(1, ids, weights)
    return (y * table.t()[..., None]).sum(0)


_DOMAINS: dict[str, Callable[[Form, Tensor, Tensor, Tensor], Tensor]] = {
    "loop": _loop, "masked": _masked, "slots": _slots, "bmm": _bmm, "bmm_left": _bmm_left, "matmul": _matmul, "sorted": _sorted,
    "grouped": _grouped, "dense": _dense, "bmm_dense": _bmm_dense,
}  # fmt: skip
