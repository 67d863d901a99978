"""What ``moefuse.parallelize`` decided, and what other libraries ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.parallel import moves
from moefuse.parallel.balance import ENOUGH
from moefuse.parallel.placement import Placement
from moefuse.parallel.where import Where
from moefuse.runtime.groups import Terms


@dataclass(frozen=True)
class Layer:
    """One layer's experts: where they are, and how tokens get there.

    Attributes:
        here: the experts of which this rank has something.
        copied: experts that all ranks have copies of, for inference.
        terms: for each dimension of the mesh, how tokens travel over it.
    """

    name: str
    placement: Placement
    here: tuple[int, ...]
    terms: tuple[Terms, ...]
    copied: tuple[int, ...] = ()

    def __str__(self) -> str:
        copied = f", copies of {', '.join(map(str, self.copied))} on all ranks" if self.copied else ""
        return f"{self.name}: {', '.join(terms.describe(len(self.here), self.placement.experts) for terms in self.terms)}{copied}"


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

    def balance(self, load: moves.Load, *, layers: int | None = None, enough: float = ENOUGH, copies: int = 0) -> Plan:
        """Move experts between ranks, by the load that :class:`moefuse.load_of` has counted, so that all ranks take about as long.

        A collective call between two calls of the model, which is for inference: every rank makes it, with what its own tokens chose.
        Weights and tables keep their addresses, and what is compiled, or in a CUDA graph, goes on. Each rank keeps as many experts as it
        had. ``state_dict`` is a collective call behind it.

        Args:
            load: layer -> counts [calls, E], or [E]; layers that are not in it stay as they are.
            layers: at most so many are moved, those that gain most: the others' turn is the next call's. None: all.
            enough: a layer stays as it is whose busiest rank takes at most so many times what ranks take on average.
            copies: so many of a layer's hottest experts all ranks may have, each for its own tokens, where its busiest rank is done earlier
                then than by moving alone: where one expert has more to do than a rank has on average. If any layer gains so, all layers get
                room for as many, and weights other addresses: what is compiled for inference is compiled once more. What is written to
                experts makes copies old, which are not read then (a warning; :meth:`refresh`). CUDA graphs that a user captures do not read
                them. 0: none, and earlier ones go.

        Returns:
            The plan as it is now.

        Raises:
            ParallelError: arguments that differ between ranks; counts that do not fit; unequal numbers of experts on the ranks; gradients,
                an optimizer, or FSDP's shards, which would stay behind; ``copies`` of slices, of experts that see the same tokens on all
                ranks, or behind a captured CUDA graph.
        """
        found = moves.planned((module for module, _ in self._held), load, moves.Asked(enough, layers, copies))
        moves.carry_out(found)
        now = {where.layer: where for where in found.every}
        return replace(self, layers=tuple(_moved(layer, now.get(layer.name)) for layer in self.layers))

    def refresh(self) -> None:
        """Make the copies of :meth:`balance` anew of what experts are now, where something was written past torch's versions (``.data``) or
        copies are old; a collective call. Nothing is compiled again."""
        moves.refresh(module for module, _ in self._held)

    def __str__(self) -> str:
        return "\n".join(map(str, self.layers))


def _moved(layer: Layer, where: Where | None) -> Layer:
    if where is None:
        return layer
    terms = tuple(replace(t, placement="balanced") for t in layer.terms) if where.moved else layer.terms
    return replace(layer, placement=where.placement, here=where.mine, terms=terms, copied=where.hottest.experts)
