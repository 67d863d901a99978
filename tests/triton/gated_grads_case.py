"""``gated_grads`` of the training kernels, alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device.backward import gated_grads
from moefuse.kernels.triton.device.structs import Halves


@triton.jit
def _kernel(d, gate, up, d_gate, d_up, halves: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    a, b = gated_grads(tl.load(d + n), tl.load(gate + n), tl.load(up + n), halves, False)
    tl.store(d_gate + n, a)
    tl.store(d_up + n, b)


def gated_grads_of(d: Tensor, gate: Tensor, up: Tensor, halves: Halves) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, each [N], N a power of two."""
    found = torch.empty_like(gate), torch.empty_like(up)
    _kernel[(1,)](d, gate, up, *found, halves, len(d))
    return found
