"""Random calls of ``moefuse::experts`` for the op tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import moefuse.ops  # noqa: F401  (registers torch.ops.moefuse)
from moefuse.ops import ACTIVATIONS, experts_reference
from moefuse.ops.meaning.call import ExpertsCall

ARGS = {"swiglu_oai": [1.7, 0.6], "silu_clamp": [0.6]}
GATED = ("merged", "interleaved", "separate")


@dataclass(frozen=True)
class Case:
    """Sizes and options of one call; :meth:`args` draws its tensors."""

    tokens: int = 5
    hidden: int = 6
    inter: int = 4
    experts: int = 3
    top_k: int = 2
    hidden_out: int = 7
    gating: str = "merged"
    activation: str = "silu"
    up_first: bool = False
    weight_on_input: bool = False
    separate: bool = False
    transposed: bool = False
    bias: bool = True
    dtype: torch.dtype = torch.float64
    low_id: int = -1
    high_id: int | None = None
    seed: int = 0
    out_dtype: torch.dtype | None = None
    held: torch.dtype | None = None
    """Of weights and biases, where it is not ``dtype``."""
    more: dict[str, Any] = field(default_factory=dict)

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "activation": self.activation,
            "activation_args": ARGS.get(self.activation, []),
            "gating": self.gating,
            "up_first": self.up_first,
            "weight_on_input": self.weight_on_input,
            "out_dtype": self.out_dtype,
        }

    def call(self, args: list[Any] | None = None) -> ExpertsCall:
        """What a provider is given; of other tensors if there are ``args``."""
        return ExpertsCall.of(*(self.args() if args is None else args), **self.options)

    def args(self, requires_grad: bool = False) -> list[Any]:
        g = torch.Generator().manual_seed(self.seed)

        def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = self.dtype) -> Tensor:
            return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

        held = self.held or self.dtype

        def weight(out: int, inp: int) -> list[Tensor]:
            scale = max(inp, 1) ** -0.5
            if self.separate:
                return [draw(out, inp, scale=scale, dtype=held) for _ in range(self.experts)]
            if self.transposed:
                return [draw(self.experts, inp, out, scale=scale, dtype=held).transpose(1, 2)]
            return [draw(self.experts, out, inp, scale=scale, dtype=held)]

        def bias(out: int) -> list[Tensor]:
            if not self.bias:
                return []
            return [draw(out, dtype=held) for _ in range(self.experts)] if self.separate else [draw(self.experts, out, dtype=held)]

        high = self.experts + 1 if self.high_id is None else self.high_id
        ids = torch.randint(self.low_id, high, (self.tokens, self.top_k), generator=g)
        width = 2 * self.inter if self.gating in ("merged", "interleaved") else self.inter
        apart = self.gating == "separate"
        args = [draw(self.tokens, self.hidden), ids, draw(self.tokens, self.top_k)]
        args += [weight(width, self.hidden), weight(self.inter, self.hidden) if apart else [], weight(self.hidden_out, self.inter)]
        args += [bias(width), bias(self.inter) if apart else [], bias(self.hidden_out)]
        if requires_grad:
            for t in leaves(args):
                t.requires_grad_()
        return args


def tensors(args: list[Any]) -> list[Tensor]:
    """All tensors of a call, lists opened."""
    out: list[Tensor] = []
    for a in args:
        out += a if isinstance(a, list) else [a]
    return out


def leaves(args: list[Any]) -> list[Tensor]:
    """The tensors of a call that can have a gradient."""
    return [t for t in tensors(args) if t.is_floating_point()]


def to(args: list[Any], dtype: torch.dtype) -> list[Any]:
    """The same call in another dtype (ids stay)."""
    return [[t.to(dtype) for t in a] if isinstance(a, list) else a.to(dtype) if a.is_floating_point() else a for a in args]


def run(args: list[Any], **options: Any) -> Tensor:
    out: Tensor = torch.ops.moefuse.experts(*args, **options)
    return out


def reference(args: list[Any], **options: Any) -> Tensor:
    return experts_reference(*args, **options)


ROUNDINGS = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 4, torch.float64: 64}
"""Of the largest value. A 16-bit result is a sum in float32, rounded once; sums in float32 have an order; nothing is wider than float64."""


def assert_as_exact(ours: Tensor, theirs: Tensor, exact: Tensor, dtype: torch.dtype | None = None) -> None:
    """``ours`` is as far from ``exact`` (in float64) as ``theirs`` is: at most twice as far, and :data:`ROUNDINGS`.

    ``dtype``: the one that is computed in, where the result is wider.
    """
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert exact.dtype == torch.float64
    if exact.numel() == 0:
        return
    ours, theirs, exact = ours.detach(), theirs.detach(), exact.detach()
    error, allowed = (float((value.double() - exact).abs().max()) for value in (ours, theirs))
    dtype = dtype or ours.dtype
    limit = 2 * allowed + ROUNDINGS[dtype] * torch.finfo(dtype).eps * float(exact.abs().max())
    assert error <= limit, f"error {error:.3g} against float64, the reference's is {allowed:.3g}, limit {limit:.3g}"


def oracle_grads(out: Tensor, inputs: list[Tensor], pull: Tensor) -> list[Tensor]:
    """Gradients of the reference; zeros where its graph does not reach (no slots)."""
    grads = torch.autograd.grad(out, inputs, pull, allow_unused=True) if out.requires_grad else [None] * len(inputs)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, grads, strict=True)]


def every_body() -> list[Case]:
    """Every activation with every gating it allows, and both orders."""
    cases = []
    for name, act in ACTIVATIONS.items():
        for gating in GATED if act.needs_gate else (*GATED, "plain"):
            cases.append(Case(activation=name, gating=gating))
            if gating in ("merged", "interleaved"):
                cases.append(Case(activation=name, gating=gating, up_first=True))
    return cases


def not_finite(out: Tensor, value: float) -> Tensor:
    """A gradient of the result with one token's row that is not finite, as a loss that overflows gives it."""
    pull = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    pull[1] = value
    return pull


def assert_equally_finite(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    """Gradients are finite in the same places, and equal there; and not everything else is lost."""
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a.isfinite(), b.isfinite()), (
            f"gradient {i}: {int((~a.isfinite()).sum())} not finite, not {int((~b.isfinite()).sum())}"
        )
        torch.testing.assert_close(a[a.isfinite()], b[b.isfinite()], **tolerance)
    assert not all(b.isfinite().all() for b in theirs)
