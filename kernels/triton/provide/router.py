"""``moefuse::topk`` and ``moefuse::route`` on CUDA: what the kernels take, block sizes, and the launches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.device import router
from moefuse.kernels.triton.launch.calls import launch, launch_traced
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.recipe import Recipe
from moefuse.tuning.problem import power_of_two

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


def _sizes(tokens: int | torch.SymInt, experts: int, k: int) -> dict[str, int]:
    """BT, BE, BK of the kernels."""
    be = power_of_two(experts)
    bt = min(max(_ELEMENTS // be, 1), 8)
    return {"BT": min(bt, power_of_two(tokens)) if isinstance(tokens, int) else bt, "BE": be, "BK": power_of_two(k)}


def _results(scores: Tensor, k: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    shape = (*scores.shape[:-1], k)
    return torch.empty(shape, dtype=dtype or scores.dtype, device=scores.device), torch.empty(
        shape, dtype=torch.int64, device=scores.device
    )


@recorded
def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk``."""
    values, ids = _results(scores, k)
    if values.numel():
        rows = scores if scores.dim() == 2 else scores.reshape(-1, scores.shape[-1])
        numbers = _choose(rows, k, rows.stride())
        arrays = {"scores": rows, "values": values, "ids": ids}
        launch(router.choose, (-(-rows.shape[0] // numbers["BT"]),), arrays, warps=WARPS, **numbers)
    return values, ids


def _choose(rows: Tensor, k: int, strides: tuple[int, ...]) -> dict[str, Any]:
    """The numbers of the kernel ``choose``."""
    tokens, experts = rows.shape
    numbers = {"T": tokens, "E": experts, "stride_t": strides[0], "stride_e": strides[1], "K": k, "NARROW": rows.dtype != torch.float32}
    return numbers | _sizes(tokens, experts, k)


def _dense_rows(scores: Tensor) -> Tensor:
    """Rows [T, E]. Inductor keeps to an order of strides: dense rows leave it no choice."""
    dense = scores if scores.is_contiguous() else scores.clone(memory_format=torch.contiguous_format)
    return dense.view(-1, scores.shape[-1])


def _traced(kernel: Any, arrays: dict[str, Any], numbers: dict[str, Any]) -> None:
    """Put a kernel into the graph that is being traced."""
    # No tokens, no grid; a program too many does nothing.
    programs = torch.sym_max((numbers["T"] + numbers["BT"] - 1) // numbers["BT"], 1)
    launch_traced(kernel, (programs,), arrays, warps=WARPS, **numbers)


def topk_traced(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``moefuse::topk`` in a graph: the kernel as Inductor knows kernels of users."""
    values, ids = _results(scores, k)
    if k and scores.shape[-1]:
        rows = _dense_rows(scores)
        _traced(router.choose, {"scores": rows, "values": values, "ids": ids}, _choose(rows, k, (rows.shape[1], 1)))
    return values, ids


def _route(recipe: Recipe, rows: Tensor, bias: Tensor | None, strides: tuple[int, ...]) -> dict[str, Any]:
    """The numbers of the kernel ``route``."""
    tokens, experts = rows.shape
    names = ("K", "SCORE", "G", "KEPT", "BEST", "LOWEST", "BY_CHOICE", "WEIGHT", "RENORMALISE", "EPS", "LEAST", "SCALE")
    numbers: dict[str, Any] = {"T": tokens, "E": experts, **dict(zip(("stride_t", "stride_e", "stride_b"), strides, strict=True))}
    numbers |= dict(zip(names, recipe.arguments, strict=True))
    return numbers | {"BIAS": bias is not None, **_sizes(tokens, experts, recipe.k), "BG": power_of_two(recipe.groups)}


@recorded
def route(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``moefuse::route``."""
    weights, ids = _results(logits, recipe.k, out_dtype)
    if weights.numel():
        rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
        numbers = _route(recipe, rows, bias, (*rows.stride(), 1 if bias is None else bias.stride(0)))
        arrays = {"logits": rows, "bias": rows if bias is None else bias, "weights": weights, "ids": ids}
        launch(router.route, (-(-rows.shape[0] // numbers["BT"]),), arrays, warps=WARPS, **numbers)
    return weights, ids


def route_traced(logits: Tensor, bias: Tensor | None, recipe: Recipe, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``moefuse::route`` in a graph."""
    weights, ids = _results(logits, recipe.k, out_dtype)
    if recipe.k and logits.shape[-1]:
        rows, added = _dense_rows(logits), None if bias is None else _dense_rows(bias).view(-1)
        arrays = {"logits": rows, "bias": rows if added is None else added, "weights": weights, "ids": ids}
        _traced(router.route, arrays, _route(recipe, rows, bias, (rows.shape[1], 1, 1)))
    return weights, ids
