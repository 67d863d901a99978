"""The ranks among which the tokens of a layer travel, and their process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.runtime import groups


@dataclass(frozen=True)
class Grid:
    """The ranks among which the tokens of a layer travel.

    Attributes:
        names: of the groups of the mesh's dimensions.
        others: the group of those ranks that have the same experts, if there are copies.
    """

    mesh: DeviceMesh
    names: tuple[str, ...]
    others: Any = None


def grid(mesh: DeviceMesh, count: int) -> Grid:
    """All ranks of a mesh, or those of them that share one of ``count`` copies of the experts. New groups are made by all ranks alike."""
    if count == 1:
        dims = [mesh if mesh.ndim == 1 else mesh[name] for name in mesh.mesh_dim_names or ("",)]
        return Grid(mesh, tuple(map(register, dims)))
    ranks, mine = [int(r) for r in mesh.mesh.flatten()], mesh.get_local_rank()
    size = len(ranks) // count
    start = mine // size * size
    near = dist.new_group(ranks[start : start + size], use_local_synchronization=True)
    others = dist.new_group(ranks[mine % size :: size], use_local_synchronization=True)
    share = DeviceMesh.from_group(near, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names or ("ep",))
    return Grid(share, (register(share),), others)


def register(mesh: DeviceMesh) -> str:
    """Remember one dimension's group for the ops; the name that graphs know it by."""
    name = (mesh.mesh_dim_names or ("ep",))[0]
    group = mesh.get_group()
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    before = groups.earlier(group)
    host = _host(group, ranks) if before is None else before.host
    return groups.register(name, ranks, mesh.get_local_rank(), group, host).name


def _host(group: Any, ranks: tuple[int, ...]) -> Any:
    """A gloo group of these ranks with the timeout that ``group`` has; of ranks that are not there, as in tests, ``group`` itself."""
    if dist.get_backend(group) == "fake":
        return group
    return dist.new_group(list(ranks), timeout=_torch_private.timeout_of(group), backend="gloo", use_local_synchronization=True)


def hosts(mesh: DeviceMesh) -> int:
    """On how many hosts the ranks of a mesh are, as far as the launcher says how many processes a host has."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return len({int(rank) // local for rank in mesh.mesh.flatten()}) if local > 0 else 1
