"""Whether a configuration computes what the op means: a sample of tokens in float64, and what the reference makes of it in its dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.tune.call import Call
from moefuse.ops.meaning.reference import experts_reference

SAMPLE = 16
ALLOWED = 1.1
ROUNDINGS = 4
"""A result is right if its error is at most ALLOWED times the reference's own, plus ROUNDINGS roundings of the result's size."""


class Truth:
    """Expected values of a sample of tokens of a call's first routing. Computed once, for all configurations of the call."""

    def __init__(self, call: Call) -> None:
        x, ids, weights = call.sets[0]
        tokens = call.problem.tokens
        self.rows = torch.arange(0, tokens, max(tokens // SAMPLE, 1), device=x.device)[:SAMPLE]
        body, out_dtype = call.kind.body(call.problem), call.kind.out(call.problem)
        options = {
            "activation": body.activation,
            "activation_args": body.args,
            "gating": body.gating,
            "up_first": body.up_first,
            "weight_on_input": body.on_input,
        }
        sample = x[self.rows], ids[self.rows], weights[self.rows]
        self.exact = torch.zeros((len(self.rows), call.problem.out), dtype=torch.float64, device=x.device)
        own = torch.zeros_like(self.exact)
        # One expert at a time: all of them in float64 would be four copies of the layer.
        for e in sample[1].unique().tolist():
            lists = [_one(tensors, e) for tensors in call.lists]
            alone = torch.where(sample[1] == e, 0, -1)
            wide = [[t.double() for t in tensors] for tensors in lists]
            self.exact += experts_reference(sample[0].double(), alone, sample[2].double(), *wide, **options)  # type: ignore[arg-type]
            own += experts_reference(sample[0], alone, sample[2], *lists, **options, out_dtype=_wide(x.dtype))  # type: ignore[arg-type]
        self.size = _rms(self.exact)
        self.eps = max(torch.finfo(out_dtype).eps, torch.finfo(x.dtype).eps)
        self.allowed = ALLOWED * _rms(own.to(out_dtype).double() - self.exact) + ROUNDINGS * self.eps * self.size

    def problem(self, out: Tensor) -> str:
        """Why ``out`` [T, N] is wrong, or an empty text."""
        got = out[self.rows].double()
        if not bool(torch.isfinite(out).all()):
            return "the result is not finite"
        error = _rms(got - self.exact)
        return "" if error <= self.allowed else f"error {error:.3g} where {self.allowed:.3g} is allowed"


def _one(tensors: Sequence[Tensor], e: int) -> list[Tensor]:
    """The list with expert ``e`` alone."""
    if not tensors:
        return []
    return [tensors[0][e : e + 1]] if len(tensors) == 1 else [tensors[e].unsqueeze(0)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rms(t: Tensor) -> float:
    return float(t.square().mean().sqrt()) if t.numel() else 0.0
