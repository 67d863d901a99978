"""Programs whose floats change between calls: limits, slopes, exponents, scales, temperatures, epsilons.

A float that has changed is an input of the graph to Dynamo, and each operation that takes no tensor for it makes it a number again, which
every later call has to ask for. A program is a layer, what its experts and its routing do with the float, and the values it has.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moefuse import _torch_private
from moefuse._torch_private import inductor
from tests.programs.effects.broken import Broken

H, INNER, E, K = 16, 12, 4, 2

HIDDEN: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "plain": lambda g, u, v: F.silu(g) * u,
    "clamp, one side": lambda g, u, v: F.silu(g.clamp(max=v)) * u,
    "clamp, both": lambda g, u, v: F.silu(g.clamp(max=v)) * u.clamp(-v, v),
    "clamp and product": lambda g, u, v: (u.clamp(-v, v) + 1) * (g.clamp(max=v) * torch.sigmoid(g.clamp(max=v) * v)),
    "alpha": lambda g, u, v: (u + 1) * (g * torch.sigmoid(g * v)),
    "slope": lambda g, u, v: F.leaky_relu(g, v) * u,
    "elu": lambda g, u, v: F.elu(g, v) * u,
    "exponent": lambda g, u, v: F.relu(g).pow(v) * u,
    "product": lambda g, u, v: F.silu(g) * u * v,
    "epsilon": lambda g, u, v: F.silu(g) * F.layer_norm(u, (INNER,), None, None, v),
    "threshold": lambda g, u, v: F.threshold(g, v, 0.0) * u,
    "sum": lambda g, u, v: torch.add(F.silu(g), u, alpha=v),
    "comparison": lambda g, u, v: torch.where(g > v, g, v * u),
    "branch": lambda g, u, v: (F.silu(g) if v > 0.5 else F.gelu(g)) * u,
    "integer": lambda g, u, v: F.silu(g) * u * int(v * 10),
}
"""What an expert does with its two halves and the float."""

AROUND: tuple[str, ...] = ("nothing", "temperature", "weights", "rows", "result", "residual")
"""What else is done with the float."""

VALUES = (1.0, 0.7, 0.3, 1.9, 0.5, 0.05)


@dataclass(frozen=True)
class Floating:
    """A layer: how it runs its experts, what they and the layer do with a float, whether it trains, and the float of each call."""

    spelling: str
    hidden: str
    around: str
    grad: bool
    values: tuple[float, ...]


class Layer(nn.Module):
    """``limit``: the float."""

    def __init__(self, p: Floating) -> None:
        super().__init__()
        self.router, self.p, self.limit = nn.Linear(H, E, bias=False), p, 1.0
        self.up = nn.Parameter(torch.randn(E, H, 2 * INNER) * 0.3)
        self.down = nn.Parameter(torch.randn(E, INNER, H) * 0.3)
        self.hidden = HIDDEN[p.hidden]

    def expert(self, x: Tensor, e: int | Tensor) -> Tensor:
        rows = x @ self.up[e]
        rows = self.hidden(*rows.chunk(2, -1), self.limit) @ self.down[e]
        return rows * self.limit if self.p.around == "rows" else rows

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        weights, ids = (logits / self.limit if self.p.around == "temperature" else logits).softmax(-1).topk(K)
        weights = weights * self.limit if self.p.around == "weights" else weights
        out = self.experts(x, weights, ids)
        if self.p.around == "residual":
            return torch.add(x, out, alpha=self.limit)
        return out * self.limit if self.p.around == "result" else out

    def experts(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if self.p.spelling == "slots":
            rows = self.expert(x.repeat_interleave(K, 0)[:, None], ids.flatten())
            return (rows.view(-1, K, H) * weights[..., None]).sum(1)
        out = torch.zeros_like(x)
        for e in range(E):
            if self.p.spelling == "masked":
                out = out + self.expert(x, e) * ((ids == e) * weights).sum(-1, keepdim=True)
                continue
            token, slot = torch.where(ids == e)
            out.index_add_(0, token, self.expert(x[token], e) * weights[token, slot, None])
        return out


def draw(seed: int) -> Floating:
    """A program out of a number."""
    rng = random.Random(seed)
    values = rng.sample(VALUES, rng.randint(3, 4))
    values.append(rng.choice(values))
    spelling = rng.choice(("loop", "masked", "slots"))
    return Floating(spelling, rng.choice(list(HIDDEN)), rng.choice(AROUND), rng.random() < 0.4, tuple(values))


def wrong(p: Floating, *, code: bool = True) -> list[str]:
    """In which calls a program is other than in eager; ``code``: with Inductor's code and torch's caches of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = Layer(p)
    x = torch.randn(9, H)
    with nullcontext() if code else _without_code(), _quiet():
        compiled = torch.compile(layer, backend="moefuse", options={"verify": "off"})
        pairs = zip(p.values, _calls(compiled, layer, x, p), _calls(layer, layer, x, p), strict=True)
        return [f"call {number} with {value}" for number, (value, a, b) in enumerate(pairs) if not _same(a, b)]


def _calls(run: Callable[[Tensor], Tensor], layer: Layer, x: Tensor, p: Floating) -> Iterator[list[Tensor]]:
    """What each call returns, and its gradients."""
    for value in p.values:
        layer.limit = value
        layer.zero_grad()
        with torch.set_grad_enabled(p.grad):
            out = run(x)
        if p.grad:
            (out * torch.linspace(-1, 1.5, out.numel()).view_as(out)).sum().backward()
        yield [out.detach().clone(), *(torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in layer.parameters())]


def _same(got: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=2e-4, rtol=1e-3) for a, b in zip(got, expected, strict=True))


@contextmanager
def _without_code() -> Iterator[None]:
    from torch._dynamo.backends.debugging import aot_eager_decomp_partition

    with mock.patch.object(_torch_private, "compile_fx", lambda gm, inputs, *_: aot_eager_decomp_partition(gm, inputs)):
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    log = logging.getLogger("moefuse")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


# --- the fault -------------------------------------------------------------------------------------------------------------------

FAULTS: dict[str, Broken] = {"floats that no key has": ((inductor, "compiled_for_their_values", lambda gm: nullcontext()),)}
"""Root causes, as what stands in their place when moefuse is broken."""

SHOWN = {"floats that no key has": Floating("slots", "clamp and product", "nothing", False, (1.0, 0.7, 0.3))}
"""For each fault the smallest program known to show it."""
