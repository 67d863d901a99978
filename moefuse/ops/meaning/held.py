"""Weights held in float32 and computed with in 16 bits: what ``torch.autocast`` makes of float32 Parameters."""

from __future__ import annotations

import torch

SHORT = (torch.bfloat16, torch.float16)
"""Dtypes to which weights in float32 may be rounded as they are read."""


def holds(weights: torch.dtype, compute: torch.dtype) -> bool:
    """Whether weights of one dtype are rounded to another, the one that is computed in."""
    return weights == torch.float32 and compute in SHORT
