"""The ceiling of a bandwidth-bound layer: a kernel that reads the weights of some experts and does nothing else with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read(w, experts, out, size, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    base = w + tl.load(experts + tl.program_id(1)).to(tl.int64) * size
    first = tl.program_id(0) * BLOCK * STEPS
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(STEPS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(base + at, mask=at < size, other=0.0, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(total))


def read_experts(w: Tensor, experts: Tensor) -> Tensor:
    """One sum per program. w: [E, ...] dense (any order of its inner dimensions); experts [n] int32."""
    size = w[0].numel()
    blocks = triton.cdiv(size, 2048 * 4)
    out = torch.empty(experts.numel() * blocks, device=w.device)
    _read[(blocks, experts.numel())](w, experts, out, size, BLOCK=2048, STEPS=4, num_warps=4)
    return out
