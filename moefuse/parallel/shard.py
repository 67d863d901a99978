"""Turning the Parameters of experts into DTensors of which each rank holds its experts, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from moefuse.parallel import state, views
from moefuse.parallel.copies import OnGradient, watch
from moefuse.parallel.find import Listed, Site, Stacked
from moefuse.parallel.placement import Placement
from moefuse.parallel.table import Table
from moefuse.parallel.units import Cut
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
        layer: for people.
        replicated: whether the ranks of the first dimension of the mesh have the same experts.
        on_gradient: what is done in each backward pass with gradients of Parameters; see ``copies.py``.
    """

    mesh: DeviceMesh
    placement: Placement
    terms: str
    slices: Slices | None = None
    layer: str = ""
    replicated: bool = False
    on_gradient: OnGradient | None = None

    @property
    def mine(self) -> tuple[int, ...]:
        """The experts of this rank."""
        return self.placement.ranks[Terms.parse(self.terms).group.rank if self.terms else 0]

    @property
    def experts(self) -> int:
        """E."""
        return self.placement.experts

    @property
    def slots(self) -> int:
        """How many rows this rank holds: its experts, and empty ones where the placement is not that of a DTensor."""
        return len(self.mine) if self.placement.in_order else self.placement.slots

    @functools.cached_property
    def table(self) -> Table:
        """Where each expert is."""
        return Table(self.placement.table(), self.layer)

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

    def spans(self, name: str, shape: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]]:
        """Of one expert's Parameter [...], what this rank holds: (dimension, [(start, stop, where it stands here)])."""
        cut = self.cut(name)
        if cut is None or self.slices is None:
            return 0, [(0, shape[0], 0)]
        group = Terms.parse(self.slices.terms).group
        size = shape[cut.axis] // (cut.blocks * group.size)
        starts = [(block * group.size + group.rank) * size for block in range(cut.blocks)]
        return cut.axis, [(start, start + size, block * size) for block, start in enumerate(starts)]

    def of(self, name: str) -> views.Of:
        """How a Parameter is gathered."""
        cut = self.cut(name)
        slices = None if cut is None or self.slices is None else (cut.axis + 1, cut.blocks, self.slices.terms)
        return ((self.table, self.placement.slots, self.terms) if self.terms else None), slices, self.mesh.ndim

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
            table, slots, terms = experts
            out = all_rows(Terms.parse(terms).group, out, table.on(out.device), slots)
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


@dataclass(frozen=True)
class Held:
    """What a module holds in the place of experts' Parameters; an attribute of its class, which is its own.

    Attributes:
        names: of each Parameter of the experts of which ranks hold parts (a path from an expert, if they are a list), the module's own.
        numbers: the names of the experts in a list; None for stacked ones.
        order: of each module whose Parameters were taken, by its path from here, the names in their order.
    """

    where: Where
    names: Mapping[str, str]
    numbers: tuple[str, ...] | None = None
    order: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def keys(self, name: str) -> list[str]:
        """The keys that a checkpoint of the model has for one of ``names``, from here."""
        return [name] if self.numbers is None else [f"{number}.{name}" for number in self.numbers]


_HELD = "_moefuse_held"


def held_of(module: nn.Module) -> Held | None:
    """What a module holds, if its experts are spread."""
    return getattr(type(module), _HELD, None)


def shard(site: Site, where: Where) -> None:
    """Replace the Parameters of one layer's experts by those of this rank, in place."""
    held = _held(site, where)
    if isinstance(site, Stacked):
        _shard_stacked(site, held)
    else:
        _shard_listed(site, held)


def _held(site: Site, where: Where) -> Held:
    moved = [name for name in site.names if not where.stays(name)]
    if isinstance(site, Stacked):
        return Held(where, {name: name for name in moved})
    numbers = tuple(name for name, _ in site.module.named_children())
    order = {
        f"{number}.{path}".rstrip("."): tuple(inner._parameters)
        for number, item in zip(numbers, site.items, strict=True)
        for path, inner in item.named_modules()
    }
    return Held(where, {path: stacked_name(path) for path in moved}, numbers, order)


def _body(kind: type[nn.Module], held: Held) -> dict[str, Any]:
    """What the class of a module that holds experts has: state with the model's keys, and what hangs on Parameters stays with new ones."""
    if held.numbers is None:
        save, load = state.keys_of_stacked(held.names, held.where)
    else:
        save, load = state.keys_of_listed(held.names, held.numbers, held.where)

    def apply(self: Any, function: Any, recurse: bool = True) -> Any:
        kind._apply(self, function, recurse)
        _settle(self)
        return self

    def setstate(self: Any, found: dict[str, Any]) -> None:
        kind.__setstate__(self, found)
        _settle(self)

    return {**state.methods(kind, save, load, _settle), _HELD: held, "_apply": apply, "__setstate__": setstate}


def _settle(module: nn.Module) -> None:
    """Have for the Parameters that a module has now what does not come with them: a table on their device, empty slots, hooks.

    Slots behind a rank's own experts are read where a region is verified, and ``to_empty`` leaves anything in them, such as NaN.
    """
    held = held_of(module)
    if held is None:
        return
    where = held.where
    parameters: list[Any] = [p for name in held.names.values() if isinstance(p := module._parameters.get(name), DTensor)]
    for parameter in parameters:
        local, behind = parameter.to_local(), len(where.mine) - state.slots_here(parameter, where).start
        if where.terms:
            where.table.ready(local.device)
        with torch.no_grad():
            local[max(behind, 0) :].zero_()
    if where.on_gradient is not None:
        # Where FSDP has sharded them once more, it averages over its ranks.
        watch([p for p in parameters if len(p.placements) == where.mesh.ndim], where.on_gradient)


def _shard_stacked(site: Stacked, held: Held) -> None:
    where = held.where
    for name in held.names:
        parameter: Any = site.module._parameters[name]
        rows = parameter.detach()[list(where.mine)]
        site.module._parameters[name] = like(where.sharded(name, rows, parameter), parameter)
    hold(site.module, held)


def hold(module: nn.Module, held: Held, body: Mapping[str, Any] | None = None) -> None:
    """Let a module read its Parameters, of which this rank has a part, as full ones; ``body``: what else its class has."""
    properties = {name: _reader(name, held.where.of(name)) for name in held.names}
    views.with_properties(module, {**properties, **_place(held)}, {**_body(type(module), held), **(body or {})})
    _settle(module)


def _place(held: Held) -> dict[str, Callable[[Any], Tensor]]:
    """The table, as an attribute."""
    if not held.where.terms:
        return {}
    first = next(iter(held.names.values()))
    return {views.PLACE: lambda module: held.where.table.on(module._parameters[first].to_local().device)}


def _reader(name: str, of: views.Of) -> Callable[[Any], Tensor]:
    return lambda module: views.full(module, name, of)


def _shard_listed(site: Listed, held: Held) -> None:
    """One Parameter [E, ...] for each role, held by the list; an expert's attribute is its row."""
    where = held.where
    for path, name in held.names.items():
        every = [dict(item.named_parameters())[path] for item in site.items]
        rows = torch.stack([every[e].detach() for e in where.mine]) if where.mine else every[0].detach().new_empty((0, *every[0].shape))
        site.module.register_parameter(name, like(where.sharded(path, rows, every[0]), every[0]))
    owners: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for expert, item in enumerate(site.items):
        for path in held.names:
            inner, _, own = path.rpartition(".")
            owners.setdefault((expert, inner), []).append((own, path))
            del item.get_submodule(inner)._parameters[own]
    holder = site.module
    for (expert, inner), names in owners.items():
        module = site.items[expert].get_submodule(inner)
        object.__setattr__(module, HOLDER, (holder,))
        views.with_properties(module, {own: _row_reader(held.names[path], expert, where.of(path)) for own, path in names})
    views.with_properties(holder, _place(held), _body(type(holder), held))
    _settle(holder)


HOLDER = "_moefuse_holder"


def _row_reader(name: str, expert: int, of: views.Of) -> Callable[[Any], Tensor]:
    return lambda module: views.full(getattr(module, HOLDER)[0], name, of)[expert]


def stacked_name(path: str) -> str:
    """Of the Parameter [E, ...] that a list of experts holds for one path."""
    return "stacked_" + path.replace(".", "_")


def sharded_names(module: nn.Module) -> list[str]:
    """Of a module whose experts are sharded: its own Parameters of which ranks hold parts."""
    return [name for name, parameter in module._parameters.items() if parameter is not None and isinstance(parameter.data, DTensor)]


def like(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """With the attributes that a library has put on the old one; torch marks distributed Parameters by one."""
    new.__dict__.update({name: value for name, value in old.__dict__.items() if name != "_is_param"})
    return new


def _strides(shape: torch.Size) -> tuple[int, ...]:
    out = [1]
    for size in reversed(shape[1:]):
        out.insert(0, out[0] * size)
    return tuple(out)
