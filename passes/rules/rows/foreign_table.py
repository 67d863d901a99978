"""What codes of four bits stand for in an operator that multiplies them: read from the operator, run on what is made up."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moefuse.errors import first_line
from moefuse.ops.meaning.encoding import BITS, Encoding, Packing, dequantise

_CODES = 1 << BITS
_FEATURES = 48
_SHIFTS = ((BITS, 0), (0, BITS))
"""Shifts of two codes that are neighbours in a byte, in either order."""


@functools.lru_cache(maxsize=64)
def read(operator: Any, kind: str, block: int, dtype: torch.dtype, device: torch.device) -> Encoding | str:
    """How an operator understands ``kind``, with scales of ``block`` inputs, for rows in ``dtype``; or why that is not known.

    It multiplies rows of ones and zeros, so what comes out is the weights themselves, rounded to ``dtype``.
    """

    def weight(storage: Tensor, scale: Tensor, of: torch.dtype, on: torch.device) -> Tensor:
        n, k = scale.shape[0], scale.shape[1] * block
        rows = torch.eye(k, dtype=of, device=on)
        found: Tensor = operator(rows, storage.view(-1, 1).to(on), [n, k], scale.flatten().to(on), block, kind)
        return found.t().cpu()

    try:
        with torch.no_grad(), torch.device("cpu"):
            return _read(weight, block, dtype, device)
    except Exception as error:  # whatever the operator raises where it has no kernel
        return f"it cannot be run on what is made up: {first_line(error)}"


def _read(weight: Callable[..., Tensor], block: int, dtype: torch.dtype, device: torch.device) -> Encoding | str:
    every = torch.arange(_CODES, dtype=torch.uint8)[:, None].expand(_CODES, block // 2) * (_CODES + 1)
    one = torch.ones(_CODES, 1)
    try:
        shown = weight(every.contiguous(), one, torch.float32, torch.device("cpu"))  # exact, where a GPU may round
    except Exception:
        shown = weight(every.contiguous(), one, torch.float32, device)
    table = tuple(shown[:, 0].tolist())
    if not bool((shown == shown[:, :1]).all()) or not bool(shown.isfinite().all()):
        return "a code does not stand for one number"
    dice = torch.Generator("cpu").manual_seed(0)
    storage = torch.randint(0, 256, (_FEATURES, block), generator=dice, dtype=torch.uint8)
    scale = torch.rand(_FEATURES, 2, generator=dice) + 0.1
    got = weight(storage, scale, dtype, device)
    for shifts in _SHIFTS:
        encoding = Encoding(table, (1, block), "f32", packing=Packing(1, shifts))
        wanted = dequantise(encoding, storage, scale, None, dtype)
        if torch.allclose(got, wanted, rtol=torch.finfo(dtype).eps, atol=0.0):
            return encoding
    return "it is not a table of sixteen numbers times scales of neighbours"


__all__ = ["read"]
