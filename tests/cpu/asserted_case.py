"""Assertions as a model's code has them; in a test module pytest would write them anew."""

from __future__ import annotations

import torch
from torch import Tensor


def formatted(t: Tensor, name: str) -> None:
    assert torch.isfinite(t).all(), f"{name} contains NaN or Inf"


def negated(t: Tensor, name: str) -> None:
    assert not torch.isnan(t).any(), f"{name}: {tuple(t.shape)}"


def negated_constant(t: Tensor, _name: str) -> None:
    assert not torch.isnan(t).any(), "NaN"


def both(t: Tensor, name: str) -> None:
    assert (t >= 0).all() and (t <= 1).all(), "out of range: " + name  # noqa: PT018  (as it is written)


def constant(t: Tensor, _name: str) -> None:
    assert torch.isfinite(t).all(), "NaN or Inf"


def either(t: Tensor, name: str) -> None:
    assert (t > 2).any() or torch.isfinite(t).all(), f"{name}"


def raised(t: Tensor, name: str) -> None:
    if not torch.isfinite(t).all():
        raise ValueError(f"{name} contains NaN or Inf")
