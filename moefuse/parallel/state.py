"""Checkpoints of sharded experts have the keys of the model: a list's experts by their numbers, each saved by the ranks that hold it.

``load_state_dict`` takes a checkpoint of the whole model (plain tensors, every rank takes its rows), or what ``state_dict`` gives here.
Stacked experts are DTensors of torch's own layout. Where ranks hold other rows than that says (a placement that is not in order, gate and
up projection one behind the other), they are brought in order when they are saved or loaded, so that all ranks have to do it.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Where(Protocol):
    """What a rank holds; see ``shard.py``."""

    @property
    def mine(self) -> tuple[int, ...]: ...

    @property
    def experts(self) -> int: ...

    def part(self, name: str, rows: Tensor) -> Tensor: ...

    def as_torch_has_it(self, name: str) -> bool: ...

    def whole(self, name: str, held: Tensor) -> Tensor: ...

    def in_order(self, name: str, held: Tensor) -> DTensor: ...

    def row(self, name: str, row: Tensor) -> Tensor: ...


Save = Callable[[dict[str, Any], str], None]
Load = Callable[[nn.Module, dict[str, Any], str], None]

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
        load(self, state, prefix)
        kind._load_from_state_dict(self, state, prefix, *rest)
        settle(self)

    return {"_save_to_state_dict": to_state, "_load_from_state_dict": from_state}


def keys_of_stacked(names: Mapping[str, str], where: Where) -> tuple[Save, Load]:
    """Give and take [E, ...] where this rank has some rows of it."""

    def save(state: dict[str, Any], prefix: str) -> None:
        for name in names:
            held = state.get(prefix + name)
            if not isinstance(held, DTensor) or where.as_torch_has_it(name):
                continue
            if _whole.get() is None:
                state[prefix + name] = where.in_order(name, held.to_local())
                continue
            whole = where.whole(name, held.to_local().detach())
            state[prefix + name] = whole.cpu() if _whole.get() else whole[:0]

    def load(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for name in names:
            whole = state.get(prefix + name)
            if isinstance(whole, DTensor) and not where.as_torch_has_it(name):
                whole = whole.full_tensor()
            if isinstance(whole, Tensor) and not isinstance(whole, DTensor) and len(whole) == where.experts:
                state[prefix + name] = _rows(module._parameters[name], where.part(name, whole[list(where.mine)]))

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
            local = held.to_local() if isinstance(held, DTensor) else held
            if local is None:
                continue
            if _whole.get() is not None:
                whole = where.whole(path, local.detach())
                whole = whole.cpu() if _whole.get() else whole[:0]
                state.update({f"{prefix}{number}.{path}": row.clone() for number, row in zip(numbers, whole, strict=False)})
                continue
            for row, expert in enumerate(mine):
                state[f"{prefix}{numbers[expert]}.{path}"] = where.row(path, local[row])

    def load(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        for path, name in names.items():
            found = [state.pop(f"{prefix}{number}.{path}", None) for number in numbers]
            own: Any = module._parameters[name]
            rows = [found[expert] for expert in mine]
            if all(row is not None for row in rows):
                parts = [_part(where, path, row) for row in rows]
                state[prefix + name] = _rows(own, torch.stack(parts) if parts else own.to_local()[:0])

    return save, load


def _part(where: Where, path: str, row: Tensor) -> Tensor:
    """What this rank holds of one expert's Parameter, which is all of it or a DTensor."""
    if isinstance(row, DTensor) and where.as_torch_has_it(path):
        return row.to_local()
    whole = row.full_tensor() if isinstance(row, DTensor) else row
    return where.part(path, whole[None])[0]


def _rows(own: Any, rows: Tensor) -> DTensor:
    """What a Parameter of which this rank holds ``rows`` is loaded from; where it has more slots than rows, those are empty."""
    local = own.to_local()
    rows = rows.to(device=local.device, dtype=local.dtype)
    if len(rows) < len(local):
        rows = torch.cat([rows, rows.new_zeros((len(local) - len(rows), *rows.shape[1:]))])
    return DTensor.from_local(rows, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride())
