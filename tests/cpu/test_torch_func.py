"""torch.func inside a compiled function: the layers that it transforms are left alone, each with a reason; the others are fused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from tests.cpu.capture_case import Seen, capturing

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

E, H, I, T = 4, 8, 12, 6  # noqa: E741


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(H, E)
        self.up, self.down = nn.Parameter(torch.randn(E, I, H) / 3), nn.Parameter(torch.randn(E, H, I) / 3)

    def expert(self, e: int, x: Tensor) -> Tensor:
        return F.linear(F.silu(F.linear(x, self.up[e])), self.down[e])


class Dense(Layer):
    """Every expert on every token."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            out = out + self.expert(e, x) * (weights * (ids == e)).sum(-1, keepdim=True)
        return out


class Loop(Layer):
    """Every expert on its tokens: only capture gets this into one graph."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for e in range(E):
            tok, slot = torch.where(ids == e)
            out.index_add_(0, tok, self.expert(e, x[tok]) * weights[tok, slot, None])
        return out


def score(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x).square().sum()


def dual(layer: nn.Module, x: Tensor) -> Any:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))))


INSIDE: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda layer, x: torch.func.grad(score(layer))(x),
    "grad of grad": lambda layer, x: torch.func.grad(lambda z: torch.func.grad(score(layer))(z).sum())(x),
    "vjp": lambda layer, x: torch.func.vjp(layer, x)[1](torch.ones_like(x)),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (torch.ones_like(x),)),
    "dual": dual,
    "vmap": lambda layer, x: torch.func.vmap(layer)(x.view(2, 3, H)),
    "vmap of rows": lambda layer, x: torch.func.vmap(lambda row: layer(row[None])[0])(x),
    "vmap of others": lambda layer, x: torch.func.vmap(lambda row: layer(x) + row)(x),
    "jacobian": lambda layer, x: torch.func.jacrev(layer)(x[:2]),
    "checkpoint in vmap": lambda layer, x: torch.func.vmap(lambda rows: checkpoint(layer, rows, use_reentrant=False))(x.view(2, 3, H)),
}


NO_BACKWARD = ("dual", "checkpoint in vmap")
"""What torch itself does not differentiate once more."""


def both(kind: type[Layer], name: str) -> Seen:
    """An ordinary call beside one that is transformed: values and gradients are those of eager."""
    torch.manual_seed(0)
    plain, transformed, x = kind(), kind(), torch.randn(T, H)
    expected_plain, expected_transformed = copy.deepcopy((plain, transformed))
    inside, seen = INSIDE[name], Seen()

    def program(plain: nn.Module, transformed: nn.Module, x: Tensor) -> Any:
        return plain(x), inside(transformed, x)

    got = tree_leaves(torch.compile(program, backend=capturing(seen))(plain, transformed, x))
    expected = tree_leaves(program(expected_plain, expected_transformed, x))
    torch.testing.assert_close(got, expected)
    if name in NO_BACKWARD:
        return seen
    for results in (got, expected):
        torch.autograd.backward([r.square().sum() for r in results if r.requires_grad])
    for ours, theirs in ((plain, expected_plain), (transformed, expected_transformed)):
        for (key, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=lambda m, key=key: f"gradient of {key}: {m}")
    return seen


OLD = TorchVersion(torch.__version__) < (2, 13)
NO_VMAP = pytest.mark.skipif(OLD, reason="checkpoint has no rule for vmap before torch 2.13")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("inside", [pytest.param(name, marks=NO_VMAP) if name == "checkpoint in vmap" else name for name in INSIDE])
def test_of_one_graph(inside: str) -> None:
    """One graph: what torch.func transforms is refused at its own statement, what it does not is fused."""
    seen = both(Dense, inside)
    assert len(seen.graphs) == 1
    assert len(seen.report.fused) == 1
    assert [s.code for s in seen.report.skipped] == ["transformed"], seen.report
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.strip().startswith("out = out + self.expert")
    )
    assert seen.report.skipped[0].location == f"{__file__}:{line}"


@pytest.mark.skipif(OLD, reason="before torch 2.13, Dynamo leaves this loop to eager before it reaches a compiler")
def test_of_a_captured_loop() -> None:
    """The frame is traced again without capture, and Dynamo gives up on it before there is a graph: it is reported all the same."""
    seen = both(Loop, "grad")
    assert len(seen.report.fused) == 1
    assert {s.code for s in seen.report.skipped} == {"transformed"}, seen.report


def test_before_and_behind() -> None:
    """Only operations between the beginning and the end of a level are inside it."""
    torch.manual_seed(0)
    layers, x, seen = [Dense() for _ in range(3)], torch.randn(T, H), Seen()

    def program(first: nn.Module, second: nn.Module, third: nn.Module, x: Tensor) -> Tensor:
        return third(torch.func.grad(score(second))(first(x)))

    got = torch.compile(program, backend=capturing(seen))(*layers, x)
    torch.testing.assert_close(got, program(*layers, x))
    assert len(seen.report.fused) == 2
    assert [s.code for s in seen.report.skipped] == ["transformed"]


class Skipping(Loop):
    """A loop that capture makes one graph, beside something that torch.func differentiates in the same graph."""

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda v: (v * v).sin().sum())(x)
        return super().forward(x) + slope


@pytest.mark.skipif(OLD, reason="before torch 2.13, Dynamo leaves torch.func beside such a loop to eager")
def test_beside_a_captured_loop() -> None:
    """What is dead of the loop is erased, and no step of torch.func, of which some return nothing that is read."""
    torch.manual_seed(0)
    layer, x, seen = Skipping(), torch.randn(T, H), Seen()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(layer, backend=capturing(seen))(x), layer(x))
    assert len(seen.report.fused) == 1
