"""What a graph with open choices is given in a call, and what becomes of what it took.

Activation checkpoints that wrap compiled code run it again while backward goes on, perhaps when the user's ``with`` is over. Such a call
takes what the first one took: it has the same inputs in memory, for a checkpoint keeps them. The memory of that ends with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moefuse import _torch_private
from moefuse.errors import RoutingError
from moefuse.replay.choices import Choice, Opened
from moefuse.served import renamed

Routing = dict[str, list[Tensor]]
"""Layer -> the ids [T, K] of each of its calls, in their order."""


@dataclass(eq=False)
class Context:
    """One ``with`` of the user.

    Attributes:
        names: of the model's Parameters, by the memory that they are in.
        given: for each layer, what each call takes; None where nothing is given. ``in_order``: for each layer in the order they first run.
        record: where to note what was taken; None if that is not asked for.
        highest: the largest id of each given tensor, by its identity.
        ran: calls of each layer so far.
    """

    names: dict[int, str]
    given: Routing | None = None
    in_order: list[list[Tensor]] | None = None
    record: Routing | None = None
    highest: dict[int, int] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)

    @property
    def replays(self) -> bool:
        return self.given is not None or self.in_order is not None

    def layer(self, choice: Choice, args: Sequence[Any]) -> str | None:
        """The layer of this model that a call runs; None if it is another model's."""
        if choice.at < 0:
            return choice.module
        name = self.names.get(_place(args[choice.at]))
        return None if name is None else renamed(choice.module, choice.parameter, name)

    def wanted(self, layer: str) -> list[Tensor] | None:
        """What each call of a layer takes; None if nothing is given for it."""
        if self.in_order is None:
            return (self.given or {}).get(layer)
        self.ran.setdefault(layer, 0)
        at = list(self.ran).index(layer)
        if at >= len(self.in_order):
            raise RoutingError(f"{layer} is the {at + 1}th layer that runs, and replay_routing has ids of {len(self.in_order)}")
        return self.in_order[at]


@dataclass(eq=False)
class _Taken:
    """What a checkpoint's call took, of which others it is told by its inputs. ``ids``: None if the router chose."""

    layer: str
    place: int
    inputs: tuple[Any, ...]
    alive: list[StorageWeakRef]
    ids: Tensor | None
    several: bool = False


_open: list[Context] = []
_taken: list[_Taken] = []
closed: dict[str, str] = {}
"""Layers whose choices no graph could open, and why."""


def on() -> bool:
    """Whether graphs have to be open."""
    if not _open and _taken:
        _forget()
    return bool(_open or _taken)


def enter(context: Context) -> None:
    _open.append(context)


def leave(context: Context) -> None:
    _open.remove(context)


def names_of(model: nn.Module) -> dict[int, str]:
    """Names of Parameters by the memory that they are in, without what ``torch.compile`` puts into them."""
    return {_place(p): name.replace("_orig_mod.", "") for name, p in model.named_parameters(remove_duplicate=False)}


def _place(parameter: Tensor) -> int:
    storages = _torch_private.storages_of(parameter)
    return storages[0].data_ptr() if storages else id(parameter)


def running(opened: Opened, compiled: _torch_private.CompiledFn) -> _torch_private.CompiledFn:
    """A compiled graph with open choices, to call like the one that it was."""
    choices, count = opened.choices, len(opened.choices)

    def run(*args: Any) -> Any:
        again = _torch_private.running_backward() >= 0
        given = [_again(choice, args) if again else _given(choice, args) for choice in choices]
        out = compiled(*args, *given)
        if not again:
            for choice, ids in zip(choices, out[-count:], strict=True):
                _note(choice, args, ids)
        return out[:-count]

    return run


def _given(choice: Choice, args: Sequence[Any]) -> Tensor:
    """[T, K]: the ids of this call, -1 where the router chooses."""
    shape, taken, layer = choice.shape(args), None, choice.module
    for context in [c for c in reversed(_open) if c.replays]:
        name = context.layer(choice, args)
        wanted = context.wanted(name) if name is not None else None
        if name is None or wanted is None:
            continue
        number = context.ran.get(name, 0)
        if number >= len(wanted):
            raise RoutingError(f"{name} runs for the {number + 1}th time, and replay_routing has ids for {len(wanted)} of its calls")
        _check(name, wanted[number], choice, shape, context)
        context.ran[name], taken, layer = number + 1, wanted[number], name
        break
    _remember(layer, choice, args, taken)
    return _as_input(choice, shape, taken)


def _check(layer: str, ids: Tensor, choice: Choice, shape: Sequence[int], context: Context) -> None:
    tokens = math.prod(shape) // choice.top_k
    if tuple(ids.shape) != (tokens, choice.top_k):
        raise RoutingError(f"{layer} has {tokens} tokens and takes {choice.top_k} experts for each: its ids are not {list(ids.shape)}")
    if context.highest.get(id(ids), -1) >= choice.experts:
        raise RoutingError(f"{layer} has {choice.experts} experts, and is to take number {context.highest[id(ids)]}")


def _as_input(choice: Choice, shape: Sequence[int], ids: Tensor | None) -> Tensor:
    if ids is None:
        return torch.full(tuple(shape), -1, dtype=torch.int64, device=choice.device)
    return ids.to(device=choice.device, dtype=torch.int64).reshape(tuple(shape)).contiguous()


def _inputs(args: Sequence[Any]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The activations among the inputs of a graph, and how they are known again."""
    found = [a for a in args if isinstance(a, Tensor) and a.is_floating_point() and not isinstance(a, nn.Parameter)]
    return found, tuple((a.data_ptr(), a.storage_offset(), tuple(a.shape)) for a in found if a.numel())


def _remember(layer: str, choice: Choice, args: Sequence[Any], ids: Tensor | None) -> None:
    """A checkpoint will make this call again, if it is one that makes it."""
    _forget()
    found, inputs = _inputs(args)
    # One kind of checkpoint keeps nothing for gradients, by hooks; the other runs without gradients what wants some.
    if not (_torch_private.keeps_by_hooks() or (not torch.is_grad_enabled() and any(a.requires_grad for a in found))):
        return
    place = _witness(choice, args)
    same = next((t for t in _taken if t.place == place and t.inputs == inputs), None)
    if same is None:
        _taken.append(_Taken(layer, place, inputs, [StorageWeakRef(a.untyped_storage()) for a in found], ids))
        return
    same.several = same.ids is not ids
    same.ids = ids


def _witness(choice: Choice, args: Sequence[Any]) -> int:
    """What tells a layer from others that run its code."""
    return _place(args[choice.at]) if choice.at >= 0 else hash(choice.module)


def _forget() -> None:
    _taken[:] = [t for t in _taken if not any(ref.expired() for ref in t.alive)]


def _again(choice: Choice, args: Sequence[Any]) -> Tensor:
    """What the call took that is made again now."""
    _, inputs = _inputs(args)
    shape = choice.shape(args)
    pending = [t for t in _taken if t.place == _witness(choice, args)]
    found = next((t for t in pending if t.inputs == inputs), None)
    if found is not None and not found.several:
        _taken.remove(found)
        return _as_input(choice, shape, found.ids)
    for context in [c for c in reversed(_open) if c.replays]:
        name = context.layer(choice, args)
        wanted = context.wanted(name) if name is not None else None
        if wanted is not None and len(wanted) == 1:
            return _as_input(choice, shape, wanted[0])
    if any(t.ids is not None for t in pending):
        raise RoutingError(
            f"{pending[0].layer} is computed again in backward, and which call of it that is cannot be told: keep replay_routing open "
            "until backward is over, with one call of each layer in it"
        )
    return _as_input(choice, shape, None)


def _note(choice: Choice, args: Sequence[Any], ids: Tensor) -> None:
    for context in _open:
        name = context.layer(choice, args) if context.record is not None else None
        if name is not None and context.record is not None:
            context.record.setdefault(name, []).append(ids.detach().reshape(-1, choice.top_k).clone())


__all__ = ["Context", "Routing", "closed", "enter", "leave", "names_of", "on", "running"]
