"""``save_pretrained`` of models whose experts are spread: the model's own checkpoint, as one process writes it."""

from __future__ import annotations

import datetime
import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moefuse import _torch_private
from moefuse.errors import ParallelError, PeerError
from moefuse.parallel import views
from moefuse.parallel.shard import held_of, keys_of
from moefuse.parallel.state import full_state_dict
from moefuse.runtime.collectives import is_fake

WAIT: datetime.timedelta | None = None
"""How long a rank waits for the others; None for as long as their process group does."""


def saving_whole(model: nn.Module, mesh: DeviceMesh) -> None:
    """Let ``save_pretrained`` of a model, and of models in it, write full weights. Every rank calls it; the first process writes.

    Args:
        mesh: of the ranks that have parts of the model; one that saves waits for the others as long as its process group does.
    """
    found = [m for m in model.modules() if callable(getattr(type(m), "save_pretrained", None)) and any(map(held_of, m.modules()))]
    if not found:
        return
    around = mesh.get_group(0)
    # A group that nothing else runs on: where one rank alone saves, the others are in some other collective.
    group = around if is_fake(around) else _group([int(rank) for rank in mesh.mesh.flatten()], _torch_private.timeout_of(around))
    for module in found:
        views.with_properties(module, {}, {"save_pretrained": _saving(type(module), group)})


def _group(ranks: list[int], timeout: datetime.timedelta | None) -> Any:
    return dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)


def _saving(kind: Any, group: Any) -> Any:
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        _check(kind, kwargs, group)
        writes = is_main_process and dist.get_rank() == 0
        if state_dict is None:
            _wait_for_all(kind, group)
            state_dict = full_state_dict(self, keep=writes)
        elif state_dict or writes:
            state_dict = _whole(self, state_dict)
        # Who does not write has nothing to write; what the library does beside that is for one process.
        return kind.save_pretrained(self, save_directory, is_main_process=True, state_dict=state_dict, **kwargs) if writes else None

    return save_pretrained


def _check(kind: Any, kwargs: dict[str, Any], group: Any) -> None:
    if is_fake(group):
        raise ParallelError(f"{kind.__name__}: a fake process group has no other ranks, so there is nobody who has the rest of the experts")
    if not _takes_state(kind.save_pretrained):
        raise ParallelError(
            f"{kind.__name__}: its save_pretrained takes no state_dict, and what a rank has is a part of the model: call "
            "moefuse.unparallelize(model) first, or use torch.distributed.checkpoint"
        )
    if kwargs.get("distributed_checkpoint"):
        raise ParallelError(
            f"{kind.__name__}: distributed_checkpoint=True is for models that transformers has sharded; use "
            "torch.distributed.checkpoint with model.state_dict()"
        )


def _takes_state(save: Any) -> bool:
    """Whether a ``save_pretrained`` writes the state that it is given: by name, or out of its ``**kwargs`` (PEFT)."""
    parameters = inspect.signature(save).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "state_dict" in parameters or (anything and "state_dict" in inspect.unwrap(save).__code__.co_consts)


def _wait_for_all(kind: Any, group: Any) -> None:
    try:
        dist.monitored_barrier(group, timeout=WAIT)
    except RuntimeError as error:
        raise PeerError(
            f"{kind.__name__}: save_pretrained gathers the experts of all ranks, so each has to call it (code that runs on one of them "
            f"can give it moefuse.full_state_dict(model), which each has called): {str(error).splitlines()[0]}"
        ) from error


def _whole(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state that the user gives, with full weights."""
    lost = next((key for places in keys_of(model).values() for keys in places.values() for key in keys if key not in state), None)
    if lost is not None:
        raise ParallelError(
            f"the state_dict that save_pretrained was given has no {lost}, which another rank holds: leave it out, or give "
            "moefuse.full_state_dict(model)"
        )
    return {key: value.full_tensor().cpu() if isinstance(value, DTensor) else value for key, value in state.items()}
