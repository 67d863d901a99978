"""The Triton kernels as providers of moefuse's ops on CUDA, and what they do not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.launch import INTERPRETED
from moefuse.kernels.triton.plan import Body, Lists, Plan
from moefuse.runtime import providers

NAME = "triton"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_PLANS: dict[Any, Plan] = {}
_MAX_PLANS = 4096
"""Plans kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""


def supports(x: Tensor, ids: Tensor, weights: Tensor, w_in: Sequence[Tensor], *rest: Any) -> str | None:
    """None, or why these kernels cannot run a call of ``moefuse::experts``. Looks at devices, dtypes and sizes only."""
    if x.device.type != DEVICE:
        return f"tensors on {x.device.type}, the kernels run on {DEVICE}"
    if x.dtype not in DTYPES:
        return f"no kernel for {x.dtype}"
    return None


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Sequence[Tensor],
    w_up: Sequence[Tensor],
    w_out: Sequence[Tensor],
    b_in: Sequence[Tensor],
    b_up: Sequence[Tensor],
    b_out: Sequence[Tensor],
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """``moefuse::experts``, arguments in schema order."""
    lists = (w_in, w_up, w_out, b_in, b_up, b_out)
    arg0, arg1, *_ = (*activation_args, 0.0, 0.0)
    body = (activation, (arg0, arg1), gating, up_first, weight_on_input, out_dtype or x.dtype)
    key = (*body, *_kind(x), *_kind(ids), *_kind(weights), *map(_kinds, lists))
    if x.dtype == torch.float32:
        key = (*key, torch.backends.cuda.matmul.allow_tf32)
    plan = _PLANS.get(key)
    if plan is None:
        plan = _plan(key, x, ids, weights, lists, Body(*body))
    if x.device.type == "cuda" and x.device.index != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return plan.run(x, ids, weights, plan.uniform(lists))
    return plan.run(x, ids, weights, plan.uniform(lists))


def _kind(t: Tensor) -> tuple[Any, ...]:
    """What a plan depends on of one tensor."""
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() & 15


def _kinds(tensors: Sequence[Tensor]) -> Any:
    """What a plan depends on of one list."""
    n = len(tensors)
    if not n:
        return None
    t = tensors[0]
    if n == 1:
        return t.shape, t.stride(), t.data_ptr() & 15
    # Shapes are equal (the op checks them). One pass of each kind over the tensors is quicker than one tuple per tensor.
    strides = set([t.stride() for t in tensors])
    return n, t.shape, t.stride() if len(strides) == 1 else None, any([t.data_ptr() & 15 for t in tensors])


def _plan(key: Any, x: Tensor, ids: Tensor, weights: Tensor, lists: Lists, body: Body) -> Plan:
    if len(_PLANS) >= _MAX_PLANS:
        _PLANS.clear()
    plan = _PLANS[key] = Plan(x, ids, weights, lists, body)
    return plan


def register() -> None:
    """Make these kernels the first choice for the ops they provide."""
    providers.register("experts", providers.Provider(NAME, supports, experts, device=DEVICE))
