"""Functions whose backward pass multiplies by something else than forward, though on the model's numbers it may be the same today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import moefuse

H, M, E = 32, 16, 4
Weight = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def affine(q: Tensor, s: Tensor, q2: Tensor, s2: Tensor, z: Tensor) -> Tensor:
    """Codes less zeros, times scales."""
    return (q - z) * s


OTHERS: dict[str, Weight] = {
    "a copy of the codes": lambda q, s, q2, s2, z: (q2 - z) * s,
    "a copy of the scales": lambda q, s, q2, s2, z: (q - z) * s2,
    "no zeros, which are 0": lambda q, s, q2, s2, z: q * s,
    "scales without sign, which have none": lambda q, s, q2, s2, z: (q - z) * s.abs(),
    "codes within what they are": lambda q, s, q2, s2, z: (q.clamp(-100, 100) - z) * s,
    "all codes but the lowest": lambda q, s, q2, s2, z: (q.clamp(min=-127) - z) * s,
    "a thousandth more": lambda q, s, q2, s2, z: (q - z) * (s * 1.001),
}
SAME: dict[str, Weight] = {"the same": affine, "the same in other words": lambda q, s, q2, s2, z: torch.mul(torch.sub(q, z), s)}


def function(backward_weight: Weight) -> type[torch.autograd.Function]:
    """Rows times a weight, and the gradient with another one."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, q: Tensor, s: Tensor, q2: Tensor, s2: Tensor, z: Tensor) -> Tensor:
            ctx.save_for_backward(q, s, q2, s2, z)
            return x @ affine(q.float(), s, q2.float(), s2, z).t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            q, s, q2, s2, z = ctx.saved_tensors
            return grad @ backward_weight(q.float(), s, q2.float(), s2, z), None, None, None, None, None

    return Product


class Linear(nn.Module):
    """int8, and a scale and a zero for each feature."""

    def __init__(self, n: int, k: int, of: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.of = of
        q, s = torch.randint(-100, 101, (n, k), dtype=torch.int8), (torch.rand(n, 1) + 0.5) * 0.004
        for name, t in {"q": q, "s": s, "q2": q.clone(), "s2": s.clone(), "z": torch.zeros(n, 1)}.items():
            self.register_buffer(name, t)

    def forward(self, x: Tensor) -> Tensor:
        return self.of.apply(x, self.q, self.s, self.q2, self.s2, self.z)  # type: ignore[no-any-return, no-untyped-call]


class Experts(nn.Module):
    """A loop over all experts."""

    def __init__(self, of: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.router = nn.Linear(H, E, bias=False)
        self.experts = nn.ModuleList(nn.ModuleList([Linear(M, H, of), Linear(M, H, of), Linear(H, M, of)]) for _ in range(E))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.experts):  # type: ignore[misc]
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, down(F.silu(gate(x[tok])) * up(x[tok])) * weights[tok, slot, None])
        return out

    @torch.no_grad()
    def requantise(self) -> None:
        """Other codes, all of them, scales of both signs, and zeros that are none, in place."""
        for name, t in self.named_buffers():
            if name.endswith(".q"):
                t.copy_(torch.randint(-128, 128, t.shape))
            elif name.endswith(".s"):
                t[::2] *= -1.5
            elif name.endswith(".z"):
                t += 3


def step(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = run(x)
    (out * torch.linspace(-1, 2, out.numel()).view_as(out)).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*SAME, *OTHERS])
def test_gradients_are_the_programs(name: str, fresh_dynamo: None) -> None:
    """In the first call, and after everything that the weights are made of has changed; only the same is fused."""
    torch.manual_seed(0)
    model = Experts(function(SAME.get(name) or OTHERS[name]))
    compiled = torch.compile(model, backend="moefuse")
    x = torch.randn(7, H)
    for _ in range(2):
        for got, wanted in zip(step(compiled, x), step(model, x), strict=True):
            assert (got - wanted).norm() <= 2e-6 * wanted.norm()
        model.requantise()
    report = moefuse.last_report()
    assert report is not None
    if name in SAME:
        assert len(report.fused) == 1
        assert not report.skipped
    else:
        assert not report.fused
        assert "the backward pass of the program's own function" in report.skipped[0].message
