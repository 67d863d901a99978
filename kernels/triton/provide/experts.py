"""The Triton kernels as the provider of ``moefuse::experts`` on CUDA: what they do not take, and the plans of calls seen before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import current_device
from moefuse.kernels.triton.host import chunks
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch import dispatcher
from moefuse.kernels.triton.launch.kinds import kind_of_list
from moefuse.kernels.triton.launch.launch import INTERPRETED, tf32_allowed
from moefuse.kernels.triton.launch.record import forget_records
from moefuse.kernels.triton.provide import library, training
from moefuse.machine import slow_paths
from moefuse.ops.meaning.call import ExpertsCall, cut
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
    """``moefuse::experts``; weights in float32 by the kernels of training, which round them as they read them."""
    if call.held != call.dtype:
        return training.experts_forward(call)[0]  # type: ignore[no-any-return]
    packed = call.pack()
    addresses = [*map(Tensor.data_ptr, packed[0])]
    key = key_of(packed, addresses)
    try:
        return _run(_PLANS.get(key) or _plan(key, call), packed, addresses)
    except slow_paths.LostError:
        forget_plans()
        raise


def infer(*packed: Any) -> Tensor:
    """``moefuse::experts_infer`` on CUDA: what a compiled model calls, so the known case is decided with little Python.

    Where C++ can be compiled, ``dispatcher.py`` takes over what comes here twice.
    """
    addresses = [*map(Tensor.data_ptr, packed[0])]
    plan = _PLANS.get(key_of(packed, addresses)) if providers.PROVIDERS["experts"][0].name == NAME else None
    if plan is None:
        out: Tensor = providers.run("experts", ExpertsCall.unpack(*packed))
        dispatcher.start()
        return out
    if isinstance(plan, Plan) and not plan.told:
        if dispatcher.ready():
            plan.hand_over(packed, addresses)
        else:
            dispatcher.start()
    return _run(plan, packed, addresses)


def _run(plan: AnyPlan, packed: Sequence[Any], addresses: Sequence[int]) -> Tensor:
    """A call by its plan; ``addresses``: of all tensors."""
    device = packed[0][0].get_device()
    if device < 0 or device == current_device():
        if plan.direct is not None:
            return plan.run_flat(addresses, packed[1])
        return _run_here(plan, ExpertsCall.unpack(*packed), addresses)
    with torch.cuda.device(device):
        return _run_here(plan, ExpertsCall.unpack(*packed), addresses)


def _run_here(plan: AnyPlan, call: ExpertsCall, addresses: Sequence[int]) -> Tensor:
    return plan.run(call, addresses=addresses[3:]) if isinstance(plan, Plan) else plan.run(call)


def key_of(packed: Sequence[Any], addresses: Sequence[int]) -> tuple[Any, ...]:
    """What the plan of a packed call depends on; ``addresses``: of all tensors."""
    tensors, counts = packed[0], packed[1]
    x = tensors[0]
    tf32 = x.dtype == torch.float32 and tf32_allowed()
    several: Any = ()
    if max(counts) > 1:
        several = [kind_of_list(ts, at) for ts, at in zip(cut(tensors, counts, 3), cut(addresses, counts, 3), strict=True) if ts]
        tensors = tensors[:3]
    kinds = [(t.shape, t.stride(), address & 15) for t, address in zip(tensors, addresses, strict=False)]
    return *packed[2:], *counts, tf32, x.dtype, packed[0][3].dtype, tensors[1].dtype, tensors[2].dtype, x.get_device(), *kinds, *several


def _plan(key: Any, call: ExpertsCall) -> AnyPlan:
    if len(_PLANS) >= _MAX_PLANS:
        forget_plans()
    form = library.form_for(call) if chunks.allowed() is None else None
    plan: AnyPlan = chunks.chunked(Plan(call), call) if form is None else library.LibraryPlan(call, form)
    _PLANS[key] = plan
    return plan


def forget_plans() -> None:
    """Make every plan and record anew at its next call, so that it takes a configuration that was measured since.

    CUDA graphs recorded before stay as they are: a graph holds the launches, and Triton keeps the kernels that it launches.
    """
    _PLANS.clear()
    forget_records()
    dispatcher.forget()
