"""One GEMM into a given output, the way that is quickest for its dtype and shape on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def mm_into(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None) -> None:
    """out [m, n] = a [m, k] @ b [k, n] (+ bias [n]); operands in one dtype, accumulated in at least float32."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)
