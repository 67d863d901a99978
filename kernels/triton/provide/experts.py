"""The Triton kernels as the provider of ``moefuse::experts`` on CUDA: what they do not take, and the plans of calls seen before."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import current_device
from moefuse.kernels.triton.host import chunks
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch import dispatcher
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.provide import library
from moefuse.ops.call import ExpertsCall, cut
from moefuse.runtime import providers

NAME = "triton"
DEVICE = "cpu" if INTERPRETED else "cuda"

AnyPlan = Plan | library.LibraryPlan | chunks.ChunkedPlan
_PLANS: dict[Any, AnyPlan] = {}
_MAX_PLANS = 4096
"""Plans kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""


def supports(call: ExpertsCall) -> str | None:
    """None, or why these kernels cannot run a call. Looks at devices, dtypes and sizes only."""
    if call.device.type != DEVICE:
        return f"tensors on {call.device.type}, the kernels run on {DEVICE}"
    return None if call.dtype in DTYPES else f"no kernel for {call.dtype}"


def experts(call: ExpertsCall) -> Tensor:
    """``moefuse::experts``."""
    tensors, counts, *how = call.pack()
    addresses = [*map(Tensor.data_ptr, tensors)]
    key = key_of(tensors, addresses, counts, *how)
    return _run(_PLANS.get(key) or _plan(key, call), call, addresses)


def infer(tensors: Sequence[Tensor], counts: Sequence[int], *how: Any) -> Tensor:
    """``moefuse::experts_infer`` on CUDA: what a compiled model calls, so the known case is decided with little Python.

    Where C++ can be compiled, ``dispatcher.py`` takes over what comes here twice.
    """
    addresses = [*map(Tensor.data_ptr, tensors)]
    plan = _PLANS.get(key_of(tensors, addresses, counts, *how)) if providers.PROVIDERS["experts"][0].name == NAME else None
    if plan is None:
        out: Tensor = providers.run("experts", ExpertsCall.unpack(tensors, counts, *how))
        dispatcher.start()
        return out
    if isinstance(plan, Plan):
        if dispatcher.ready():
            plan.hand_over(tensors, addresses, counts, *how)
        else:
            dispatcher.start()
        if plan.direct is not None and plan.index == current_device() and (made := plan.run_flat(addresses, counts)) is not None:
            return made
    return _run(plan, ExpertsCall.unpack(tensors, counts, *how), addresses)


def _run(plan: AnyPlan, call: ExpertsCall, addresses: Sequence[int]) -> Tensor:
    if call.device.type == "cuda" and call.device.index != current_device():
        with torch.cuda.device(call.device):
            return _run_here(plan, call, addresses)
    return _run_here(plan, call, addresses)


def _run_here(plan: AnyPlan, call: ExpertsCall, addresses: Sequence[int]) -> Tensor:
    return plan.run(call, addresses=addresses[3:]) if isinstance(plan, Plan) else plan.run(call)


def key_of(tensors: Sequence[Tensor], addresses: Sequence[int], counts: Sequence[int], *how: Any) -> tuple[Any, ...]:
    """What the plan of a packed call depends on; ``addresses``: of all tensors."""
    x = tensors[0]
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    alone = tensors if max(counts) <= 1 else tensors[:3]
    kinds = [(t.shape, t.stride(), address & 15) for t, address in zip(alone, addresses, strict=False)]
    several = () if alone is tensors else tuple(map(_kinds, cut(tensors, counts, 3), cut(addresses, counts, 3)))
    return *how, *counts, tf32, x.dtype, tensors[1].dtype, tensors[2].dtype, x.get_device(), *kinds, several


def _kinds(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    """What a plan depends on of one list."""
    if not tensors:
        return None
    # Shapes are equal (the op checks them). One pass of each kind over the tensors is quicker than one tuple per tensor.
    strides = {*map(Tensor.stride, tensors)}
    aligned = not functools.reduce(operator.or_, addresses) & 15
    return tensors[0].shape, strides.pop() if len(strides) == 1 else None, aligned


def _plan(key: Any, call: ExpertsCall) -> AnyPlan:
    if len(_PLANS) >= _MAX_PLANS:
        forget_plans()
    form = library.form_for(call) if chunks.allowed() is None else None
    plan: AnyPlan = chunks.chunked(Plan(call), call) if form is None else library.LibraryPlan(call, form)
    _PLANS[key] = plan
    return plan


def forget_plans() -> None:
    """Make every plan anew at its next call, so that it takes a configuration that was measured since.

    CUDA graphs recorded before stay as they are: a graph holds the launches, and Triton keeps the kernels that it launches.
    """
    _PLANS.clear()
    dispatcher.forget()
