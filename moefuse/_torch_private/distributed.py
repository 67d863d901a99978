"""Process groups, memory that GPUs of one host share, and DDP."""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from moefuse._torch_private.tensors import is_distributed


def timeout_of(group: Any) -> datetime.timedelta | None:
    """How long a process group waits for other ranks; None if its backend does not say."""
    try:
        found = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, RuntimeError, IndexError):
        return None
    return found if isinstance(found, datetime.timedelta) else None


def coalesced(group: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """All-gathers that are launched together when the block ends, where the backend of a device can do that.

    Without its argument ``device``: with it torch's NCCL group holds the tensors until a thread of its own lets them go, which is an error
    where a CUDA graph is warmed up.
    """
    manager = getattr(torch.distributed.distributed_c10d, "_coalescing_manager", None)
    if manager is None or device.type == "cpu":
        return contextlib.nullcontext()
    found: contextlib.AbstractContextManager[Any] = manager(group=group, async_ops=False)
    return found


def local_part(tensor: Any) -> torch.Tensor:
    """What a DTensor is on this rank, without gradients. As an input of a graph it need not be taken out of the DTensor in every call."""
    return tensor._local_tensor  # type: ignore[no-any-return]


def symmetric_memory(size: int, device: torch.device) -> torch.Tensor:
    """[size] bytes that other ranks can be let to write; not for CUDA graphs."""
    from torch.distributed import _symmetric_memory

    with _without_multicast():
        return _symmetric_memory.empty(size, dtype=torch.uint8, device=device)


def symmetric_peers(memory: torch.Tensor, group: Any) -> list[int]:
    """Let the ranks of a group write each other's ``memory``, and its addresses [P]; a collective call, and not for CUDA graphs."""
    return [int(p) for p in _rendezvous(memory, group).buffer_ptrs]


def symmetric_views(memory: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """What :func:`symmetric_peers` let be written: each rank's memory [bytes] uint8, as tensors of this rank's device."""
    handle = _rendezvous(memory, group)
    return [handle.get_buffer(rank, (memory.numel(),), torch.uint8) for rank in range(handle.world_size)]


def _rendezvous(memory: torch.Tensor, group: Any) -> Any:
    from torch.distributed import _symmetric_memory

    with _without_multicast():
        return _symmetric_memory.rendezvous(memory, group)


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """In this block torch binds no memory to NVLink's multicast objects: nothing here reads them, and not every host has them to give."""
    name = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class NotForDDP:
    """Names of what ``DistributedDataParallel`` of a module is to leave alone, as they are when it asks: also if the module is compiled."""

    def __init__(self, root: torch.nn.Module, held: Sequence[tuple[torch.nn.Module, str]], before: Iterable[str]) -> None:
        self.root, self.held, self.before = root, held, before

    def __iter__(self) -> Iterator[str]:
        from torch.distributed.tensor import DTensor

        yield from self.before
        paths = {id(module): path for path, module in self.root.named_modules()}
        for module, name in self.held:
            parameter: Any = module._parameters.get(name)
            if not isinstance(parameter, DTensor) or id(module) not in paths:
                continue  # a full one again, or a list that was taken out of the model
            setattr(parameter, "_ddp_ignored", True)  # noqa: B010  (for Dynamo's buckets; a Parameter that was moved has it no more)
            # A compiled module looks like this one, and has it as a child. What is the root's own, DDP calls ".name" in places.
            path = f"{paths[id(module)]}.{name}"
            yield from (path, path.lstrip("."), f"_orig_mod.{path.lstrip('.')}")


_FOR_DDP = "_ddp_params_and_buffers_to_ignore"


def not_for_ddp(model: torch.nn.Module, held: Sequence[tuple[torch.nn.Module, str]]) -> None:
    """Let ``DistributedDataParallel`` of a model, or of a part of it, leave these distributed Parameters (module, name) alone.

    Beside those that it was told to ignore before.
    """
    holders = {id(module) for module, _ in held}
    for root in model.modules():
        inner = {id(module) for module in root.modules()}
        if not holders.isdisjoint(inner):
            setattr(root, _FOR_DDP, NotForDDP(root, [h for h in held if id(h[0]) in inner], getattr(root, _FOR_DDP, ())))


def again_for_ddp(model: torch.nn.Module, held: Iterable[tuple[torch.nn.Module, str]]) -> None:
    """Take back :func:`not_for_ddp` for these Parameters, which are to be full ones."""
    gone = set()
    for module, name in held:
        gone.add((id(module), name))
        module._parameters[name].__dict__.pop("_ddp_ignored", None)
    for root in model.modules():
        known = root.__dict__.pop(_FOR_DDP, ())
        while isinstance(known, NotForDDP) and gone.issuperset((id(module), name) for module, name in known.held):
            known = known.before
        if known != ():
            setattr(root, _FOR_DDP, known)


def sharded_over(mesh: Any) -> Any:
    """What FSDP's ``shard_placement_fn`` returns for a Parameter that is sharded over a mesh of its own; None where torch has no such."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common
    from torch.distributed.tensor import Shard

    result = getattr(_fsdp_common, "ShardPlacementResult", None)
    return None if result is None else result(Shard(0), _fsdp_common.FSDPMeshInfo(mesh, shard_mesh_dim=0))


def computed_with(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Parameters of a model, by the identities of what graphs read: what FSDP2 has in their place, and local parts of DTensors."""
    groups = (group for module in model.modules() for group in _fsdp_groups(module))
    pairs = ((getattr(p, "_unsharded_param", None), p.sharded_param) for group in groups for p in group.fsdp_params)
    parts = {id(local_part(p)): p for p in model.parameters() if is_distributed(p)}
    return parts | {id(whole): shard for whole, shard in pairs if whole is not None}


def _fsdp_state(module: torch.nn.Module) -> Any:
    """What FSDP2 knows of a module that it has wrapped; None for any other."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return module._get_fsdp_state() if kind is not None and isinstance(module, kind) else None


def _fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """What FSDP2 gathers at a time for a module."""
    state = _fsdp_state(module)
    every = [] if state is None else getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in every if group is not None]


def sharded_again(module: torch.nn.Module) -> Callable[[], None]:
    """A function that has FSDP2 shard again what it holds in shards now: it goes by notes of its own, which no attribute of the module
    tells, and a call that has raised leaves them in the middle of it."""
    state, groups = _fsdp_state(module), _fsdp_groups(module)
    notes = [(noted, noted._training_state) for noted in (state, *groups) if noted is not None]
    held = [group for group in groups if group.is_sharded]

    def put_back() -> None:
        for noted, before in notes:
            noted._training_state = before
        for group in held:
            if not group.is_sharded:
                group.reshard()

    return put_back
