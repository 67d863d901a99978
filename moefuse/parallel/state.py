"""Checkpoints of sharded experts have the keys of the model: a list's experts by their numbers, each saved by the ranks that hold it.

``load_state_dict`` takes a checkpoint of the whole model (plain tensors, every rank takes its rows), or what ``state_dict`` gives here.
Stacked experts are DTensors of torch's own layout. Where ranks hold other rows than that says (a placement that is not in order, gate and
up projection one behind the other), they are brought in order when they are saved or loaded, so that all ranks have to do it. So are
those of lists and of such placements that FSDP has sharded once more.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse.parallel.find import Listed, Stacked
from moefuse.runtime.collectives import all_gather
from moefuse.runtime.transports.allgather import padded


class Where(Protocol):
    """What a rank holds; see ``shard.py``."""

    @property
    def mesh(self) -> DeviceMesh: ...

    @property
    def mine(self) -> tuple[int, ...]: ...

    @property
    def slots(self) -> int: ...

    def part(self, name: str, rows: Tensor) -> Tensor: ...

    def stays(self, name: str) -> bool: ...

    def as_torch_has_it(self, name: str) -> bool: ...

    def in_order(self, name: str, held: Tensor) -> DTensor: ...

    def row(self, name: str, row: Tensor) -> Tensor: ...


def keys_of_stacked(site: Stacked, where: Where) -> None:
    """Give and take [E, ...] where this rank has some rows of it."""
    moved = [name for name in site.names if not where.stays(name)]

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for name in moved:
            held = state.get(prefix + name)
            if isinstance(held, DTensor) and not where.as_torch_has_it(name):
                state[prefix + name] = where.in_order(name, _held(held, where.mesh.ndim))

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in moved:
            whole = state.get(prefix + name)
            if isinstance(whole, DTensor) and not where.as_torch_has_it(name):
                whole = whole.full_tensor()
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor) and len(whole) == site.experts:
                state[prefix + name] = _rows(module._parameters[name], where.part(name, whole[list(where.mine)]), where)

    site.module.register_state_dict_post_hook(save)
    site.module.register_load_state_dict_pre_hook(load)


def keys_of_listed(site: Listed, stacked: dict[str, str], where: Where) -> None:
    """Split the Parameter [E, ...] of each role into those of the experts that are here, and join them again.

    Args:
        stacked: of each path from an expert, the name of the list's Parameter.
    """
    mine = where.mine
    numbers = [name for name, _ in site.module.named_children()]

    def save(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        for path, name in stacked.items():
            held = state.pop(prefix + name, None)
            local = _held(held, where.mesh.ndim) if isinstance(held, DTensor) else held
            for row, expert in enumerate(mine) if local is not None else ():
                state[f"{prefix}{numbers[expert]}.{path}"] = where.row(path, local[row])

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for path, name in stacked.items():
            found = [state.pop(f"{prefix}{number}.{path}", None) for number in numbers]
            own: Any = module._parameters[name]
            rows = [found[expert] for expert in mine]
            if all(row is not None for row in rows):
                parts = [_part(where, path, row) for row in rows]
                state[prefix + name] = _rows(own, torch.stack(parts) if parts else own.to_local()[:0], where)

    site.module.register_state_dict_post_hook(save)
    site.module.register_load_state_dict_pre_hook(load)


def _part(where: Where, path: str, row: Tensor) -> Tensor:
    """What this rank holds of one expert's Parameter, which is all of it or a DTensor."""
    if isinstance(row, DTensor) and where.as_torch_has_it(path):
        return row.to_local()
    whole = row.full_tensor() if isinstance(row, DTensor) else row
    return where.part(path, whole[None])[0]


def _held(held: DTensor, dims: int) -> Tensor:
    """What this rank holds over the last ``dims`` dimensions of the mesh, put together from those that FSDP has sharded it over."""
    local, mesh = held.to_local(), held.device_mesh
    for dim in range(mesh.ndim - dims):
        if held.placements[dim].is_replicate():
            continue
        counts = torch.zeros(mesh.size(dim), dtype=torch.int64, device=local.device)
        group = mesh.get_group(dim)
        all_gather(counts, torch.tensor([len(local)], device=local.device), group)
        most = int(counts.max())
        every = local.new_empty((mesh.size(dim) * most, *local.shape[1:]))
        all_gather(every, padded(local, most, 0), group)
        local = torch.cat([part[:count] for part, count in zip(every.split(most), counts.tolist(), strict=True)]) if most else local
    return local


def _rows(own: Any, rows: Tensor, where: Where) -> DTensor:
    """What a Parameter of which this rank holds ``rows`` is loaded from; where it has more slots than rows, those stay as they are."""
    local, mesh = own.to_local(), own.device_mesh
    rows = rows.to(device=local.device, dtype=local.dtype)
    for dim in range(mesh.ndim - where.mesh.ndim):  # as FSDP has sharded what this rank holds, empty slots and all
        if own.placements[dim].is_replicate():
            continue
        rows = padded(rows, where.slots, 0)
        parts = rows.chunk(mesh.size(dim))
        rows = parts[here] if (here := mesh.get_local_rank(dim)) < len(parts) else rows[:0]
    if len(rows) < len(local):
        rows = torch.cat([rows, local.detach()[len(rows) :]])
    return DTensor.from_local(rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
