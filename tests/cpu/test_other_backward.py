"""Functions whose backward pass multiplies by something else than forward, though on the model's numbers it may be the same today."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import moefuse
from tests.cpu.test_fp8_operators import Compiled
from tests.programs.own_products import MORE, STEPS_OF_BACKWARD, Step

H, M, E = 32, 16, 3
EXAMPLES = 3 if settings().max_examples < 100 else 400
PLACES = ("codes", "scales", "zeros", "weight", "gradient", "gradient of rows")
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
    "none of the smallest": lambda q, s, q2, s2, z: torch.where(affine(q, s, q2, s2, z).abs() < 1e-9, 0.0, affine(q, s, q2, s2, z)),
    "none of the largest": lambda q, s, q2, s2, z: affine(q, s, q2, s2, z).clamp(-1e9, 1e9),
    "a mask": lambda q, s, q2, s2, z: affine(q, s, q2, s2, z) * (s < 1e9),
    "the least of two": lambda q, s, q2, s2, z: (q - z) * torch.minimum(s, torch.full_like(s, 1e9)),
    "scales on a fine grid": lambda q, s, q2, s2, z: (q - z) * ((s * 2.0**40).round() * 2.0**-40),
}
SAME: dict[str, Weight] = {
    "the same": affine,
    "the same in other words": lambda q, s, q2, s2, z: torch.mul(torch.sub(q, z), s),
    "the same turned": lambda q, s, q2, s2, z: ((q.t() - z.t()) * s.t().contiguous()).t(),
    "the same in pieces": lambda q, s, q2, s2, z: torch.cat([(q[:8] - z[:8]) * s[:8], (q[8:] - z[8:]) * s[8:]]),
}


def function(
    backward_weight: Weight, of_gradient: Step = lambda grad: grad, of_rows: Step = lambda grad: grad
) -> type[torch.autograd.Function]:
    """Rows times a weight, and the gradient with another one, and steps before and behind."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, q: Tensor, s: Tensor, q2: Tensor, s2: Tensor, z: Tensor) -> Tensor:
            ctx.save_for_backward(q, s, q2, s2, z)
            return x @ affine(q.float(), s, q2.float(), s2, z).t()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            q, s, q2, s2, z = ctx.saved_tensors
            weight = backward_weight(q.float(), s, q2.float(), s2, z)
            return of_rows(of_gradient(grad) @ weight), None, None, None, None, None

    return Product


@pytest.fixture(autouse=True)
def _fresh(fresh_dynamo: None) -> None:
    pass


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
@pytest.mark.usefixtures("no_code")
@pytest.mark.parametrize("name", [*SAME, *OTHERS])
def test_gradients_are_the_programs(name: str) -> None:
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


def stepped(place: str, step: Step) -> type[torch.autograd.Function]:
    """With a step more at one place of the backward pass."""

    def at(here: str) -> Step:
        return step if here == place else lambda x: x

    def weight(q: Tensor, s: Tensor, q2: Tensor, s2: Tensor, z: Tensor) -> Tensor:
        return at("weight")((at("codes")(q) - at("zeros")(z)) * at("scales")(s))

    return function(weight, at("gradient"), at("gradient of rows"))


def compiled_as_its_scales_change(of: type[torch.autograd.Function]) -> Compiled:
    """Results and gradients are the program's, for scales of all sizes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Experts(of)
    compiled, x = Compiled(model), torch.randn(7, H)
    for size in (1.0, 1e12, 1e-9):
        scales = [t for name, t in model.named_buffers() if name.endswith(".s")]
        for scale in scales:
            scale.mul_(size)
        for got, wanted in zip(step(compiled.run, x), step(model, x), strict=True):
            most = float(wanted.nan_to_num(0, 0, 0).abs().max())
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * most, equal_nan=True)
        for scale in scales:
            scale.div_(size)
    return compiled


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(PLACES), st.sampled_from(sorted(MORE)))
def test_another_step_anywhere(place: str, name: str) -> None:
    """Whatever it is: the function stays, or is read as what it is."""
    compiled_as_its_scales_change(stepped(place, MORE[name]))


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(PLACES), st.sampled_from(sorted(STEPS_OF_BACKWARD)))
def test_steps_that_change_nothing(place: str, name: str) -> None:
    """They are read."""
    compiled = compiled_as_its_scales_change(stepped(place, STEPS_OF_BACKWARD[name]))
    assert len(compiled.report.fused) == 1, f"{name} of {place}: {compiled.report}"
