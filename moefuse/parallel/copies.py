"""Ranks with the same experts and other tokens: the gradients of these copies are averaged.

There are such ranks where a mesh has more ranks than experts, so that every E of them have all, and where the experts of an "ep" dimension
are there once for each rank of a "dp" dimension. Tokens stay among the ranks that share one copy.

Gradients are averaged when a backward pass ends, in the order in which the Parameters were spread: in which order they become ready may
differ from rank to rank, and torch's collectives are matched by their order alone. Averaging twice changes nothing, so gradients may be
accumulated.
"""

from __future__ import annotations

import copy
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


class Averaged:
    """Parameters whose gradients are the mean over a group of ``count`` ranks when a backward pass has ended.

    Held by their module, so that a copy of it (``copy.deepcopy``) averages as well: a copy of a Parameter has no hooks.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], group: Any, count: int) -> None:
        """``parameters``: (name for errors, Parameter), in an order that is the same on all ranks."""
        self.parameters, self.group, self.count = list(parameters), group, count
        for name, parameter in self.parameters:
            _on_gradient(parameter, self._ready(next(_numbers), name))

    def _ready(self, number: int, name: str) -> Callable[[Tensor], None]:
        return lambda parameter: _when_done(number, lambda: _mean(name, parameter, self.group, self.count))

    def __deepcopy__(self, memo: dict[int, Any]) -> Averaged:
        return Averaged([(name, copy.deepcopy(p, memo)) for name, p in self.parameters], self.group, self.count)


def watch(module: nn.Module, layer: str, names: Sequence[str], at: Grid, averages: bool, otherwise: Callable[[Tensor], None]) -> None:
    """Average the gradients of a module's sharded Parameters, if there are copies of them with other tokens.

    Args:
        otherwise: called in a backward pass, if there are none. A Parameter that FSDP has sharded is another one than this, and does not.
    """
    parameters = [(layer, p) for name in names if (p := module._parameters[name]) is not None]
    if averages:
        module._moefuse_averaged = Averaged(parameters, at.others, at.copies)  # type: ignore[assignment]
        return
    for _, parameter in parameters:
        _on_gradient(parameter, otherwise)


def warning_of_others(mesh: DeviceMesh) -> Callable[[Tensor], None]:
    """To be called in a backward pass: says once that the job has more ranks than the mesh, and none of them averages with the others."""
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

    return warn


def _on_gradient(parameter: nn.Parameter, ready: Callable[[Tensor], None]) -> None:
    wants = parameter.requires_grad
    parameter.requires_grad_(True)  # what is frozen takes no hook, and may be thawed
    parameter.register_post_accumulate_grad_hook(torch.compiler.disable(ready))
    parameter.requires_grad_(wants)


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
