"""Turning the Parameters of experts into DTensors of which each rank holds its experts, and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel import away, state, views
from moefuse.parallel.checks import in_optimizer
from moefuse.parallel.copies import watch
from moefuse.parallel.find import Listed, Site, Stacked
from moefuse.parallel.members import (
    HOLDER,
    MEMBER,
    Member,
    copying,
    freezing,
    holder_of,
    keeping,
    listing,
    member_of,
    members_of,
    refuse_set,
    unwrapped,
)
from moefuse.parallel.where import Where
from moefuse.program.weights import READ, Weight


@dataclass(frozen=True)
class Held:
    """What a module holds in the place of experts' Parameters; an attribute of it, and of its copies.

    Attributes:
        names: of each Parameter of the experts of which ranks hold parts (a path from an expert, if they are a list), the module's own.
        listed: whether the experts are modules, which know their rows (``members.py``), and not stacked.
    """

    where: Where
    names: Mapping[str, str]
    listed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self


HELD = "_moefuse_held"


def held_of(module: nn.Module) -> Held | None:
    """What a module holds, if its experts are spread. A list that was made of a part of another one has its class and holds nothing."""
    return vars(module).get(HELD)


def _where(module: nn.Module) -> Where:
    held: Held = vars(module)[HELD]
    return held.where


def holding(where: Where) -> dict[nn.Module, Held]:
    """The modules that hold rows of a layer, copies of the model's too, in the order in which they came to be: the same on all ranks."""
    where.holders[:] = [weak for weak in where.holders if weak() is not None]
    found = {module: held_of(module) for weak in where.holders if (module := weak()) is not None}
    return {module: held for module, held in found.items() if held is not None and held.where is where}


def holders_of(model: nn.Module) -> dict[nn.Module, Held]:
    """All modules that hold what a model reads, in its order: also a list that is not in the model any more, while an expert of it is."""
    found: dict[nn.Module, Held] = {}
    for module in model.modules():
        for holder in (module, *(holder_of(module) for _ in range(member_of(module) is not None))):
            held = held_of(holder)
            if held is not None:
                found.setdefault(holder, held)
    return found


def keys_of(model: nn.Module) -> dict[tuple[nn.Module, str], dict[int, list[str]]]:
    """Of each Parameter of :func:`holders_of`, by its name there, the keys that a state of the model has for it; of a list by expert.

    Stacked experts are under -1. An expert that is nowhere in the model has none.
    """
    found: dict[tuple[nn.Module, str], dict[int, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        held = held_of(module)
        for name in held.names if held is not None and not held.listed else ():
            found.setdefault((module, name), {}).setdefault(-1, []).append(unwrapped(f"{path}.".lstrip(".")) + name)
    for prefix, module, member in members_of(model):
        for own, path in member.names.items():
            found.setdefault((holder_of(module), path), {}).setdefault(member.expert, []).append(prefix + own)
    return found


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
    return Held(where, {path: stacked_name(path) for path in moved}, listed=True)


def _body(kind: type[nn.Module], held: Held) -> dict[str, Any]:
    """What the class of a module that holds experts has: state with the model's keys, and what hangs on Parameters stays with new ones.

    Layers of a kind share it: of ``held`` it reads what :func:`_key` has.
    """
    of_state = state.of_list if held.listed else state.of_stacked

    def apply(self: Any, function: Any, recurse: bool = True) -> Any:
        vars(self).pop(views.PARTS, None)  # nothing is to know Parameters that torch swaps
        made = _converted(self, function)
        kind._apply(self, function, recurse)
        self._parameters.update(made)
        _settle(self)
        return self

    def setstate(self: Any, found: dict[str, Any]) -> None:
        kind.__setstate__(self, found)
        _settle(self)

    def getstate(self: Any) -> Any:
        found = kind.__getstate__(self)
        return {name: value for name, value in found.items() if name != views.PARTS} if isinstance(found, dict) else found

    parametrised = {} if held.listed else away.body(kind, held.names)
    copied = {"__getstate__": getstate, "__setstate__": setstate}
    return {**of_state(kind, held.names, _where, _settle), **parametrised, **copied, "_apply": apply, READ: _weights}


def _weights(module: nn.Module) -> dict[str, Weight | None]:
    """The weights that stacked experts read, of all ranks; what a list holds is read by its experts (:func:`_rows`), and not by it."""
    held = held_of(module)
    if held is None:
        return {}
    if held.listed:
        return dict.fromkeys(held.names.values())
    known = {name: p for name in held.names if (p := module._parameters.get(name)) is not None}
    return {name: (p, (held.where.experts, *p.shape[1:])) for name, p in known.items()}


def _rows(module: nn.Module) -> dict[str, Weight | None]:
    """The weights that a module in an expert of a list reads: its rows of what the list holds."""
    member = member_of(module)
    names = {} if member is None else member.names
    stacks = {own: _stack(holder_of(module), path) for own, path in names.items()}
    return {own: (stack, tuple(stack.shape[1:])) for own, stack in stacks.items() if stack is not None}


def _converted(module: nn.Module, function: Callable[[Any], Any]) -> dict[str, nn.Parameter]:
    """What ``Module._apply`` makes of Parameters that compiled code knows, which it cannot swap; their places are empty until then.

    What FSDP has sharded once more is FSDP's to convert.
    """
    held = held_of(module)
    if held is None:
        return {}
    every: dict[str, Any] = {name: module._parameters.get(name) for name in held.names.values()}
    ours = {name: p for name, p in every.items() if isinstance(p, DTensor)}
    known = {name: p for name, p in ours.items() if len(p.placements) == held.where.mesh.ndim and weakref.getweakrefcount(p)}
    optimizer = in_optimizer(set(map(id, known.values())))
    if optimizer is not None:
        first = next(iter(known))
        raise ParallelError(
            f"{first} of {type(module).__name__} is in an optimizer ({optimizer}) and in compiled code, which know it by its identity: "
            "convert or move the model before its first compiled call, or call torch._dynamo.reset() first"
        )
    made = {}
    with torch.no_grad():
        for name, parameter in known.items():
            made[name] = like(nn.Parameter(function(parameter), requires_grad=parameter.requires_grad), parameter)  # type: ignore[arg-type]
            made[name].grad = None if parameter.grad is None else function(parameter.grad)
            module._parameters[name] = None
    return made


def _key(held: Held) -> Hashable:
    return held.listed, tuple(held.names.items()), bool(held.where.terms)


def _know(module: nn.Module, held: Held) -> None:
    object.__setattr__(module, HELD, held)
    object.__setattr__(module, views.WAYS, views.Ways({own: held.where.of(name) for name, own in held.names.items()}, held.where.hottest))


def _settle(module: nn.Module) -> None:
    """Have for the Parameters that a module has now what does not come with them: a table on their device, empty slots, hooks.

    Slots behind a rank's own experts are read where a region is verified, and ``to_empty`` leaves anything in them, such as NaN.
    """
    held = held_of(module)
    if held is None:
        return
    where = held.where
    if module not in holding(where):
        where.holders.append(weakref.ref(module))
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
    """Let a module read its Parameters, of which this rank has a part, as full ones; ``body``: what else its class has, which follows from
    what that was before."""
    _know(module, held)
    properties = {name: _reader(name) for name in held.names}
    key = (*(body or ()), _key(held))
    views.with_properties(module, {**properties, **_place(held)}, {**_body(type(module), held), **(body or {})}, key)
    _settle(module)


def _place(held: Held) -> dict[str, Callable[[Any], Tensor]]:
    """The table, as an attribute."""
    if not held.where.terms:
        return {}
    first = next(iter(held.names.values()))

    def place(module: Any) -> Tensor:
        if first not in module._parameters:
            raise AttributeError(f"{type(module).__name__} was made of a list of experts, and does not hold their weights")
        return _where(module).table.on(module._parameters[first].to_local().device)

    return {views.PLACE: place}


def _reader(name: str) -> Callable[[Any], Tensor]:
    return lambda module: views.full(module, name)


def _shard_listed(site: Listed, held: Held) -> None:
    """One Parameter [E, ...] for each role, held by the list; an expert's attribute is its row."""
    where = held.where
    for path, name in held.names.items():
        every = [dict(item.named_parameters())[path] for item in site.items]
        rows = torch.stack([every[e].detach() for e in where.mine]) if where.mine else every[0].detach().new_empty((0, *every[0].shape))
        site.module.register_parameter(name, like(where.sharded(path, rows, every[0]), every[0]))
    holder = site.module
    taken = dict.fromkeys(path.rpartition(".")[0] for path in held.names)
    # One class for the experts of one class: a loop over them runs them alike.
    kinds = {kind: views.subclass(kind, _of_expert(kind), "an expert") for kind in {type(item) for item in site.items if "" not in taken}}
    for expert, item in enumerate(site.items):
        for inner in taken:
            _take(item.get_submodule(inner), inner, expert, held)
            object.__setattr__(item.get_submodule(inner), HOLDER, {"": holder})
        if "" not in taken:
            object.__setattr__(item, HOLDER, {"": holder})
            item.__class__ = kinds[type(item)]
    _know(holder, held)
    views.with_properties(holder, _place(held), _body(type(holder), held), _key(held))
    _settle(holder)


def _take(module: nn.Module, inner: str, expert: int, held: Held) -> None:
    """Have a module in an expert read its rows of what the list holds."""
    paths = {own: f"{inner}.{own}".lstrip(".") for own in module._parameters}
    member = Member(expert, inner, {own: path for own, path in paths.items() if path in held.names}, tuple(paths))
    for own in member.names:
        del module._parameters[own]
    kind = type(module)
    body = {**state.of_member(kind, member, held.names, _where), **_of_expert(kind), **keeping(kind, _layer), MEMBER: member, READ: _rows}
    readers = {own: _row_reader(held.names[path], str(expert)) for own, path in member.names.items()}
    views.with_properties(module, readers, body, (expert, inner, tuple(member.names.items()), member.order, _key(held)), _refuse)


def _refuse(module: nn.Module, name: str) -> NoReturn:
    refuse_set(module, name, _layer(module))


def _of_expert(kind: type[nn.Module]) -> dict[str, Any]:
    return {**freezing(kind, _layer), **listing(kind, _layer, _stack), **copying(kind, _row)}


def _layer(expert: nn.Module) -> str:
    return _where(holder_of(expert)).layer


def _stack(holder: nn.Module, path: str) -> Any:
    """What a list holds for its experts at a path from one."""
    held: Held = vars(holder)[HELD]
    return holder._parameters[held.names[path]]


def _row(holder: nn.Module, path: str, expert: int) -> nn.Parameter:
    """What an expert of a list has at a path, in full; a collective call."""
    parameter, where = _stack(holder, path), _where(holder)
    row = where.whole(path, state.held_here(parameter, where))[expert]
    return like(nn.Parameter(row.clone(), requires_grad=parameter.requires_grad), parameter)


def _row_reader(name: str, expert: str) -> Callable[[Any], Tensor]:
    return lambda module: views.full(getattr(module, HOLDER)[""], name)[int(expert)]  # a number would be a symbol (``views.Of``)


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
