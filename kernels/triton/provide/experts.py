"""The Triton kernels as the provider of ``moefuse::experts`` on CUDA: what they do not take, and who plans a call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moefuse.kernels.triton.host import chunks
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch import player
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide import library, training
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.runtime.rounding import tf32_allowed

NAME = "triton"
DEVICE = "cpu" if INTERPRETED else "cuda"

AnyPlan = Plan | library.LibraryPlan | chunks.ChunkedPlan
_MAX_PLANS = 4096
_PLANS: dict[Any, AnyPlan] = player.until_forgotten({})
"""Plans kept; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""


def supports(call: ExpertsCall) -> str | None:
    """None, or why these kernels cannot run a call. Looks at devices, dtypes and sizes only."""
    if call.device.type != DEVICE:
        return f"tensors on {call.device.type}, the kernels run on {DEVICE}"
    return None if call.dtype in DTYPES else f"no kernel for {call.dtype}"


@recorded
def experts(call: ExpertsCall) -> Tensor:
    """``moefuse::experts``; weights in float32 by the kernels of training, which round them as they read them."""
    if call.held != call.dtype:
        return training.experts_forward(call)[0]  # type: ignore[no-any-return]
    return plan_of(call).run(call)


def plan_of(call: ExpertsCall) -> AnyPlan:
    """What a call launches; the same for all of its kind."""
    tensors, counts, *how = call.pack()
    kinds = [(t.dtype, t.device, t.shape, t.stride(), t.data_ptr() & 15) for t in tensors]
    key = (*how, tf32_allowed(), *counts, *kinds)
    found = _PLANS.get(key)
    if found is None:
        form = library.form_for(call) if chunks.allowed() is None else None
        found = _PLANS[key] = chunks.chunked(Plan(call), call) if form is None else library.LibraryPlan(call, form)
        if len(_PLANS) > _MAX_PLANS:
            _PLANS.clear()
    return found
