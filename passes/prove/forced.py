"""Running a rewritten graph on the original's values: behind each fused result stands the value that the original had there.

So roundings do not add up from layer to layer, where one of them may send a token to other experts: each fused result is compared with the
value that it stands for, and everything else has to be the same bits. A gradient goes to the fused op as if nothing had been put in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.prove.surroundings import rms
from moefuse.runtime.rounding import eps_of


class Forced:
    """The values of results in the original, in the order in which they were computed.

    Attributes:
        found: the first result that differs: (its number, how).
    """

    def __init__(self) -> None:
        self.found: tuple[int, str] | None = None
        self._seen: dict[int, list[tuple[Tensor, bool]]] = {}

    def record(self, number: int, value: Node) -> None:
        """Remember what a node of the original gives: insert that behind it."""

        def recorded(value: Tensor) -> None:
            self._seen.setdefault(number, []).append((value.detach().clone(), value.requires_grad))

        _insert(value, recorded, f"moefuse_recorded_{number}")

    def compare(self, number: int, value: Node, dtype: torch.dtype | None) -> None:
        """Compare what a node of the rewritten graph gives up to rounding in ``dtype``, and go on with the original's value."""

        def compared(value: Tensor) -> Tensor:
            seen = self._seen.get(number)
            if not seen:
                self.found = self.found or (number, "the original did not compute it so often")
                return value
            want, differentiable = seen.pop(0)
            problem = close(want, value, dtype or want.dtype)
            if not problem and differentiable and not value.requires_grad:
                problem = "it has no gradient"
            self.found = self.found or ((number, problem) if problem else None)
            same = want.shape == value.shape and want.dtype == value.dtype
            return _Instead.apply(value, want) if same else value  # type: ignore[no-untyped-call]

        inserted = _insert(value, compared, f"moefuse_compared_{number}")
        value.replace_all_uses_with(inserted, delete_user_cb=lambda user: user is not inserted)


class _Instead(torch.autograd.Function):
    """Another value of a tensor, with the tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, other: Tensor) -> Tensor:
        return other.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _insert(value: Node, function: Callable[..., Any], name: str) -> Node:
    function.__name__ = function.__qualname__ = name  # the graph's code calls it by that
    with value.graph.inserting_after(value):
        return value.graph.call_function(function, (value,))


def tolerance(dtype: torch.dtype, device: str) -> float:
    """How far two roundings of one value may be apart, as a part of its size."""
    eps = eps_of(dtype, device)
    return 1024 * eps if eps < 1e-5 else 32 * eps


def close(want: Tensor, got: Tensor, dtype: torch.dtype) -> str:
    """How two results differ beyond rounding in ``dtype``, rows each by itself; an empty text if they do not."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"{list(want.shape)} {want.dtype} became {list(got.shape)} {got.dtype}"
    if not want.dtype.is_floating_point:
        return "" if torch.equal(want, got) else "it has other elements"
    if not bool((want.isfinite() == got.isfinite()).all()):
        return "other elements of it are finite"
    old, new = (torch.where(t.isfinite(), t, 0).detach().double() for t in (want, got))
    size, distance = rms(old), rms(old - new)
    rows = (old - new).reshape(-1, old.shape[-1] if old.dim() else 1)
    worst = float(rows.square().mean(-1).max().sqrt()) if rows.numel() else 0.0
    few = tolerance(dtype, want.device.type)
    if distance > few * size or worst > few * (size + (float(old.abs().max()) if old.numel() else 0.0)):
        return f"it differs by {distance / (size + 1e-30):.2e} of its size"
    return ""
