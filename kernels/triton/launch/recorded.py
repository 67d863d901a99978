"""Functions as calls of one op, ``moefuse::recorded``, so that C++ plays them where no op of their own stands above them, or has no record.

The op takes all tensors, and a number for all else: the function, its other arguments, and where in them the tensors are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from moefuse._torch_private import current_device, failures
from moefuse.kernels.triton.launch import player
from moefuse.kernels.triton.launch.nested import SEQUENCES, Slot, replaced, tensors_of
from moefuse.kernels.triton.launch.record import active, asked

OP = "recorded"
_HERE = object()
_MOST = 1 << 14
"""Numbers in use; beyond, all are dropped (none is used again), and so are the records."""


@dataclass(eq=False)
class _What:
    """A function and its arguments, with slots for tensors, and so what it returned."""

    number: int
    function: Callable[..., Any]
    args: Any
    result: Any = None


_known: dict[Any, _What] = {}
_whats: WeakValueDictionary[int, _What] = WeakValueDictionary()
"""By their number; a call that is under way keeps its own."""
_next = itertools.count()
_lock = threading.Lock()


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of tensors, lists, tuples and options be recorded. It runs with the device of its first tensor as the current one."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        if active() is not None:
            return function(*args)
        it, tensors = player.active(), list[Tensor]()
        key = function, _key(args, tensors)
        with _on(tensors[0].get_device()):
            if it is None or not it.plays(OP, tensors[0]):
                return function(*args)
            what = _known.get(key) or _met(key, function, args)
            found = _call(tensors, what.number)
            return replaced(Slot, found.__getitem__, what.result)

    return wrapper


def _on(device: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if device < 0 or device == current_device() else torch.cuda.device(device)


def _key(value: Any, tensors: list[Tensor]) -> Any:
    """What stands for a value among keys, whose tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return _HERE
    if not isinstance(value, SEQUENCES):
        return value
    return (type(value), *[_key(v, tensors) for v in value])


def _met(key: Any, function: Callable[..., Any], args: Any) -> _What:
    with _lock:
        if len(_known) >= _MOST:
            _known.clear()
            player.forget()
        made = _known[key] = _What(next(_next), function, _slotted(args))
        _whats[made.number] = made
    return made


def _slotted(value: Any) -> Any:
    """A value with slots for its tensors, in their order."""
    slots = itertools.count()
    return replaced(Tensor, lambda _: Slot(next(slots)), value)


def _again(tensors: Sequence[Tensor], what: int) -> list[Tensor]:
    """The op: the function of its arguments."""
    it = _whats[what]
    out = it.function(*replaced(Slot, tensors.__getitem__, it.args))
    it.result = _slotted(out)
    return tensors_of(out)


def _asked(*given: Any) -> Any:
    return asked(_again, given, {})


_LIBRARY = torch.library.Library(player.NAMESPACE, "FRAGMENT")
for _name, _kernel in ((OP, _again), (OP + player.TWIN, failures.told(_asked, taken=True))):
    _LIBRARY.define(f"{_name}(Tensor[] tensors, int what) -> Tensor[]")
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
_call = failures.as_raised(torch.ops.moefuse.recorded.default)
