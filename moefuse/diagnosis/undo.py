"""Taking back what a call did to what it was given: contents of tensors, Python objects, random states."""

from __future__ import annotations

import collections
import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.program.breaks import is_the_programs

_NOTHING = object()
"""Content of a variable that has no value yet."""

Restore = Callable[[], object]


class TakenBack:
    """A block of :func:`taken_back`, for who calls a program in it again and again.

    Attributes:
        tensors: what the roots hold.
        put_back: makes all but the random states what it was.
        unwatch: has writes to tensors no longer seen, which slows all operations: what the block has not written by then is not copied.
    """

    def __init__(self, tensors: list[torch.Tensor], put_back: Callable[[], None], unwatch: Callable[[], None]) -> None:
        self.tensors, self.put_back, self.unwatch = tensors, put_back, unwatch


@contextlib.contextmanager
def taken_back(*roots: object) -> Iterator[TakenBack]:
    """Put back, when the block ends, whatever it changed in ``roots`` and what they hold, and the random states of this process.

    Nothing is copied beforehand but references: what a tensor holds is copied when something is about to write to it.
    """
    found = _Reachable()
    found.walk(*roots)
    restores = [_snapshot(value) for value in found.values]
    copies: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def save(tensor: torch.Tensor) -> None:
        for storage in _torch_private.storages_of(tensor):
            if storage._cdata in found.storages and storage._cdata not in copies:
                copies[storage._cdata] = (storage, storage.clone())

    def put_back() -> None:
        for storage, content in copies.values():
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)
        for restore in restores:
            restore()

    with _random_states(), contextlib.ExitStack() as watching:
        watching.enter_context(_torch_private.before_writes(save))
        try:
            yield TakenBack([v for v in found.values if isinstance(v, torch.Tensor)], put_back, watching.close)
        finally:
            watching.close()
            put_back()


class _Reachable:
    """The objects that can be reached from some roots by attributes, containers and closures."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.storages: set[int] = set()
        self._seen: dict[int, Any] = {}

    def walk(self, *roots: Any) -> None:
        stack = list(roots)
        while stack:
            value = stack.pop()
            if id(value) in self._seen or value is None or isinstance(value, int | float | str | bytes | type | types.ModuleType):
                continue
            self._seen[id(value)] = value
            inside = _inside(value)
            if inside is None:
                continue
            self.values.append(value)
            stack += inside
            if isinstance(value, torch.Tensor):
                self.storages.update(storage._cdata for storage in _torch_private.storages_of(value))


def _inside(value: Any) -> list[Any] | None:
    """What an object holds; None for an object that nothing is done about."""
    if isinstance(value, torch.Tensor):
        return [value.grad if value.is_leaf else None, *vars(value).values()]
    if isinstance(value, types.FunctionType):
        return [*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, types.CellType):
        return [_content(value)]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, torch.Generator | random.Random) or _is_array(value) or _is_numpy_generator(value):
        return []
    items: list[Any] | None = None
    if isinstance(value, dict):
        items = list(dict.values(value))
    elif isinstance(value, list | set | frozenset | tuple | collections.deque):
        items = list(value)
    return [*(items or ()), *_attributes(value).values(), *_slots(value).values()] if _is_state(value) else items


def _is_state(value: Any) -> bool:
    """Whether the attributes of an object may be a model's state."""
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer | types.SimpleNamespace):
        return True
    return is_the_programs(str(type(value).__module__))


def _attributes(value: Any) -> dict[str, Any]:
    found: dict[str, Any] = vars(value) if hasattr(value, "__dict__") else {}
    return found


def _slots(value: Any) -> dict[str, Any]:
    declared = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.flags.writeable


def _is_numpy_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def _snapshot(value: Any) -> Restore:
    """How to put back what an object is now; it writes only what was changed."""
    parts: list[Restore] = []
    if isinstance(value, torch.Tensor):
        parts += [_torch_private.tensor_state(value), contents(vars(value))]
    elif isinstance(value, dict):
        parts.append(contents(value))
    elif isinstance(value, list | set | collections.deque):
        parts.append(_sequence(value))
    elif isinstance(value, types.CellType):
        parts.append(_cell(value))
    elif isinstance(value, torch.Generator):
        parts.append(functools.partial(value.set_state, value.get_state()))
    elif isinstance(value, random.Random):
        parts.append(functools.partial(value.setstate, value.getstate()))
    elif _is_numpy_generator(value):
        parts.append(functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state))
    elif _is_array(value):
        parts.append(functools.partial(value.__setitem__, ..., value.copy()))
    if isinstance(value, torch.nn.Module):
        parts += [_torch_private.sharded_again(value), _kind(value)]
    if isinstance(value, types.FunctionType) or _is_state(value):
        parts += [contents(_attributes(value)), *(_slot(value, name) for name in _slots(value))]
    return lambda: [part() for part in parts]


def _kind(module: torch.nn.Module) -> Restore:
    """A module's class, which lazy ones change in their first call."""
    before = type(module)

    def restore() -> None:
        if type(module) is not before:
            module.__class__ = before

    return restore


def contents(value: dict[Any, Any]) -> Restore:
    """How to put back what a dict holds, in its order."""
    # Subclasses have opinions on how they are changed (transformers' outputs forbid it); an OrderedDict has an order of its own.
    kind: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
    before = list(kind.items(value))

    def restore() -> None:
        now = list(kind.items(value))
        if len(now) == len(before) and all(a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True)):
            return
        kind.clear(value)
        for key, item in before:
            kind.__setitem__(value, key, item)

    return restore


def _sequence(value: Any) -> Restore:
    kind: Any = next(k for k in (list, set, collections.deque) if isinstance(value, k))
    before = list(value)

    def restore() -> None:
        now = list(value)
        if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
            return
        kind.clear(value)
        (kind.update if kind is set else kind.extend)(value, before)

    return restore


def _slot(value: Any, name: str) -> Restore:
    before = getattr(value, name)

    def restore() -> None:
        if getattr(value, name, _NOTHING) is not before:
            # As it is stored: a class may forbid it (frozen dataclasses).
            object.__setattr__(value, name, before)

    return restore


def _cell(value: types.CellType) -> Restore:
    before = _content(value)

    def restore() -> None:
        if before is not _NOTHING:
            value.cell_contents = before
        elif _content(value) is not _NOTHING:
            del value.cell_contents

    return restore


@contextlib.contextmanager
def _random_states() -> Iterator[None]:
    """Restore the random states of torch (all devices in use), Python and NumPy."""
    numpy: Any = sys.modules.get("numpy")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    python, array = random.getstate(), numpy.random.get_state() if numpy is not None else None
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(array)
