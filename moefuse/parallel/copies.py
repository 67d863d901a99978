"""Ranks with the same experts and other tokens: the gradients of these copies are averaged.

There are such ranks where a mesh has more ranks than experts, so that every E of them have all, and where the experts of an "ep" dimension
are there once for each rank of a "dp" dimension. Tokens stay among the ranks that share one copy.

Gradients are averaged when a backward pass ends, in the order in which the Parameters were spread: in which order they become ready may
differ from rank to rank, and torch's collectives are matched by their order alone. Averaging twice changes nothing, so gradients may be
accumulated.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.parallel.meshes import Grid
from moefuse.runtime.collectives import all_reduce
from moefuse.runtime.peers import lost_peers

_numbers = itertools.count()


class _Pending:
    """What one backward pass has to average when it ends, by the number of the Parameter. The pass holds it, whether it ends or fails."""

    def __init__(self) -> None:
        self.calls: dict[int, Callable[[], None]] = {}

    def run(self) -> None:
        for number in sorted(self.calls):
            self.calls[number]()


_pending: weakref.WeakValueDictionary[int, _Pending] = weakref.WeakValueDictionary()
"""Of each backward pass that is running: checkpoints may run one inside of another."""


OnGradient = Callable[[], Callable[[Tensor], None]]
"""Makes for one Parameter what is called in each backward pass when its gradient is there."""


def averaging(layer: str, at: Grid) -> OnGradient:
    """Gradients of a layer's experts are the mean over those with copies of them when a backward pass has ended."""

    def made() -> Callable[[Tensor], None]:
        number = next(_numbers)
        return lambda parameter: _when_done(number, lambda: _mean(layer, parameter, at.others, at.copies))

    return made


def warning_of_others(mesh: DeviceMesh) -> OnGradient:
    """Say once, where nobody averages, that the job has more ranks than the mesh."""
    roles = ("dp", *(mesh.mesh_dim_names or ("ep",)))
    said = [mesh.size() == dist.get_world_size()]

    def warn(_: Tensor) -> None:
        if said[-1]:
            return
        said.append(True)
        warnings.warn(
            f"experts are spread over {mesh.size()} of {dist.get_world_size()} ranks, and nothing averages their gradients with those of "
            f"other ranks that have the same: call moefuse.parallelize(model, mesh, experts={roles!r}) with a mesh of that dimension, too, "
            "or let fully_shard shard them over it; ranks of a pipeline, which have other layers, may ignore this",
            stacklevel=2,
        )

    return lambda: warn


def watch(parameters: Sequence[nn.Parameter], on_gradient: OnGradient) -> None:
    """Do so for these Parameters, in an order that is the same on all ranks; those that are watched already are left alone.

    What is frozen is watched as well, for it may be thawed. A copy of a Parameter has no hooks.
    """
    for parameter in parameters:
        if not parameter.is_floating_point() or any(hasattr(hook, _OURS) for hook in _torch_private.hooks_of_gradients(parameter)):
            continue
        hook: Callable[[Tensor], None] = torch.compiler.disable(on_gradient())
        setattr(hook, _OURS, True)
        wants = parameter.requires_grad
        parameter.requires_grad_(True)  # else torch takes no hook
        parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(wants)


_OURS = "_moefuse_on_gradient"


def _when_done(number: int, call: Callable[[], None]) -> None:
    """Run ``call`` at the end of the backward pass that is running, behind those with smaller numbers."""
    this = _torch_private.running_backward()
    pending = _pending.get(this)
    if pending is None:
        pending = _pending[this] = _Pending()
        _torch_private.when_backward_ends(pending.run)
    pending.calls[number] = call


def _mean(name: str, parameter: Tensor, group: Any, count: int) -> None:
    grad: Any = parameter.grad
    if grad is None:
        return
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    with torch.no_grad(), lost_peers(name, "experts that other ranks have as well"):
        total = local.contiguous()
        all_reduce(total, group)
        local.copy_(total.mul_(1 / count))
