"""Turning the Parameters of experts into DTensors of which each rank holds its experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moefuse.parallel import state, views
from moefuse.parallel.find import Listed, Site, Stacked
from moefuse.parallel.placement import Placement
from moefuse.parallel.units import Cut
from moefuse.runtime import layers
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports.weights import all_rows, all_slices, slice_of


@dataclass(frozen=True)
class Slices:
    """Every rank of a mesh dimension has a part of each expert.

    Attributes:
        terms: under which tokens travel between them.
        cuts: of each Parameter, by its name in the site, where it is cut; None for one that every rank has whole.
    """

    terms: str
    cuts: Mapping[str, Cut | None]


@dataclass(frozen=True)
class Where:
    """The mesh, what each of its ranks holds, and the terms under which tokens travel.

    Attributes:
        terms: of tokens between ranks that have other experts; empty if every rank has all of them.
        slices: set if a dimension of the mesh, the last one, slices experts.
        replicated: whether the ranks of the first dimension of the mesh have the same experts.
    """

    mesh: DeviceMesh
    placement: Placement
    terms: str
    slices: Slices | None = None
    replicated: bool = False

    @property
    def mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.placement.ranks[Terms.parse(self.terms).group.rank if self.terms else 0]

    @property
    def slots(self) -> int:
        """How many rows this rank holds: its experts, and empty ones where the placement is not that of a DTensor."""
        return len(self.mine) if self.placement.in_order else self.placement.slots

    def cut(self, name: str) -> Cut | None:
        """Where a Parameter of the experts is cut."""
        return None if self.slices is None else self.slices.cuts[name]

    def stays(self, name: str) -> bool:
        """Whether every rank has all of a Parameter."""
        return not self.terms and self.cut(name) is None

    def part(self, name: str, rows: Tensor) -> Tensor:
        """Of ``rows`` [held, ...], this rank's experts in full, what this rank holds."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return rows
        group = Terms.parse(self.slices.terms).group
        return slice_of(rows, cut.axis + 1, cut.blocks, group.rank, group.size)

    def of(self, name: str) -> views.Of:
        """How a Parameter is gathered."""
        cut = self.cut(name)
        slices = None if cut is None or self.slices is None else (cut.axis + 1, cut.blocks, self.slices.terms)
        return ((self.placement.slots, self.terms) if self.terms else None), slices, self.mesh.ndim

    def sharded(self, name: str, rows: Tensor, like: nn.Parameter) -> nn.Parameter:
        """A Parameter [E, ...] of which this rank holds its part of ``rows``; with gaps between ranks, [P * L, ...] with empty rows."""
        experts = self.placement.experts
        if not self.placement.in_order:
            empty = rows.new_zeros((self.placement.slots - rows.shape[0], *rows.shape[1:]))
            rows, experts = torch.cat([rows, empty]), self.placement.world * self.placement.slots
        shape = torch.Size((experts, *rows.shape[1:]))
        local = self.part(name, rows).contiguous()
        made = DTensor.from_local(local, self.mesh, self._placements(name), run_check=False, shape=shape, stride=_strides(shape))
        return nn.Parameter(made, requires_grad=like.requires_grad)

    def as_torch_has_it(self, name: str) -> bool:
        """Whether a Parameter, as a DTensor, is the whole weights in their order: a checkpoint of it is the model's."""
        cut = self.cut(name)
        return self.placement.in_order and (cut is None or cut.blocks == 1)

    def whole(self, name: str, held: Tensor) -> Tensor:
        """[E, ...] of what the ranks hold of a Parameter; a collective call."""
        experts, slices, _ = self.of(name)
        out: Tensor = held
        if slices is not None:
            out = all_slices(Terms.parse(slices[2]).group, out, *slices[:2])
        if experts is not None:
            out = all_rows(Terms.parse(experts[1]).group, out, torch.tensor(self.placement.table(), device=out.device), experts[0])
        return out

    def in_order(self, name: str, held: Tensor) -> DTensor:
        """The same as a DTensor as torch has it: of which each rank holds the part that its placements say. A collective call."""
        return distribute_tensor(self.whole(name, held), self.mesh, self._placements(name), src_data_rank=None)

    def row(self, name: str, row: Tensor) -> Tensor:
        """One expert's Parameter of which this rank holds ``row``: that, if it is all, else a DTensor over those who slice it."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return row
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh[self.mesh.mesh_dim_names[-1]]  # type: ignore[index]
        if cut.blocks == 1:
            return DTensor.from_local(row, mesh, [Shard(cut.axis)], run_check=False)
        whole = all_slices(Terms.parse(self.slices.terms).group, row, cut.axis, cut.blocks)
        return distribute_tensor(whole, mesh, [Shard(cut.axis)], src_data_rank=None)

    def _placements(self, name: str) -> list[Shard | Replicate]:
        cut = self.cut(name)
        over: list[Shard | Replicate] = [Replicate()] if self.replicated else []
        over += [Shard(0)] if self.terms else []
        if self.slices is not None:
            over.append(Replicate() if cut is None else Shard(cut.axis + 1))
        return over


def shard(site: Site, where: Where) -> None:
    """Replace the Parameters of one layer's experts by those of this rank, in place."""
    device = next(iter(p for p in site.module.parameters())).device
    if where.terms:
        table = torch.tensor(where.placement.table(), dtype=torch.int32, device="cpu" if device.type == "meta" else device)
        site.module.register_buffer(views.PLACE, table, persistent=False)
        layers.remember(site.module, views.PLACE, site.layer or site.name)
    if isinstance(site, Stacked):
        _shard_stacked(site, where)
        state.keys_of_stacked(site, where)
    else:
        _shard_listed(site, where)
        state.keys_of_listed(site, {path: stacked_name(path) for path in site.names if not where.stays(path)}, where)


def _shard_stacked(site: Stacked, where: Where) -> None:
    properties: dict[str, Callable[[Any], Tensor]] = {}
    for name in site.names:
        if where.stays(name):
            continue
        parameter: Any = site.module._parameters[name]
        rows = parameter.detach()[list(where.mine)]
        site.module._parameters[name] = _like(where.sharded(name, rows, parameter), parameter)
        properties[name] = _reader(name, where.of(name))
    views.with_properties(site.module, properties)


def _reader(name: str, of: views.Of) -> Callable[[Any], Tensor]:
    return lambda module: views.full(module, name, of)


def _shard_listed(site: Listed, where: Where) -> None:
    """One Parameter [E, ...] for each role, held by the list; an expert's attribute is its row."""
    paths = [path for path in site.names if not where.stays(path)]
    for path in paths:
        held = [dict(item.named_parameters())[path] for item in site.items]
        rows = torch.stack([held[e].detach() for e in where.mine]) if where.mine else held[0].detach().new_empty((0, *held[0].shape))
        site.module.register_parameter(stacked_name(path), _like(where.sharded(path, rows, held[0]), held[0]))
    owners: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for expert, item in enumerate(site.items):
        for path in paths:
            inner, _, own = path.rpartition(".")
            owners.setdefault((expert, inner), []).append((own, path))
            del item.get_submodule(inner)._parameters[own]
    holder = site.module
    for (expert, inner), names in owners.items():
        module = site.items[expert].get_submodule(inner)
        object.__setattr__(module, _HOLDER, (holder,))
        views.with_properties(module, {own: _row_reader(stacked_name(path), expert, where.of(path)) for own, path in names})


_HOLDER = "_moefuse_holder"


def _row_reader(name: str, expert: int, of: views.Of) -> Callable[[Any], Tensor]:
    return lambda module: views.full(getattr(module, _HOLDER)[0], name, of)[expert]


def stacked_name(path: str) -> str:
    """Of the Parameter [E, ...] that a list of experts holds for one path."""
    return "stacked_" + path.replace(".", "_")


def sharded_names(module: nn.Module) -> list[str]:
    """Of a module whose experts are sharded: its own Parameters of which ranks hold parts."""
    return [name for name, parameter in module._parameters.items() if parameter is not None and isinstance(parameter.data, DTensor)]


def _like(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """With the attributes that a library has put on the old one."""
    new.__dict__.update(old.__dict__)
    return new


def _strides(shape: torch.Size) -> tuple[int, ...]:
    out = [1]
    for size in reversed(shape[1:]):
        out.insert(0, out[0] * size)
    return tuple(out)
