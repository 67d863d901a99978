"""``moefuse::topk`` and ``moefuse::route`` on CUDA: what the kernels take, block sizes, and the launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton import grouped_plan as plan
from moefuse.kernels.triton import router
from moefuse.kernels.triton.grouped_plan import on_device
from moefuse.kernels.triton.problem import power_of_two
from moefuse.ops.recipe import Recipe

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_EXPERTS = 1024
"""A row has to fit the registers of one warp; its position takes 10 bits of a key."""
MAX_CHOSEN = 32
WARPS = 1
_ELEMENTS = 512
"""Scores of a program where rows are short: 16 in a thread."""


def supports(scores: Tensor, *rest: Any) -> str | None:
    """None, or why the kernels do not take a call of ``moefuse::topk`` or ``route``. Looks at dtypes and sizes only."""
    k = next(r.k if isinstance(r, Recipe) else r for r in rest if isinstance(r, Recipe | int))
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


def _results(scores: Tensor, k: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return torch.empty(shape, dtype=dtype or scores.dtype, device=scores.device), torch.empty(
        shape, dtype=torch.int64, device=scores.device
    )


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


def _dense_rows(scores: Tensor) -> Tensor:
    """Rows [T, E]. Inductor keeps to an order of strides: dense rows leave it no choice."""
    dense = scores if scores.is_contiguous() else scores.clone(memory_format=torch.contiguous_format)
    return dense.view(-1, scores.shape[-1])


def _traced(kernel: Any, tokens: int | torch.SymInt, bt: int, pointers: tuple[Any, ...], rest: tuple[Any, ...]) -> None:
    """Put a kernel into the graph that is being traced."""
    # No tokens, no grid; a program too many does nothing.
    plan.launch_traced(kernel, (torch.sym_max((tokens + bt - 1) // bt, 1),), pointers, rest, warps=WARPS)


def topk_traced(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk`` in a graph: the kernel as Inductor knows kernels of users."""
    values, ids = _results(scores, k)
    if k and scores.shape[-1]:
        rows = _dense_rows(scores)
        tokens, experts = rows.shape
        bt, *sizes = _sizes(tokens, experts, k, scores.dtype)
        _traced(router.choose, tokens, bt, (rows, values, ids), (tokens, experts, experts, 1, k, bt, *sizes))
    return values, ids


def _recipe(recipe: Recipe, bias: Tensor | None, tokens: int | torch.SymInt, experts: int) -> tuple[Any, ...]:
    """The constants of the kernel ``route``."""
    bt, be, bk, _ = _sizes(tokens, experts, recipe.k, torch.float32)
    return *recipe.arguments, bias is not None, bt, be, bk, power_of_two(recipe.groups)


@on_device
def route(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``moefuse::route``."""
    weights, ids = _results(logits, recipe.k, out_dtype)
    if weights.numel():
        rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
        tokens, experts = rows.shape
        constants = _recipe(recipe, bias, tokens, experts)
        rest = (tokens, experts, *rows.stride(), 1 if bias is None else bias.stride(0), *constants)
        pointers = (rows, rows if bias is None else bias, weights, ids)
        plan.launch(router.route, (-(-tokens // constants[-4]),), pointers, rest, warps=WARPS)
    return weights, ids


def route_traced(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``moefuse::route`` in a graph."""
    weights, ids = _results(logits, recipe.k, out_dtype)
    if recipe.k and logits.shape[-1]:
        rows, added = _dense_rows(logits), None if bias is None else _dense_rows(bias).view(-1)
        tokens, experts = rows.shape
        constants = _recipe(recipe, bias, tokens, experts)
        pointers = (rows, rows if added is None else added, weights, ids)
        _traced(router.route, tokens, constants[-4], pointers, (tokens, experts, experts, 1, 1, *constants))
    return weights, ids
