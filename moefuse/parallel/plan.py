"""What ``moefuse.parallelize`` decided, and what other libraries ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel.placement import Placement
from moefuse.runtime.groups import Terms


@dataclass(frozen=True)
class Layer:
    """One layer's experts: where they are, and how tokens get there.

    Attributes:
        here: the experts of which this rank has something.
        terms: for each dimension of the mesh, how tokens travel over it.
    """

    name: str
    placement: Placement
    here: tuple[int, ...]
    terms: tuple[Terms, ...]

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(terms.describe(len(self.here), self.placement.experts) for terms in self.terms)}"


@dataclass(frozen=True)
class Plan:
    """What :func:`parallelize` decided, the same on every rank but for which experts are here."""

    layers: tuple[Layer, ...] = field(default=())
    _held: tuple[tuple[nn.Module, str], ...] = field(default=(), repr=False, compare=False)

    @property
    def parameters(self) -> set[nn.Parameter]:
        """The sharded Parameters of experts: ``fully_shard(block, mesh=mesh, ignored_params=plan.parameters)``."""
        return {parameter for module, name in self._held if (parameter := module._parameters[name]) is not None}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """All Parameters in two groups, experts and the rest, for optimizers that refuse both in one call: ``foreach``, ``fused``."""
        experts = self.parameters
        rest = [p for p in model.parameters() if p not in experts]
        return [{"params": rest}, {"params": [p for p in model.parameters() if p in experts]}]

    def shard_placement_fn(self, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
        """For ``fully_shard(block, mesh=all_ranks, shard_placement_fn=...)``: experts are sharded over ``mesh``, the rest over all ranks.

        Experts in a list, or beside their router in one module, need it; those in a module of their own take a ``fully_shard`` of it.

        Args:
            mesh: the ranks with the same experts, one dimension beside that of :func:`parallelize`.

        Raises:
            ParallelError: this torch has one mesh for all Parameters of a call.
        """
        found = _torch_private.sharded_over(mesh)
        if found is None:
            raise ParallelError(
                f"fully_shard of torch {torch.__version__} takes one mesh for all Parameters of a module: give experts a fully_shard of "
                "their own, or use moefuse.parallelize(model, mesh, experts=('dp', 'ep'))"
            )
        return lambda parameter: found if parameter in self.parameters else None

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))
