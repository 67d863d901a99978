"""Turning the Parameters of experts into DTensors of which each rank holds its experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moefuse.parallel import state, views
from moefuse.parallel.find import Listed, Site, Stacked
from moefuse.parallel.placement import Placement


@dataclass(frozen=True)
class Where:
    """The mesh, what each of its ranks holds, and the terms under which tokens travel."""

    mesh: DeviceMesh
    placement: Placement
    terms: str

    @property
    def mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.placement.ranks[self.mesh.get_local_rank()]

    def sharded(self, rows: Tensor, like: nn.Parameter) -> nn.Parameter:
        """A Parameter [E, ...] of which this rank holds ``rows``; with gaps between ranks, [P * L, ...] with empty rows."""
        experts = self.placement.experts
        if not self.placement.in_order:
            empty = rows.new_zeros((self.placement.slots - rows.shape[0], *rows.shape[1:]))
            rows, experts = torch.cat([rows, empty]), self.placement.world * self.placement.slots
        shape = torch.Size((experts, *rows.shape[1:]))
        local = DTensor.from_local(rows.contiguous(), self.mesh, [Shard(0)], run_check=False, shape=shape, stride=_strides(shape))
        return nn.Parameter(local, requires_grad=like.requires_grad)


def shard(site: Site, where: Where) -> None:
    """Replace the Parameters of one layer's experts by those of this rank, in place."""
    device = next(iter(p for p in site.module.parameters())).device
    table = torch.tensor(where.placement.table(), dtype=torch.int32, device="cpu" if device.type == "meta" else device)
    site.module.register_buffer(views.PLACE, table, persistent=False)
    if isinstance(site, Stacked):
        _shard_stacked(site, where)
        state.keys_of_stacked(site, where.mine)
    else:
        _shard_listed(site, where)
        state.keys_of_listed(site, {path: stacked_name(path) for path in site.names}, where.mine)


def _shard_stacked(site: Stacked, where: Where) -> None:
    slots, terms = where.placement.slots, where.terms
    properties: dict[str, Callable[[Any], Tensor]] = {}
    for name in site.names:
        parameter: Any = site.module._parameters[name]
        rows = parameter.detach()[list(where.mine)]
        site.module._parameters[name] = _like(where.sharded(rows, parameter), parameter)
        properties[name] = _reader(name, slots, terms)
    views.with_properties(site.module, properties)


def _reader(name: str, slots: int, terms: str) -> Callable[[Any], Tensor]:
    return lambda module: views.full(module, name, slots, terms)


def _shard_listed(site: Listed, where: Where) -> None:
    """One Parameter [E, ...] for each role, held by the list; an expert's attribute is its row."""
    slots, terms = where.placement.slots, where.terms
    for path in site.names:
        held = [dict(item.named_parameters())[path] for item in site.items]
        rows = torch.stack([held[e].detach() for e in where.mine]) if where.mine else held[0].detach().new_empty((0, *held[0].shape))
        site.module.register_parameter(stacked_name(path), _like(where.sharded(rows, held[0]), held[0]))
    owners: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for expert, item in enumerate(site.items):
        for path in site.names:
            inner, _, own = path.rpartition(".")
            owners.setdefault((expert, inner), []).append((own, path))
            del item.get_submodule(inner)._parameters[own]
    holder = site.module
    for (expert, inner), names in owners.items():
        module = site.items[expert].get_submodule(inner)
        object.__setattr__(module, _HOLDER, (holder,))
        views.with_properties(module, {own: _row_reader(stacked_name(path), expert, slots, terms) for own, path in names})


_HOLDER = "_moefuse_holder"


def _row_reader(name: str, expert: int, slots: int, terms: str) -> Callable[[Any], Tensor]:
    return lambda module: views.full(getattr(module, _HOLDER)[0], name, slots, terms)[expert]


def stacked_name(path: str) -> str:
    """Of the Parameter [E, ...] that a list of experts holds for one path."""
    return "stacked_" + path.replace(".", "_")


def _like(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """With the attributes that a library has put on the old one."""
    new.__dict__.update(old.__dict__)
    return new


def _strides(shape: torch.Size) -> tuple[int, ...]:
    out = [1]
    for size in reversed(shape[1:]):
        out.insert(0, out[0] * size)
    return tuple(out)
