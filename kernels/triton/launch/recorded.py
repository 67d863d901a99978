"""Functions as calls of one op, ``moefuse::recorded``, so that C++ plays them where no op of their own stands above them, or has no record.

The op takes all tensors, and a number for all else: the function, its other arguments, and where in them the tensors are.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class _What(NamedTuple):
    """A function and its arguments, with slots for tensors."""

    function: Callable[..., Any]
    args: Any


_numbers: dict[Any, int] = {}
_whats: dict[int, _What] = {}
_results: dict[int, Any] = {}
"""What each returned, with slots for tensors."""
_next = itertools.count()
_lock = threading.Lock()
_raised = threading.local()


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
            what = _numbers.get(key)
            if what is None:
                what = _number(key, function, args)
            try:
                found = torch.ops.moefuse.recorded.default(tensors, what)
            except Exception:
                if (error := _raised.__dict__.pop("error", None)) is None:
                    raise
                raise error from None  # as the function raised it: through C++ it may have lost its class
            return replaced(Slot, found.__getitem__, _results[what])

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


def _number(key: Any, function: Callable[..., Any], args: Any) -> int:
    slots = itertools.count()
    with _lock:
        if len(_numbers) >= _MOST:
            _numbers.clear()
            player.forget()
        number = _numbers[key] = next(_next)
        _whats[number] = _What(function, replaced(Tensor, lambda _: Slot(next(slots)), args))
    return number


def _again(tensors: Sequence[Tensor], what: int) -> list[Tensor]:
    """The op: the function of its arguments."""
    function, args = _whats[what]
    try:
        out = function(*replaced(Slot, tensors.__getitem__, args))
    except BaseException as error:
        _raised.error = error
        raise
    slots = itertools.count()
    _results[what] = replaced(Tensor, lambda _: Slot(next(slots)), out)
    return tensors_of(out)


def _asked(*given: Any) -> Any:
    return asked(_again, given, {})


_LIBRARY = torch.library.Library(player.NAMESPACE, "FRAGMENT")
for _name, _kernel in ((OP, _again), (OP + player.TWIN, failures.told(_asked))):
    _LIBRARY.define(f"{_name}(Tensor[] tensors, int what) -> Tensor[]")
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, torch.library.fallthrough_kernel, "Autograd")
