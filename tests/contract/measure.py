"""How near is near: errors against float64, beside those of the definition in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.contract.providers import By
from tests.contract.rows import Drawn
from tests.cpu.ops_case import ROUNDINGS, oracle_grads

FEW = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 8, torch.float64: 8}
"""Roundings of the largest value that the order of sums explains on a GPU."""


def right(by: By, out: Tensor, own: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """No value is further from ``exact`` than some times the farthest of ``own``, and a few roundings in ``dtype``."""
    assert (out.shape, out.dtype) == (own.shape, own.dtype)
    assert torch.equal(out.isfinite(), exact.isfinite())
    if not exact.isfinite().all() or not exact.numel():
        return
    error, allowed, largest = (float(t.abs().max()) for t in (out.double() - exact, own.double() - exact, exact))
    kernels = by.interpreted or by.device == "cuda"
    factor = 1.5 if by.device == "cuda" else 2
    floor = FEW[dtype] * max(largest, 1.0) if kernels else ROUNDINGS[dtype] * largest
    limit = factor * allowed + torch.finfo(dtype).eps * floor
    assert error <= limit, f"error {error:.3g} against float64, the definition's is {allowed:.3g}, limit {limit:.3g}"


def pull(out: Tensor) -> Tensor:
    """A gradient of the result."""
    return torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)


def shaken(it: Drawn, seed: int) -> list[Tensor]:
    """The exact gradients of inputs that are one rounding off, each by chance up or down."""
    rounding = torch.finfo(it.dtype).eps * (0.25 if it.dtype.itemsize == 2 else 1.0)
    source = torch.Generator().manual_seed(seed)

    def shake(t: Tensor) -> Tensor:
        return t * (1 + rounding * (torch.randint(0, 2, t.shape, generator=source).to(t) * 2 - 1))

    args = it.copied(torch.float64)
    for leaf in it.leaves(args):
        leaf.copy_(shake(leaf)).requires_grad_()
    out = it.meaning(args)
    return [out.detach(), *oracle_grads(out, it.leaves(args), shake(pull(out.detach().to(it.dtype)).double()))]


def results(function: object, args: list[object], it: Drawn) -> list[Tensor]:
    """The result, and the gradient of everything that has one."""
    out = function(args)  # type: ignore[operator]
    given = pull(out.detach().to(it.dtype)).to(out.dtype)
    return [out.detach(), *oracle_grads(out, it.leaves(args), given)]


def gradients_right(by: By, ours: list[Tensor], it: Drawn) -> None:
    """As norms: within 1.5 times (in 16 bits and on a GPU) the error of autograd's own in the same dtype, and roundings.

    On a device also within what inputs that are some roundings off would give: autograd's own error alone is luck where a result hangs on
    one sum that cancels.
    """
    own, exact = results(it.meaning, it.copied(grad=True), it), results(it.meaning, it.copied(torch.float64, grad=True), it)
    kernels = by.interpreted or by.device == "cuda"
    jittered = [shaken(it, seed) for seed in range(3)] if by.device == "cuda" else []
    for i, (a, b, truth) in enumerate(zip(ours, own, exact, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        assert a.isfinite().all(), i
        error, allowed = (float((t.double() - truth).norm()) for t in (a, b))
        moved = max((float((other[i] - truth).norm()) for other in jittered), default=0.0)
        factor, roundings = (1.5, FEW[it.dtype]) if kernels else (1.5, 2) if it.dtype.itemsize == 2 else (2, ROUNDINGS[it.dtype])
        limit = factor * max(allowed, moved) + roundings * torch.finfo(it.dtype).eps * float(truth.norm())
        assert error <= limit, f"result {i}: error {error:.3g}, limit {limit:.3g}, autograd's own {allowed:.3g}"
