"""Turning the Parameters of experts into DTensors of which each rank holds its experts, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse.parallel import members, state, views
from moefuse.parallel.copies import watch
from moefuse.parallel.find import Listed, Site, Stacked
from moefuse.parallel.where import Where


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
        place = ".".join(part for part in ((held.numbers or ())[expert], inner) if part)
        body = {**members.methods(type(module), where.layer, place), **members.freezing(type(module), where.layer)}
        views.with_properties(module, {own: _row_reader(held.names[path], expert, where.of(path)) for own, path in names}, body)
    around = [item for expert, item in enumerate(site.items) if (expert, "") not in owners]
    # One class for those of one class: a loop over experts runs them alike.
    kinds = {kind: views.subclass(kind, members.freezing(kind, where.layer)) for kind in {type(item) for item in around}}
    for item in around:
        item.__class__ = kinds[type(item)]
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
