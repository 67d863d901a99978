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
WARPS = 1
_ELEMENTS = 512
"""Scores of a program where rows are short: 16 in a thread."""


def supports(scores: Tensor, k: int) -> str | None:
    """None, or why the kernel does not take a call of ``moefuse::topk``. Looks at dtypes and sizes only."""
    if scores.dtype not in DTYPES:
        return f"no kernel for {scores.dtype}"
    if scores.shape[-1] > MAX_EXPERTS:
        return f"{scores.shape[-1]} experts, the kernel takes {MAX_EXPERTS}"
    return f"{k} experts per token, the kernel takes {MAX_CHOSEN}" if k > MAX_CHOSEN else None


def _sizes(tokens: int | torch.SymInt, experts: int, k: int, dtype: torch.dtype) -> tuple[int, int, int, bool]:
    """BT, BE, BK, NARROW of the kernel."""
    be = power_of_two(experts)
    bt = min(max(_ELEMENTS // be, 1), 8)
    return (min(bt, power_of_two(tokens)) if isinstance(tokens, int) else bt), be, power_of_two(k), dtype != torch.float32


def _results(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return torch.empty(shape, dtype=scores.dtype, device=scores.device), torch.empty(shape, dtype=torch.int64, device=scores.device)


@on_device
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk``."""
    values, ids = _results(scores, k)
    if values.numel():
        rows = scores if scores.dim() == 2 else scores.reshape(-1, scores.shape[-1])
        tokens, experts = rows.shape
        bt, *sizes = _sizes(tokens, experts, k, scores.dtype)
        rest = (tokens, experts, *rows.stride(), k, bt, *sizes)
        plan.launch(router.choose, (-(-tokens // bt),), (rows, values, ids), rest, warps=WARPS)
    return values, ids


def topk_traced(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk`` in a graph: the kernel as Inductor knows kernels of users."""
    values, ids = _results(scores, k)
    if k and scores.shape[-1]:
        experts = scores.shape[-1]
        # Inductor keeps to an order of strides: dense rows leave it no choice.
        dense = scores if scores.is_contiguous() else scores.clone(memory_format=torch.contiguous_format)
        rows = dense.view(-1, experts)
        tokens = rows.shape[0]
        bt, be, bk, narrow = _sizes(tokens, experts, k, scores.dtype)
        # No tokens, no grid; a program too many does nothing.
        grid = (torch.sym_max((tokens + bt - 1) // bt, 1),)
        call = torch.library.wrap_triton(router.choose)[grid]
        call(rows, values, ids, tokens, experts, experts, 1, K=k, BT=bt, BE=be, BK=bk, NARROW=narrow, num_warps=WARPS)
    return values, ids
