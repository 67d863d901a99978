"""Checkpoints of sharded experts have the keys of the model: a list's experts by their numbers, each saved by the rank that holds it.

Loading takes a checkpoint of the whole model (plain tensors, every rank takes its rows), or what ``state_dict`` gives here. Stacked
experts are DTensors of torch's own layout where the placement is in order, and nothing has to be changed when they are saved.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moefuse.parallel.find import Listed, Stacked


class Where(Protocol):
    """What a rank holds."""

    @property
    def mine(self) -> tuple[int, ...]: ...

    def part(self, name: str, rows: Tensor) -> Tensor: ...

    def stays(self, name: str) -> bool: ...


def keys_of_stacked(site: Stacked, where: Where) -> None:
    """Let a plain [E, ...] be loaded where this rank has some rows of it."""

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for name in site.names:
            whole, own = state.get(prefix + name), module._parameters[name]
            if where.stays(name) or not isinstance(whole, Tensor) or isinstance(whole, DTensor):
                continue
            if len(whole) == site.experts:
                state[prefix + name] = _rows(own, where.part(name, whole[list(where.mine)]))

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
            local = held.to_local() if isinstance(held, DTensor) else held
            for row, expert in enumerate(mine) if local is not None else ():
                state[f"{prefix}{numbers[expert]}.{path}"] = local[row]

    def load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for path, name in stacked.items():
            found = [state.pop(f"{prefix}{number}.{path}", None) for number in numbers]
            own = module._parameters[name]
            rows = [found[expert] for expert in mine]
            if all(row is not None for row in rows):
                state[prefix + name] = _rows(own, where.part(path, torch.stack(rows)) if rows else own.to_local()[:0])  # type: ignore[union-attr]

    site.module.register_state_dict_post_hook(save)
    site.module.register_load_state_dict_pre_hook(load)


def _rows(own: Any, rows: Tensor) -> DTensor:
    """What a Parameter of which this rank holds ``rows`` is loaded from; where it has more slots than rows, those stay as they are."""
    local = own.to_local()
    rows = rows.to(device=local.device, dtype=local.dtype)
    if len(rows) < len(local):
        rows = torch.cat([rows, local.detach()[len(rows) :]])
    return DTensor.from_local(rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
