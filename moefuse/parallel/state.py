"""Checkpoints of sharded experts have the keys of the model: a list's experts by their numbers, each saved by the ranks that hold it.

``load_state_dict`` takes a checkpoint of the whole model (plain tensors, every rank takes its rows), or what ``state_dict`` gives here.
Stacked experts are DTensors of torch's own layout. Where ranks hold other rows than that says (a placement that is not in order, gate and
up projection one behind the other), they are brought in order when they are saved or loaded, so that all ranks have to do it. So are
those of lists and of such placements that FSDP has sharded once more.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel.hottest import Hottest
from moefuse.parallel.members import Member, check_whole, holder_of, members_of
from moefuse.runtime.collectives import all_gather
from moefuse.runtime.transports.allgather import padded


class Where(Protocol):
    """What a rank holds; see ``shard.py``."""

    @property
    def layer(self) -> str: ...

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def mine(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def moved(self) -> bool: ...

    @property
    def hottest(self) -> Hottest: ...

    def part(self, name: str, rows: Tensor) -> Tensor: ...

    def as_torch_has_it(self, name: str) -> bool: ...

    def whole(self, name: str, held: Tensor) -> Tensor: ...

    def in_order(self, name: str, held: Tensor) -> DTensor: ...

    def row(self, name: str, row: Tensor) -> Tensor: ...


Rows = dict[int, dict[int, Tensor]]
"""By the identity of a list's Parameter: of each expert that a state has here, its row."""

_whole: contextvars.ContextVar[bool | None] = contextvars.ContextVar("moefuse_whole_state", default=None)
"""Set where a state has the weights of all ranks: whether this rank keeps them."""
_known: contextvars.ContextVar[Rows | None] = contextvars.ContextVar("moefuse_rows_of_state", default=None)
"""Set while a list is saved, all of whose experts ask for their rows."""


def full_state_dict(model: nn.Module, keep: bool = True) -> dict[str, Any]:
    """The state of a model as it would be on one process: plain tensors on the CPU, with its own keys.

    A collective call: every rank of the mesh makes it. One weight at a time is whole on the ranks' devices.

    Args:
        keep: whether this rank needs it; else it takes part, and has an empty one.
    """
    token = _whole.set(keep)
    try:
        state = model.state_dict()
    finally:
        _whole.reset(token)
    known: dict[Hashable, Tensor] = {}
    found = {key: _plain(value, known if keep else None) for key, value in state.items()}
    return found if keep else {}


def _plain(value: Any, known: dict[Hashable, Tensor] | None) -> Any:
    """A tensor on the CPU, one that has several names once; ``known``: those that there are, None if it is not to be kept."""
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if isinstance(value, DTensor) else value.detach()
    if known is None or isinstance(value, DTensor) or not whole.numel():
        return whole.cpu() if known is not None else None
    return known.setdefault((whole.device, whole.data_ptr(), whole.dtype, whole.shape, whole.stride()), whole.cpu())


Settle = Callable[[nn.Module], None]
"""Called when a state has been loaded, which may have brought other Parameters (``assign=True``)."""


WhereOf = Callable[[nn.Module], Where]


def of_stacked(kind: type[nn.Module], names: Mapping[str, str], where_of: WhereOf, settle: Settle) -> dict[str, Any]:
    """Of a module with Parameters [E, ...] of which this rank has some rows, as methods of a subclass of ``kind``.

    Methods, and no hooks, go when the class goes.
    """

    def to_state(self: Any, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        kind._save_to_state_dict(self, state, prefix, keep_vars)
        where = where_of(self)
        for name in names:
            held = state.get(prefix + name)
            if not isinstance(held, DTensor):
                continue
            if _whole.get() is not None:
                state[prefix + name] = _full(name, held, where)
            elif not where.as_torch_has_it(name):
                state[prefix + name] = where.in_order(name, held_here(held, where))

    def from_state(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        where = where_of(self)
        for name in names:
            whole = state.get(prefix + name)
            if isinstance(whole, DTensor) and not where.as_torch_has_it(name):
                _check_current(whole, self._parameters[name], where)
                whole = whole.full_tensor()
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor) and len(whole) == where.experts:
                state[prefix + name] = _rows(self._parameters[name], where.part(name, whole[list(where.mine)]), where)
        kind._load_from_state_dict(self, state, prefix, *rest)
        settle(self)

    return {"_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def of_list(kind: type[nn.Module], names: Mapping[str, str], where_of: WhereOf, settle: Settle) -> dict[str, Any]:
    """Of a list that holds the Parameter [E, ...] of each path from an expert, ``names``: its experts save and load their rows."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _known.set({})
        try:
            return kind.state_dict(self, *args, **kwargs)
        finally:
            _known.reset(token)

    def to_state(self: Any, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        kind._save_to_state_dict(self, state, prefix, keep_vars)
        for name in names.values():
            state.pop(prefix + name, None)

    def from_state(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, strict, missing, _, errors = rest
        # A checkpoint of the whole model is judged as a whole, by every rank alike.
        others = [key for key, expert in _keys(self, prefix) if expert not in where_of(self).mine]
        if any(key in state for key in others):
            missing.extend(lost := [key for key in others if key not in state])
            if lost and strict and where_of(self).moved:
                errors.append(
                    f"some experts of {where_of(self).layer} that other ranks hold are in the state, and some are not: what one rank had "
                    "before plan.balance moved them does not fit now, moefuse.full_state_dict(model) or torch.distributed.checkpoint does"
                )
        own = {prefix + name for name in names.values()}
        known = len(missing)
        kind._load_from_state_dict(self, state, prefix, *rest)
        missing[known:] = [key for key in missing[known:] if key not in own]
        settle(self)

    return {"state_dict": state_dict, "_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def _keys(holder: nn.Module, prefix: str) -> list[tuple[str, int]]:
    """The keys that a list's own experts have in a state where they are now, and whose they are."""
    found = [(each, member) for each in members_of(holder) if holder_of(each[1]) is holder for member in (each[2],)]
    return [(f"{prefix}{path}{own}", member.expert) for (path, _, _), member in found for own in member.names]


def of_member(kind: type[nn.Module], member: Member, names: Mapping[str, str], where_of: WhereOf) -> dict[str, Any]:
    """Of a module in an expert: it has its rows in a state, wherever it is in the model."""

    def to_state(self: Any, state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        where = where_of(holder_of(self))
        check_whole(member, prefix, "state_dict", where.layer)
        kind._save_to_state_dict(self, state, prefix, keep_vars)
        for own, path in member.names.items():
            row = _saved(holder_of(self)._parameters[names[path]], path, where).get(member.expert)
            if row is not None:
                state[prefix + own] = row

    def from_state(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        where = where_of(holder_of(self))
        check_whole(member, prefix, "load_state_dict", where.layer)
        missing, errors = rest[2], rest[4]
        for own, path in member.names.items():
            key = prefix + own
            parameter: Any = holder_of(self)._parameters[names[path]]
            row = state.pop(key, None)
            if row is None:
                missing.extend([key] * (member.expert in where.mine))
            elif row.shape != parameter.shape[1:]:
                errors.append(_mismatch(key, row.shape, parameter.shape[1:]))
            elif member.expert in where.mine:
                slot = where.mine.index(member.expert)
                _check_current(row, parameter, where, slot)
                _write(parameter, slot, _part(where, path, row), where)
        kind._load_from_state_dict(self, state, prefix, *rest)

    return {"_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def _saved(parameter: Any, path: str, where: Where) -> dict[int, Tensor]:
    """The rows of a list's Parameter that a state has on this rank, by expert; a collective call where it has to be."""
    known = _known.get()
    if known is not None and id(parameter) in known:
        return known[id(parameter)]
    if _whole.get() is not None:
        found = {expert: row.clone() for expert, row in enumerate(_full(path, parameter.detach(), where))}
    else:
        local = held_here(parameter.detach(), where)
        found = {expert: where.row(path, local[slot]) for slot, expert in enumerate(where.mine)}
    if known is not None:
        known[id(parameter)] = found
    return found


def _write(parameter: Any, slot: int, part: Tensor, where: Where) -> None:
    here = slots_here(parameter, where)
    if slot in here:
        with torch.no_grad():
            parameter.to_local()[slot - here.start].copy_(part)


def _mismatch(key: str, found: torch.Size, wanted: torch.Size) -> str:
    return f"size mismatch for {key}: copying a param with shape {found} from checkpoint, the shape in current model is {wanted}."


def _part(where: Where, path: str, row: Tensor) -> Tensor:
    """What this rank holds of one expert's Parameter, which is all of it or a DTensor."""
    if isinstance(row, DTensor) and where.as_torch_has_it(path):
        return row.to_local()
    whole = row.full_tensor() if isinstance(row, DTensor) else row
    return where.part(path, whole[None])[0]


def _full(name: str, held: DTensor, where: Where) -> Tensor:
    """[E, ...] on the CPU where a rank keeps it, else [0, ...]; a collective call."""
    with torch.no_grad():
        whole = where.whole(name, held_here(held, where))
    return whole.cpu() if _whole.get() else whole.new_empty((0, *whole.shape[1:]))


def slots_here(own: DTensor, where: Where) -> range:
    """Of the slots of this rank, 0 to L, those of which it has the rows: all, or its share where FSDP has sharded them once more."""
    here, mesh = range(where.slots), own.device_mesh
    for dim in _of_fsdp(own, where):
        size = -(-len(here) // mesh.size(dim))
        here = here[mesh.get_local_rank(dim) * size :][:size]
    return here


def _of_fsdp(own: DTensor, where: Where) -> list[int]:
    """The dimensions of a mesh over which FSDP has sharded what this rank holds: they are before those of the experts."""
    return [dim for dim in range(own.device_mesh.ndim - where.mesh.ndim) if not own.placements[dim].is_replicate()]


def held_here(held: DTensor, where: Where) -> Tensor:
    """What this rank holds, put together from those that FSDP has sharded it over."""
    local, mesh = held.to_local(), held.device_mesh
    for dim in _of_fsdp(held, where):
        counts = torch.zeros(mesh.size(dim), dtype=torch.int64, device=local.device)
        group = mesh.get_group(dim)
        all_gather(counts, torch.tensor([len(local)], device=local.device), group)
        most = int(counts.max())
        every = local.new_empty((mesh.size(dim) * most, *local.shape[1:]))
        all_gather(every, padded(local, most, 0), group)
        local = torch.cat([part[:count] for part, count in zip(every.split(most), counts.tolist(), strict=True)]) if most else local
    return local


def _check_current(given: Tensor, own: DTensor, where: Where, slot: int | None = None) -> None:
    """Raises for a part of a state that is this Parameter's own memory, where experts have changed places in it since.

    Args:
        slot: where the row of a list's expert is now; None for all of a Parameter whose rows are in no order that a state has.
    """
    local = own.to_local()
    held = given.to_local() if isinstance(given, DTensor) else given
    same = bool(local.numel()) and held.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    moved = same and (slot is None or held.data_ptr() != local[slot - slots_here(own, where).start].data_ptr())
    if moved or where.hottest.has_left(held):
        raise ParallelError(
            f"this state_dict was taken before plan.balance moved experts of {where.layer}, and has what is in their places now: take "
            "it anew"
        )


def _rows(own: DTensor, rows: Tensor, where: Where) -> DTensor:
    """What a Parameter of a rank with these ``rows`` is loaded from; where it has more slots than rows, those are empty."""
    local, here = own.to_local(), slots_here(own, where)
    return _like(own, padded(rows.to(device=local.device, dtype=local.dtype), where.slots, 0)[here.start : here.stop])


def _like(own: DTensor, rows: Tensor) -> DTensor:
    """What a Parameter is loaded from, given what this rank holds of it."""
    return DTensor.from_local(rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
