"""The norm of all gradients where some Parameters are sharded and some are not, which torch's own function refuses to mix."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_grad_norm_(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for plain Parameters beside DTensors, on one mesh or several.

    Every rank calls it, with the gradients of plain Parameters averaged already. The norm is that of the model on one process.

    Args:
        max_norm: gradients are scaled down to it, in place, where their norm is larger.
        norm_type: p of the norm, may be ``math.inf``.

    Returns:
        The norm before, [], float32 or wider.
    """
    every = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads: list[Any] = [p.grad for p in every if p.grad is not None]
    if not grads:
        return torch.zeros(())
    total = _joined([_of(grad, norm_type) for grad in grads], norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for grad in grads:
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            local.mul_(scale.to(device=local.device, dtype=local.dtype))
    return total


def _of(grad: Any, norm_type: float) -> Tensor:
    """The norm of one gradient, over all ranks that hold a part of it."""
    norm: Tensor
    if not isinstance(grad, DTensor):
        norm = torch.linalg.vector_norm(grad.detach().to(_wide(grad)), norm_type)
        return norm
    local = grad.to_local().detach()
    norm = torch.linalg.vector_norm(local.to(_wide(local)), norm_type) if local.numel() else local.new_zeros((), dtype=_wide(local))
    part = norm if math.isinf(norm_type) else norm.pow(norm_type)
    for dim, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ValueError(f"a gradient is a {placement} over the mesh: reduce it before it is clipped")
        if not placement.is_replicate():  # a Shard, or what FSDP makes of one
            dist.all_reduce(part, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group=grad.device_mesh.get_group(dim))
    return part if math.isinf(norm_type) else part.pow(1 / norm_type)


def _joined(norms: list[Tensor], norm_type: float) -> Tensor:
    device = norms[0].device
    total: Tensor = torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), norm_type)
    return total


def _wide(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
