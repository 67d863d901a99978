"""Calls of ``moefuse::experts`` on a CUDA device for the tests here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cpu.ops_case import Case, reference, run, to


def on_gpu(args: list[Any]) -> list[Any]:
    """The same call on the device, strides kept."""
    return [[t.cuda() for t in a] if isinstance(a, list) else a.cuda() for a in args]


def assert_right(out: Tensor, args: list[Any], options: dict[str, Any], factor: float = 1.5) -> None:
    """The error against double precision is within ``factor`` of the reference's own in the same dtype, plus one rounding.

    One draw of a maximum over few values varies, so the factor is more than the 1.1 that holds for the mean error of a real layer
    (benchmarks/layer.py checks that one).
    """
    exact = reference(to(args, torch.float64), **{**options, "out_dtype": None})
    own = reference(args, **options)
    assert out.shape == own.shape
    assert out.dtype == own.dtype
    if not out.numel():
        return
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(out.double()), finite)
    if not finite.any():
        return
    error, allowed = (float((o.double() - exact)[finite].abs().max()) for o in (out, own))
    roundings = 8 if out.dtype in (torch.float32, torch.float64) else 1
    floor = roundings * torch.finfo(out.dtype).eps * max(float(exact[finite].abs().max()), 1.0)
    assert error <= factor * allowed + floor, f"error {error:.3g}, the reference's {allowed:.3g}"


def check(case: Case) -> Tensor:
    """One call through the public op."""
    args = on_gpu(case.args())
    out = run(args, **case.options)
    assert_right(out, args, case.options)
    return out


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No kernel of weights in few bits whose name begins so: experts are few here, so few tokens are many rows of each."""
    from moefuse.kernels.triton.provide import coded_products, extended

    for module in (extended, coded_products):
        monkeypatch.setattr(module, "KERNELS", [kernel for kernel in module.KERNELS if not kernel.name.startswith(name)])
