"""The ranks among which the tokens of a layer travel, and their process groups."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moefuse.runtime import groups


@dataclass(frozen=True)
class Grid:
    """The ranks among which the tokens of a layer travel.

    Attributes:
        mesh: of the experts' DTensors; its first dimension may be one of ``copies``, over which nothing travels.
        dims: those over which tokens travel.
        names: of the groups of ``dims``.
        others: the group of those ranks that have the same experts, if there are copies.
        copies: how many ranks that group has.
    """

    mesh: DeviceMesh
    dims: tuple[DeviceMesh, ...]
    names: tuple[str, ...]
    others: Any = None
    copies: int = 1


def grid(mesh: DeviceMesh, count: int, replicated: bool) -> Grid:
    """All ranks of a mesh, or those of them that share one of ``count`` copies of the experts. New groups are made by all ranks alike.

    Args:
        replicated: whether the first dimension of the mesh is one of ranks with the same experts.
    """
    if count == 1:
        dims = tuple(mesh if mesh.ndim == 1 else mesh[name] for name in mesh.mesh_dim_names or ("",))
        if not replicated:
            return Grid(mesh, dims, tuple(map(register, dims)))
        return Grid(mesh, dims[1:], tuple(map(register, dims[1:])), dims[0].get_group(), dims[0].size())
    ranks, mine = [int(r) for r in mesh.mesh.flatten()], mesh.get_local_rank()
    size = len(ranks) // count
    start = mine // size * size
    near = dist.new_group(ranks[start : start + size], use_local_synchronization=True)
    others = dist.new_group(ranks[mine % size :: size], use_local_synchronization=True)
    share = DeviceMesh.from_group(near, mesh.device_type, mesh_dim_names=mesh.mesh_dim_names or ("ep",))
    return Grid(share, (share,), (register(share),), others, count)


def register(mesh: DeviceMesh) -> str:
    """Remember one dimension's group for the ops; the name that graphs know it by."""
    name = (mesh.mesh_dim_names or ("ep",))[0]
    group = mesh.get_group()
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    host = group if _takes_cpu(group) else dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)
    return groups.register(name, ranks, mesh.get_local_rank(), group, host).name


def _takes_cpu(group: Any) -> bool:
    """Whether a group has a backend for tensors on the host."""
    return torch.device("cpu") in group._device_types


def hosts(mesh: DeviceMesh) -> int:
    """On how many hosts the ranks of a mesh are, as far as the launcher says how many processes a host has."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return len({int(rank) // local for rank in mesh.mesh.flatten()}) if local > 0 else 1
