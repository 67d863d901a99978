"""Made-up tensors for what a weight of a class of its own is made of: every code, and scales and zeros that leave no doubt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import NAMED, Encoding
from moefuse.passes.encodings.inner import Inner, inner, like
from moefuse.passes.encodings.part import Coded
from moefuse.passes.encodings.table import all_bytes

_ABOVE, _BELOW = 8, 20
"""Bits that codes and zeros may be larger, and smaller, than they are on average: what a device flushes to zero tells nothing."""


@dataclass(frozen=True)
class Roles:
    """Which of the tensors that a weight is made of has its codes, scales and zeros."""

    storage: Inner
    scale: Inner
    zero: Inner | None


def drawn_like(coded: Coded, value: Any, seed: int = 0) -> Any:
    """A made-up weight of the class and the layout of ``value``, on its device."""
    paths = {i.path: i for i in inner(value)}
    roles = Roles(*(paths[part.path] for part in coded.parts), *(() if coded.zero is not None else (None,)))
    size = size_of(coded.encoding)
    return like(value, lambda one: drawn(roles, size, seed, one, tuple(one.value.shape)).to(one.value.device))


def size_of(encoding: Encoding) -> float:
    """The root mean square of what codes stand for."""
    if isinstance(encoding.table, str):
        with torch.device("cpu"):
            values = all_bytes(NAMED[encoding.table]).double()
        values = values[values.isfinite()]
    else:
        values = torch.tensor(encoding.table, dtype=torch.float64, device="cpu")
    return float(values.square().mean().sqrt())


def unscaled(roles: Roles, one: Inner, shape: tuple[int, ...]) -> Tensor:
    """Every code, scales of one, zeros of none."""
    if one.path == roles.storage.path:
        return _codes(one.value.dtype, shape, torch.Generator("cpu").manual_seed(0))
    if roles.zero is not None and one.path == roles.zero.path:
        return torch.zeros(shape, device="cpu").to(one.value.dtype)
    return torch.full(shape, 127 if one.value.dtype == torch.uint8 else 1.0, device="cpu").to(one.value.dtype)


def drawn(roles: Roles, size: float, seed: int, one: Inner, shape: tuple[int, ...]) -> Tensor:
    """Every code, scales and zeros with all bits that they may have; the weights are about as large as in a layer."""
    dice, dtype = torch.Generator("cpu").manual_seed(seed), one.value.dtype
    if one.path == roles.storage.path:
        return _codes(dtype, shape, dice)
    if one.path == roles.scale.path:
        if dtype in (torch.float8_e8m0fnu, torch.uint8):
            return torch.randint(118, 124, shape, generator=dice, dtype=torch.uint8, device="cpu").view(dtype)
        return ((torch.rand(shape, generator=dice, device="cpu") + 0.5) / size / 4).to(dtype)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return (torch.rand(shape, generator=dice, device="cpu") * size).to(dtype)
    return torch.randint(0, 16, shape, generator=dice, dtype=torch.uint8, device="cpu").to(dtype)


def spread(roles: Roles, size: float, seed: int, dtype: torch.dtype, one: Inner, shape: tuple[int, ...]) -> Tensor:
    """As :func:`drawn`, with scales of all sizes, and of both signs, for which weights in a ``dtype`` are numbers."""
    found = drawn(roles, size, seed, one, shape)
    if one.path != roles.scale.path or one.value.dtype.itemsize == 1:
        return found
    known = [torch.finfo(of) for of in (one.value.dtype, dtype)]
    large = min(math.log2(info.max) for info in known) - _ABOVE - math.log2(max(size, 1.0))
    small = min(large, max(math.log2(info.tiny) for info in known) + _BELOW)
    small = min(small, -large)  # there is little room in float16
    dice = torch.Generator("cpu").manual_seed(seed)
    powers = torch.rand(shape, generator=dice, device="cpu", dtype=torch.float64) * (large - small) + small
    sign = torch.randint(0, 2, shape, generator=dice, device="cpu") * 2 - 1
    return (powers.exp2() * sign).to(one.value.dtype)


def _codes(dtype: torch.dtype, shape: tuple[int, ...], dice: torch.Generator) -> Tensor:
    """Any codes that are numbers."""
    bytes_ = torch.randint(0, 256, (*shape, dtype.itemsize), generator=dice, dtype=torch.uint8, device="cpu")
    found = bytes_.view(dtype)[..., 0]
    return torch.where(found.float().isfinite(), found.float(), 1.0).to(dtype) if dtype.is_floating_point else found


__all__ = ["Roles", "drawn", "drawn_like", "size_of", "spread", "unscaled"]
