"""The activation between the two projections of an expert that every token takes, where the projections are library products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.functions import gated, pointwise
from moefuse.kernels.triton.grouped_plan import launch, on_device
from moefuse.kernels.triton.layout import DTYPES
from moefuse.ops.call import Body

BLOCK = 512


@triton.jit
def act_rows(
    gate, up, out, I, stride_gt, stride_gi, stride_ut, stride_ui, arg0, arg1,
    ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, I] = act(gate [T, I], up [T, I]), computed in the accumulation dtype; program (t, block of features)."""
    dtype: tl.constexpr = out.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + t * stride_gt + i.to(tl.int64) * stride_gi, mask=i < I, other=0.0).to(acc_type)
    if GATED:
        b = tl.load(up + t * stride_ut + i.to(tl.int64) * stride_ui, mask=i < I, other=0.0).to(acc_type)
        r = gated(a, b, arg0, arg1, ACT, FAST)
    else:
        r = pointwise(a, ACT, FAST)
    tl.store(out + t * I + i, r.to(dtype), mask=i < I)


def supports(gate: Tensor) -> bool:
    """Whether the kernel takes this dtype; CUDA tensors only."""
    return gate.dtype in DTYPES


@on_device
def activate(gate: Tensor, up: Tensor | None, body: Body) -> Tensor:
    """[T, I] in the dtype of ``gate`` [T, I], whose strides and those of ``up`` [T, I] may be any."""
    tokens, inter = gate.shape
    out = torch.empty((tokens, inter), dtype=gate.dtype, device=gate.device)
    other = gate if up is None else up
    if out.numel():
        rest = (inter, *gate.stride(), *other.stride(), *body.pair, body.activation, up is not None, BLOCK)
        launch(act_rows, (tokens, -(-inter // BLOCK)), (gate, other, out), rest)
    return out
