"""The ranks among which the tokens of a layer travel, and their process groups."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moefuse import _torch_private
from moefuse.runtime import groups
from moefuse.runtime.collectives import is_fake
from moefuse.runtime.peers import lost_peers
from moefuse.runtime.transports.base import exchanged


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
    """Remember one dimension's group for the ops; the name that graphs know it by. All ranks call it: they tell each other their hosts.

    Raises:
        PeerError: another rank did not come.
    """
    name = (mesh.mesh_dim_names or ("ep",))[0]
    group = mesh.get_group()
    ranks = tuple(int(r) for r in mesh.mesh.flatten())
    before = groups.earlier(group)
    host = _host(group, ranks) if before is None else before.host
    with lost_peers("moefuse.parallelize", f"the mesh {name!r}"):
        hosts = _hosts(ranks, host)
    return groups.register(name, ranks, mesh.get_local_rank(), group, host, hosts).name


def _host(group: Any, ranks: tuple[int, ...]) -> Any:
    """A gloo group of these ranks with the timeout that ``group`` has; of ranks that are not there, as in tests, ``group`` itself."""
    if dist.get_backend(group) == "fake":
        return group
    return dist.new_group(list(ranks), timeout=_torch_private.timeout_of(group), backend="gloo", use_local_synchronization=True)


def _hosts(ranks: tuple[int, ...], group: Any) -> tuple[int, ...]:
    """[P]: the host of each rank, numbered in the order in which they come.

    A fake process group has no other ranks to ask; there LOCAL_WORLD_SIZE, the launcher's word, says how many processes a host has.
    """
    if is_fake(group):
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        return _numbered([rank // local if local > 0 else 0 for rank in ranks])
    return _numbered(exchanged(group, len(ranks), _identity()))


def _identity() -> int:
    """A number of 63 bits that processes of one host share: of its name, which a container has of its own, and its boot."""
    name = os.environ.get("MOEFUSE_HOST")
    if name is None:
        with contextlib.suppress(OSError):
            name = Path("/proc/sys/kernel/random/boot_id").read_text()
        name = f"{socket.gethostname()} {name}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1


def _numbered(found: Sequence[int]) -> tuple[int, ...]:
    numbers = {which: number for number, which in enumerate(dict.fromkeys(found))}
    return tuple(numbers[which] for which in found)
