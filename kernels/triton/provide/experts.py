"""The Triton kernels as the provider of ``moefuse::experts`` on CUDA: what they do not take, and who plans a call."""

from __future__ import annotations

from torch import Tensor

from moefuse.kernels.triton.host import chunks
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide import library, training
from moefuse.ops.meaning.call import ExpertsCall

NAME = "triton"
DEVICE = "cpu" if INTERPRETED else "cuda"


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


def plan_of(call: ExpertsCall) -> Plan | library.LibraryPlan | chunks.ChunkedPlan:
    """What a call launches."""
    form = library.form_for(call) if chunks.allowed() is None else None
    return chunks.chunked(Plan(call), call) if form is None else library.LibraryPlan(call, form)
