"""Calls of an op as a record: what the first call of a kind allocates and launches, done again for every later one.

The Python of an op works out sizes, strides and configurations, which follow from the kind of its arguments alone: shapes, strides, dtypes,
alignments, device and options. So it runs once for each kind, while a :class:`Recorder` takes down every operation of torch and every
launch with the tensors that go in and come out. A :class:`Record` knows no tensor and no address, only their :class:`Slot`: when it is
played, the arguments are in the first slots, and each step fills the next ones. A tensor is let go after its last step, so no call takes
more memory than the one that was recorded.

What cannot be taken down is not: a call with an operation that reads values, with a tensor that comes from elsewhere, or with a launch that
Triton has to bind anew each time (the interpreter, other versions of Triton) runs in Python always.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse._torch_private import after_operations, current_device, empty_cuda, raw_stream
from moefuse.kernels.triton import config
from moefuse.kernels.triton.launch.driver_launch import launch_again
from moefuse.kernels.triton.launch.launch import INTERPRETED, Launch, tf32_allowed

RECORDS: dict[Any, Record | None] = {}
"""By the kind of a call; None where calls are not recorded."""
_MET: set[Any] = set()
"""Kinds that were called once. Taking down costs a call more than playing it saves: a kind is worth it that comes again."""
_MAX_RECORDS = 1 << 10
"""Records kept, of up to some twenty launches; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""
_EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_SEQUENCES = (list, tuple)
_active = threading.local()


class Slot(int):
    """The place of a tensor among those of a call: the arguments, then all results in their order."""


class Record(NamedTuple):
    """Steps (what is done, with what, slots that nobody reads after it), and the result with slots for its tensors.

    A step is a :class:`Launch` with the slots of its arrays, :func:`empty_cuda` with (size, stride, dtype), or any function with arguments.
    """

    steps: Sequence[tuple[Any, Sequence[Any], Sequence[int]]]
    result: Any

    def play(self, tensors: list[Any], device: int) -> Any:
        """Do it for a call with these arguments, which begin in memory as aligned as the recorded ones. Memory from torch always is."""
        stream = raw_stream(device)
        for do, args, over in self.steps:
            if type(do) is Launch:
                launch_again(do, stream, [tensors[i].data_ptr() for i in args])
            elif do is empty_cuda:
                tensors.append(empty_cuda(*args))
            else:
                tensors += tensors_of(do(*replaced(Slot, tensors.__getitem__, args)))
            for i in over:
                tensors[i] = None
        return replaced(Slot, tensors.__getitem__, self.result)


class Recorder:
    """Takes down what is done on this thread, until something cannot be."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self.slots: dict[int, tuple[weakref.ref[Tensor], Slot]] = {}
        self.arguments, self.device = len(arguments), arguments[0].device
        self.count = 0
        self.steps: list[tuple[Any, Any]] = []
        self.lasting: set[int] = set()
        self.complete = True
        self.paused = False
        self._add(arguments)

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            # Weakly: who records a call holds none of its memory.
            self.slots[id(t)] = weakref.ref(t), Slot(self.count)
            self.count += 1

    def _slot(self, t: Tensor) -> Slot:
        known, slot = self.slots.get(id(t), (None, Slot(0)))
        if known is None or known() is not t:
            raise LookupError
        return slot

    def apart(self, t: Tensor) -> Tensor:
        """t, or where t has a slot, the same tensor as another object."""
        known, _ = self.slots.get(id(t), (None, 0))
        return t if known is None or known() is not t else t.detach()

    def step(self, do: Any, args: Sequence[Any], out: Any = None) -> Sequence[Any]:
        """One step, with the tensors that it was given and that it returned; its arguments with slots."""
        slots: Sequence[Any] = ()
        try:
            slots = replaced(Tensor, self._slot, args)
        except LookupError:
            self.complete = False
        self.steps.append((do, slots))
        self._add(tensors_of(out))
        return slots

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is done here is no step, but part of one."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def operation(self, op: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        """An operation of torch."""
        if self.paused:
            return
        if not _READS.isdisjoint(op.tags) or not isinstance(out, Tensor | list | tuple):
            self.complete = False
        if op.overloadpacket in _EMPTY and out.device == self.device:
            self.step(empty_cuda, (tuple(out.shape), out.stride(), out.dtype), out)
        else:
            self.step(functools.partial(_named, op, tuple(named)), (args, [*named.values()]), out)

    def finish(self, result: Any) -> Record | None:
        """The record of all steps; None if it would not be complete."""
        try:
            result = replaced(Tensor, self._slot, result)
        except LookupError:
            return None
        if not self.complete or not any(type(do) is Launch for do, _ in self.steps):
            return None  # operations of torch alone are as quick from Python
        last = {slot: n for n, (_, args) in enumerate(self.steps) for slot in slots_of(args)}
        kept = self.lasting.union(range(self.arguments), slots_of(result))
        over: list[list[int]] = [[] for _ in self.steps]
        for slot, n in last.items():
            if slot not in kept:
                over[n].append(slot)
        return Record([(do, args, free) for (do, args), free in zip(self.steps, over, strict=True)], result)


def _named(op: Any, names: Sequence[str], args: Sequence[Any], values: Sequence[Any]) -> Any:
    return op(*args, **dict(zip(names, values, strict=True)))


def active() -> Recorder | None:
    """Who records this thread's call."""
    return getattr(_active, "recorder", None)


def as_step(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that looks at addresses, which are new in every call. Tensors that it is given live as long as the call."""
    recorder = active()
    if recorder is None:
        return function(*args)
    with recorder.pause():
        # What it returns may be one of its arguments now and another one in another call: that is a slot of its own.
        out = replaced(Tensor, recorder.apart, function(*args))
    recorder.lasting.update(slots_of(recorder.step(function, args, out)))
    return out


def as_launch(function: Callable[..., None], it: Launch, tensors: Sequence[Tensor]) -> None:
    """Make a launch for the first time, by ``function(it, tensors)``."""
    recorder = active()
    if recorder is None:
        function(it, tensors)
        return
    with recorder.pause():
        function(it, tensors)
    recorder.step(it, tensors)
    recorder.complete &= it.compiled is not None


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of tensors, lists, tuples and options be recorded. It runs with the device of its first tensor as the current one."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        if INTERPRETED or active() is not None:
            return function(*args)
        tensors: list[Any] = []
        kinds = [kind_of(a, tensors) for a in args]
        device = tensors[0].get_device()
        key = function, device, tf32_allowed(), config.PRODUCTS, *kinds
        if device < 0 or device == current_device():
            return _call(key, function, args, tensors, device)
        with torch.cuda.device(device):
            return _call(key, function, args, tensors, device)

    return wrapper


def _call(key: Any, function: Callable[..., Any], args: Sequence[Any], tensors: list[Any], device: int) -> Any:
    record = RECORDS.get(key)
    if record is not None:
        return record.play(tensors, device)
    if key in RECORDS or _first_time(key):
        return function(*args)
    # A tensor that is given twice is two tensors in another call of this kind.
    arguments = iter(own := [t.detach() for t in tensors])
    args = replaced(Tensor, lambda _: next(arguments), args)
    recorder = _active.recorder = Recorder(own)
    try:
        with after_operations(recorder.operation):
            out = function(*args)
    finally:
        _active.recorder = None
    if len(RECORDS) >= _MAX_RECORDS:
        RECORDS.clear()
    RECORDS[key] = recorder.finish(out)
    return out


def _first_time(key: Any) -> bool:
    if key in _MET:
        _MET.discard(key)
        return False
    if len(_MET) >= _MAX_RECORDS:
        _MET.clear()
    _MET.add(key)
    return True


def kind_of(value: Any, tensors: list[Any]) -> Any:
    """What a record depends on of one argument, whose tensors are appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype, value.shape, value.stride(), value.data_ptr() & 15
    if not isinstance(value, _SEQUENCES):
        return value
    if type(value) is list and len(value) > 1 and isinstance(value[0], Tensor):
        tensors += value
        return kind_of_list(value, [*map(Tensor.data_ptr, value)])
    return tuple([kind_of(v, tensors) for v in value])


def kind_of_list(tensors: Sequence[Tensor], addresses: Sequence[int]) -> Any:
    """The same of a list with a tensor for each expert, whose shapes and dtypes are equal (the op checks them)."""
    # One pass of each kind over the tensors is quicker than one tuple per tensor, and quickest where their shape says it all.
    first, every = tensors[0], None
    if min(first.shape) < 2 or not all(map(Tensor.is_contiguous, tensors)):
        strides = {*map(Tensor.stride, tensors)}
        every = strides.pop() if len(strides) == 1 else tuple(map(Tensor.stride, tensors))
    return len(tensors), first.dtype, first.shape, every, _aligned(tuple(addresses))


@functools.lru_cache(maxsize=4096)
def _aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of 16. Known ones are found in a sixth of the time that looking at each takes."""
    return not any(address & 15 for address in addresses)


def replaced(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """A value with others in the place of what is of a kind, in lists and tuples as well."""
    if isinstance(value, kind):
        return change(value)
    if not isinstance(value, _SEQUENCES):
        return value
    parts = [change(v) if isinstance(v, kind) else replaced(kind, change, v) for v in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def _found(kind: type, value: Any) -> list[Any]:
    found: list[Any] = []
    replaced(kind, found.append, value)
    return found


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in a value."""
    return [value] if isinstance(value, Tensor) else _found(Tensor, value)


def slots_of(value: Any) -> list[Slot]:
    """All slots in a value."""
    return _found(Slot, value)


def forget_records() -> None:
    """Record every call anew."""
    RECORDS.clear()
    _MET.clear()
