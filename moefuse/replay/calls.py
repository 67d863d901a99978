"""What a graph with open choices is given in a call, and what becomes of what it took.

Activation checkpoints that wrap compiled code run it again while backward goes on, perhaps when the user's ``with`` is over. Such a call
takes what the first one took: it has the same inputs in memory, for a checkpoint keeps them. The memory of that ends with them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from moefuse import _torch_private
from moefuse.errors import RoutingError
from moefuse.replay.blocks import Context, caller, here, place
from moefuse.replay.choices import Choice, Opened
from moefuse.replay.words import call_it, count, ordinal


@dataclass(eq=False)
class _Taken:
    """What a checkpoint's call took, of which others it is told by its inputs. ``ids``: None if the router chose."""

    layer: str
    place: int
    thread: int
    inputs: tuple[Any, ...]
    alive: list[StorageWeakRef]
    ids: Tensor | None
    several: bool = False


_taken: list[_Taken] = []
_lock = threading.RLock()
"""Guards ``_taken``, which forward and backward of several threads add to and take from."""
closed: dict[str, str] = {}
"""Layers whose choices no graph could open, and why."""


def on() -> bool:
    """Whether graphs have to be open in this thread: in a block, and while a checkpoint has to make a call again that was in one.

    Backward may be called in another thread than that call was made in, so all of them count there. In forward those of this thread do:
    a call with the same tensors has to be told from them, and other threads run what they ran before.
    """
    if here():
        return True
    if not _taken:
        return False
    with _lock:
        _forget()
        return any(_torch_private.running_backward() >= 0 or t.thread == caller() for t in _taken)


def running(opened: Opened, compiled: _torch_private.CompiledFn) -> _torch_private.CompiledFn:
    """A compiled graph with open choices, to call like the one that it was."""
    choices, ours = opened.choices, len(opened.choices)

    def run(*args: Any) -> Any:
        again = _torch_private.running_backward() >= 0
        given = [_again(choice, args) if again else _given(choice, args) for choice in choices]
        out = compiled(*args, *given)
        if not again:
            for choice, ids in zip(choices, out[-ours:], strict=True):
                _note(choice, args, ids)
        return out[:-ours]

    return run


def _given(choice: Choice, args: Sequence[Any]) -> Tensor:
    """[T, K]: the ids of this call, -1 where the router chooses."""
    shape, taken, layer = choice.shape(args), None, choice.module
    for context in [c for c in reversed(here()) if c.replays]:
        name = context.layer(choice, args)
        wanted = context.wanted(name) if name is not None else None
        if name is None or wanted is None:
            continue
        number = context.ran.get(name, 0)
        if number >= len(wanted):
            has = count(len(wanted), "call")
            raise RoutingError(f"{call_it(name)} runs for the {ordinal(number + 1)} time, and replay_routing has ids for {has} of it")
        _check(name, wanted[number], choice, shape, context)
        context.ran[name], taken, layer = number + 1, wanted[number], name
        break
    _remember(layer, choice, args, taken)
    return _as_input(choice, shape, taken)


def _check(layer: str, ids: Tensor, choice: Choice, shape: Sequence[int], context: Context) -> None:
    tokens = math.prod(shape) // choice.top_k
    if tuple(ids.shape) != (tokens, choice.top_k):
        has = f"{call_it(layer)} has {count(tokens, 'token')} and takes {count(choice.top_k, 'expert')} for each"
        raise RoutingError(f"{has}: its ids are not {list(ids.shape)}")
    if context.highest.get(id(ids), -1) >= choice.experts:
        raise RoutingError(f"{call_it(layer)} has {count(choice.experts, 'expert')}, and is to take number {context.highest[id(ids)]}")


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
    found, inputs = _inputs(args)
    # One kind of checkpoint keeps nothing for gradients, by hooks; the other runs without gradients what wants some.
    if not (_torch_private.keeps_by_hooks() or (not torch.is_grad_enabled() and any(a.requires_grad for a in found))):
        return
    at, thread = _witness(choice, args), caller()
    with _lock:
        _forget()
        same = next((t for t in _taken if (t.place, t.thread, t.inputs) == (at, thread, inputs)), None)
        if same is None:
            _taken.append(_Taken(layer, at, thread, inputs, [StorageWeakRef(a.untyped_storage()) for a in found], ids))
            return
        same.several = same.ids is not ids
        same.ids = ids


def _witness(choice: Choice, args: Sequence[Any]) -> int:
    """What tells a layer from others that run its code."""
    return place(args[choice.at]) if choice.at >= 0 else hash(choice.module)


def _forget() -> None:
    _taken[:] = [t for t in _taken if not any(ref.expired() for ref in t.alive)]


def _again(choice: Choice, args: Sequence[Any]) -> Tensor:
    """What the call took that is made again now."""
    _, inputs = _inputs(args)
    shape = choice.shape(args)
    at, thread = _witness(choice, args), caller()
    with _lock:
        pending = [t for t in _taken if t.place == at]
        found = [t for t in pending if t.inputs == inputs]
        found = [t for t in found if t.thread == thread] or found  # backward may be called in another thread than forward was
        if len(found) == 1 and not found[0].several:
            _taken.remove(found[0])
            return _as_input(choice, shape, found[0].ids)
    for context in [c for c in reversed(here()) if c.replays]:
        name = context.layer(choice, args)
        wanted = context.wanted(name) if name is not None else None
        if wanted is not None and len(wanted) == 1:
            return _as_input(choice, shape, wanted[0])
    if any(t.ids is not None for t in pending):
        raise RoutingError(
            f"{call_it(pending[0].layer)} is computed again in backward, and which call of it that is cannot be told: keep "
            "replay_routing open until backward is over, with one call of each layer in it"
        )
    return _as_input(choice, shape, None)


def _note(choice: Choice, args: Sequence[Any], ids: Tensor) -> None:
    for context in here():
        name = context.layer(choice, args) if context.record is not None else None
        if name is not None and context.record is not None:
            context.record.setdefault(name, []).append(ids.detach().reshape(-1, choice.top_k).clone())


__all__ = ["closed", "on", "running"]
