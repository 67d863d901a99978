"""``save_pretrained`` of models whose experts are spread: the model's own checkpoint, as one process writes it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from moefuse.errors import ParallelError
from moefuse.parallel import views
from moefuse.parallel.shard import held_of
from moefuse.parallel.state import full_state_dict


def saving_whole(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a model, and of models in it, write full weights. Every rank calls it; the first process writes."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)) and any(held_of(inner) is not None for inner in module.modules()):
            views.with_properties(module, {}, {"save_pretrained": _saving(type(module))})


def _saving(kind: Any) -> Any:
    def save_pretrained(
        self: Any, save_directory: Any, is_main_process: bool = True, state_dict: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if kwargs.get("distributed_checkpoint"):
            raise ParallelError(
                f"{kind.__name__}: distributed_checkpoint=True is for models that transformers has sharded; use "
                "torch.distributed.checkpoint with model.state_dict()"
            )
        writes = is_main_process and dist.get_rank() == 0
        whole = full_state_dict(self, keep=writes) if state_dict is None else _whole(self, state_dict)
        # Who does not write has nothing to write; what transformers does beside that is for one process.
        return kind.save_pretrained(self, save_directory, True, whole, *args, **kwargs) if writes else None

    return save_pretrained


def _whole(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """A state that the user gives, with full weights."""
    for path, module in model.named_modules():
        held = held_of(module)
        for name in held.names if held is not None else ():
            assert held is not None
            lost = [key for key in (f"{path}.{key}".lstrip(".") for key in held.keys(name)) if key not in state]
            if lost:
                raise ParallelError(
                    f"the state_dict that save_pretrained was given has no {lost[0]}, which another rank holds: leave it out, or give "
                    "moefuse.full_state_dict(model)"
                )
    return {key: value.full_tensor().cpu() if isinstance(value, DTensor) else value for key, value in state.items()}
