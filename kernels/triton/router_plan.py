"""``moefuse::topk`` on CUDA: what the kernel takes, block sizes, and the launch."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton import grouped_plan as plan
from moefuse.kernels.triton import router
from moefuse.kernels.triton.config import power_of_two
from moefuse.kernels.triton.grouped_plan import on_device

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS = 1024
"""A row has to fit the registers of one warp; its position takes 10 bits of a key."""
MAX_CHOSEN = 32
_ELEMENTS = 512
"""Scores of a program where rows are short: 16 in a thread."""


def supports(scores: Tensor, k: int) -> str | None:
    """None, or why the kernel does not take a call of ``moefuse::topk``. Looks at dtypes and sizes only."""
    if scores.dtype not in DTYPES:
        return f"no kernel for {scores.dtype}"
    if scores.shape[-1] > MAX_EXPERTS:
        return f"{scores.shape[-1]} experts, the kernel takes {MAX_EXPERTS}"
    return f"{k} experts per token, the kernel takes {MAX_CHOSEN}" if k > MAX_CHOSEN else None


@on_device
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk``."""
    shape = (*scores.shape[:-1], k)
    values = torch.empty(shape, dtype=scores.dtype, device=scores.device)
    ids = torch.empty(shape, dtype=torch.int64, device=scores.device)
    if values.numel():
        rows = scores if scores.dim() == 2 else scores.reshape(-1, scores.shape[-1])
        tokens, experts = rows.shape
        be = power_of_two(experts)
        bt = min(max(_ELEMENTS // be, 1), power_of_two(tokens), 8)
        rest = (tokens, experts, *rows.stride(), k, bt, be, power_of_two(k), scores.dtype != torch.float32)
        plan.launch(router.choose, (-(-tokens // bt),), (rows, values, ids), rest, warps=1)
    return values, ids
