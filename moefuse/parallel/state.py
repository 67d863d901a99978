"""Checkpoints of sharded experts have the keys of the model: a list's experts by their numbers, each saved by the ranks that hold it.

``load_state_dict`` takes a checkpoint of the whole model (plain tensors, every rank takes its rows), or what ``state_dict`` gives here.
Stacked experts are DTensors of torch's own layout. Where ranks hold other rows than that says (a placement that is not in order, gate and
up projection one behind the other), they are brought in order when they are saved or loaded, so that all ranks have to do it. So are
those of lists and of such placements that FSDP has sharded once more.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse.runtime.collectives import all_gather
from moefuse.runtime.transports.allgather import padded


class Where(Protocol):
    """What a rank holds; see ``shard.py``."""

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def mine(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> int: ...

    @property
    def slots(self) -> int: ...

    def part(self, name: str, rows: Tensor) -> Tensor: ...

    def as_torch_has_it(self, name: str) -> bool: ...

    def whole(self, name: str, held: Tensor) -> Tensor: ...

    def in_order(self, name: str, held: Tensor) -> DTensor: ...

    def row(self, name: str, row: Tensor) -> Tensor: ...


Save = Callable[[dict[str, Any], str], None]


@dataclass(frozen=True)
class Faults:
    """Of ``load_state_dict``: keys that are not there, and sentences about what does not fit."""

    missing: list[str]
    errors: list[str]


Load = Callable[[nn.Module, dict[str, Any], str, Faults], None]

_whole: contextvars.ContextVar[bool | None] = contextvars.ContextVar("moefuse_whole_state", default=None)
"""Set where a state has the weights of all ranks: whether this rank keeps them."""


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


def methods(kind: type[nn.Module], save: Save, load: Load, settle: Callable[[nn.Module], None]) -> dict[str, Any]:
    """What a subclass of ``kind`` has for its own part of a state: methods, and no hooks, so that they go when the class goes.

    Args:
        settle: called when a state has been loaded, which may have brought other Parameters (``assign=True``).
    """

    def to_state(self: Any, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        kind._save_to_state_dict(self, destination, prefix, keep_vars)
        save(destination, prefix)

    def from_state(self: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, missing, _, errors = rest
        load(self, state, prefix, Faults(missing, errors))
        kind._load_from_state_dict(self, state, prefix, *rest)
        settle(self)

    return {"_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def keys_of_stacked(names: Mapping[str, str], where: Where) -> tuple[Save, Load]:
    """Give and take [E, ...] where this rank has some rows of it."""

    def save(state: dict[str, Any], prefix: str) -> None:
        for name in names:
            held = state.get(prefix + name)
            if not isinstance(held, DTensor):
                continue
            if _whole.get() is not None:
                state[prefix + name] = _full(name, held, where)
            elif not where.as_torch_has_it(name):
                state[prefix + name] = where.in_order(name, _held(held, where))

    def load(module: nn.Module, state: dict[str, Any], prefix: str, faults: Faults) -> None:
        for name in names:
            whole = state.get(prefix + name)
            own: Any = module._parameters[name]
            if isinstance(whole, DTensor) and not where.as_torch_has_it(name):
                whole = whole.full_tensor()
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor) and len(whole) == where.experts:
                state[prefix + name] = _rows(own, where.part(name, whole[list(where.mine)]), where)

    return save, load


def keys_of_listed(names: Mapping[str, str], numbers: tuple[str, ...], where: Where) -> tuple[Save, Load]:
    """Split the Parameter [E, ...] of each role into those of the experts that are here, and join them again.

    Args:
        names: of each path from an expert, the name of the list's Parameter.
        numbers: the names of the experts in the list.
    """
    mine = where.mine

    def save(state: dict[str, Any], prefix: str) -> None:
        for path, name in names.items():
            held = state.pop(prefix + name, None)
            if held is None:
                continue
            if _whole.get() is not None:
                rows = _full(path, held, where)
                state.update({f"{prefix}{number}.{path}": row.clone() for number, row in zip(numbers, rows, strict=False)})
                continue
            local = _held(held, where)
            for row, expert in enumerate(mine):
                state[f"{prefix}{numbers[expert]}.{path}"] = where.row(path, local[row])

    def load(module: nn.Module, state: dict[str, Any], prefix: str, faults: Faults) -> None:
        for path, name in names.items():
            found = [state.pop(f"{prefix}{number}.{path}", None) for number in numbers]
            own: Any = module._parameters[name]
            # A checkpoint of the whole model is judged as a whole, by every rank alike.
            whole = any(row is not None for expert, row in enumerate(found) if expert not in mine)
            known = {f"{prefix}{numbers[e]}.{path}": found[e] for e in (range(len(numbers)) if whole else mine)}
            wrong = _faults(known, own.shape[1:], faults)
            rows, here = own.to_local().detach().clone(), slots_here(own, where)
            for slot, expert in enumerate(mine):
                row = found[expert]
                if row is not None and f"{prefix}{numbers[expert]}.{path}" not in wrong:
                    part = _part(where, path, row)
                    if slot in here:
                        rows[slot - here.start] = part
            state[prefix + name] = _like(own, rows)

    return save, load


def _faults(rows: Mapping[str, Tensor | None], shape: torch.Size, faults: Faults) -> set[str]:
    """Those of another ``shape``; says so, and which are missing. Both keep what they have."""
    missing = [key for key, row in rows.items() if row is None]
    wrong = {key: row.shape for key, row in rows.items() if row is not None and row.shape != shape}
    faults.missing.extend(missing)
    faults.errors.extend(
        f"size mismatch for {key}: copying a param with shape {found} from checkpoint, the shape in current model is {shape}."
        for key, found in wrong.items()
    )
    return set(wrong)


def _part(where: Where, path: str, row: Tensor) -> Tensor:
    """What this rank holds of one expert's Parameter, which is all of it or a DTensor."""
    if isinstance(row, DTensor) and where.as_torch_has_it(path):
        return row.to_local()
    whole = row.full_tensor() if isinstance(row, DTensor) else row
    return where.part(path, whole[None])[0]


def _full(name: str, held: DTensor, where: Where) -> Tensor:
    """[E, ...] on the CPU where a rank keeps it, else [0, ...]; a collective call."""
    with torch.no_grad():
        whole = where.whole(name, _held(held, where))
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


def _held(held: DTensor, where: Where) -> Tensor:
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


def _rows(own: DTensor, rows: Tensor, where: Where) -> DTensor:
    """What a Parameter of a rank with these ``rows`` is loaded from; where it has more slots than rows, those are empty."""
    local, here = own.to_local(), slots_here(own, where)
    return _like(own, padded(rows.to(device=local.device, dtype=local.dtype), where.slots, 0)[here.start : here.stop])


def _like(own: DTensor, rows: Tensor) -> DTensor:
    """What a Parameter is loaded from, given what this rank holds of it."""
    return DTensor.from_local(rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
