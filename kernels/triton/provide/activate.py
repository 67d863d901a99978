"""The activation between the two projections of an expert that every token takes, where the projections are library products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device.functions import gated, pointwise
from moefuse.kernels.triton.device.structs import Rows
from moefuse.kernels.triton.host.layout import DTYPES
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.call import Body

BLOCK = 512


@triton.jit
def act_rows(
    gate, up, out, I, at_gate, at_up, args,
    ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [T, I] = act(gate [T, I], up [T, I]), computed in the accumulation dtype; program (t, block of features)."""
    dtype: tl.constexpr = out.dtype.element_ty
    acc_type: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    FAST: tl.constexpr = dtype.primitive_bitwidth == 16
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + t * at_gate.row + i.to(tl.int64) * at_gate.col, mask=i < I, other=0.0).to(acc_type)  # [BLOCK]
    if GATED:
        b = tl.load(up + t * at_up.row + i.to(tl.int64) * at_up.col, mask=i < I, other=0.0).to(acc_type)  # [BLOCK]
        r = gated(a, b, args[0], args[1], ACT, FAST)
    else:
        r = pointwise(a, ACT, FAST)
    tl.store(out + t * I + i, r.to(dtype), mask=i < I)


def supports(gate: Tensor) -> bool:
    """Whether the kernel takes this dtype; CUDA tensors only."""
    return gate.dtype in DTYPES


@recorded
def activate(gate: Tensor, up: Tensor | None, body: Body) -> Tensor:
    """[T, I] in the dtype of ``gate`` [T, I], whose strides and those of ``up`` [T, I] may be any."""
    tokens, inter = gate.shape
    out = torch.empty((tokens, inter), dtype=gate.dtype, device=gate.device)
    other = gate if up is None else up
    if out.numel():
        launch(
            act_rows,
            (tokens, -(-inter // BLOCK)),
            {"gate": gate, "up": other, "out": out},
            I=inter,
            at_gate=Rows(*gate.stride()),
            at_up=Rows(*other.stride()),
            args=body.pair,
            ACT=body.activation,
            GATED=up is not None,
            BLOCK=BLOCK,
        )
    return out
