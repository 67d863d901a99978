"""Providers of what is done to rows of several ranks beside their transport."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device import ranks
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.runtime.ranks import numbers_dtype
from moefuse.tuning.problem import power_of_two

_IDS = 1024
_BLOCK = 2048


def supports(first: Tensor, *rest: Any) -> str | None:
    """None for contiguous tensors, else a reason."""
    return None if first.is_contiguous() else "not contiguous"


@recorded
def local_ids(ids: Tensor, place: Tensor, first: int, slots: int) -> Tensor:
    """Of :func:`moefuse.runtime.ranks.local_ids`."""
    out = torch.empty(ids.shape, dtype=numbers_dtype(ids.dtype), device=ids.device)
    launch(
        ranks.local_ids, (max(-(-ids.numel() // _IDS), 1),), {"ids": ids, "place": place, "out": out},
        N=ids.numel(), E=place.shape[0], slots=slots, first=first, TABLE=True, B=_IDS,
    )  # fmt: skip
    return out


@recorded
def sum_ranks(parts: Tensor, world: int, tokens: int) -> Tensor:
    """Of :func:`moefuse.runtime.ranks.sum_ranks`."""
    flat = parts.flatten(1)
    out = parts.new_empty((tokens, *parts.shape[1:]))
    features = flat.shape[1]
    block = min(power_of_two(features), _BLOCK)
    wide: Any = tl.float64 if accumulation_dtype(parts.dtype) == torch.float64 else tl.float32
    launch(
        ranks.sum_ranks, (max(tokens, 1), max(-(-features // block), 1)), {"parts": flat, "out": out},
        M=parts.shape[0] // world, F=features if tokens else 0, WORLD=world, WIDE=wide, B=block,
    )  # fmt: skip
    return out
