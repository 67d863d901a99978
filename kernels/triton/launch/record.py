"""Calls of an op as a record: what the first call of a kind allocates and launches, done again for every later one.

The Python of an op works out sizes, strides and configurations, which follow from the kind of its arguments alone: shapes, strides, dtypes,
alignments, device and options. So it runs once for each kind, while a :class:`Recorder` takes down every operation of torch and every
launch with the tensors that go in and come out. A :class:`Record` knows no tensor and no address, only their :class:`Slot`: when it is
played, the arguments are in the first slots, and each step fills the next ones. A tensor is let go after its last step, but for small ones,
which are made at once (``together.py``), so a call takes hardly more memory than the one that was recorded.

What cannot be taken down is not: a call with an operation that reads values, with a tensor that comes from elsewhere, or with a launch that
Triton has to bind anew each time (the interpreter, other versions of Triton) runs in Python always.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse._torch_private import after_operations, current_device, empty_cuda, raw_stream
from moefuse.kernels.triton import config
from moefuse.kernels.triton.launch.kinds import exact_kinds, kind_of
from moefuse.kernels.triton.launch.launch import INTERPRETED, Launch, tf32_allowed
from moefuse.kernels.triton.launch.nested import Slot, replaced, slots_of, tensors_of
from moefuse.kernels.triton.launch.together import together

RECORDS: dict[Any, Record | None] = {}
"""By the kind of a call; None where calls are not recorded."""
_MET: set[Any] = set()
"""Kinds that were called once. Taking down costs a call more than playing it saves: a kind is worth it that comes again."""
_MAX_RECORDS = 1 << 10
"""Records kept, of up to some twenty launches; beyond, all are dropped and made again when needed (a compiled kernel stays with Triton)."""
_EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}
_VIEW, _DETACH = torch.ops.aten.view.dtype, torch.ops.aten.detach.default
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_active = threading.local()


class Record(NamedTuple):
    """Steps (what is done, with what, the slots of what it gives, slots that nobody reads after it), how many slots there are behind those
    of the arguments, the result with slots for its tensors, and slots in one allocation of some bytes, where they begin in it.

    A step is a :class:`Launch` with the slots of its arrays, :func:`empty_cuda` with (size, stride, dtype), or any function with arguments.
    """

    steps: Sequence[tuple[Any, Sequence[Any], Sequence[int], Sequence[int]]]
    more: int
    result: Any
    places: Sequence[tuple[int, int]]
    bytes: int

    def play(self, tensors: list[Any], device: int) -> Any:
        """Do it for a call with these arguments, which begin in memory as aligned as the recorded ones. Memory from torch always is."""
        stream = raw_stream(device)
        addresses = [*map(Tensor.data_ptr, tensors), *[0] * self.more]
        tensors += [None] * self.more
        if self.places:
            memory = empty_cuda((self.bytes,), (1,), torch.uint8)
            start = memory.data_ptr()
            for i, at in self.places:
                addresses[i] = start + at
        for do, args, made, over in self.steps:
            if type(do) is Launch:
                do.again(stream, [addresses[i] for i in args])
            elif do is empty_cuda:
                tensors[made[0]] = empty_cuda(*args)
                addresses[made[0]] = tensors[made[0]].data_ptr()
            elif not made:
                do(*replaced(Slot, tensors.__getitem__, args))
            else:
                first, last = made[0], made[-1] + 1
                tensors[first:last] = tensors_of(do(*replaced(Slot, tensors.__getitem__, args)))
                addresses[first:last] = map(Tensor.data_ptr, tensors[first:last])
            for i in over:
                tensors[i] = None
        return replaced(Slot, tensors.__getitem__, self.result)


class _Known(NamedTuple):
    """A tensor of the call that is recorded, and its slot. Weakly: who records a call holds none of its memory.

    ``shown``: it may be in another dtype than what its slot has when the record is played, and is that at the same address.
    """

    tensor: weakref.ref[Tensor]
    slot: Slot
    shown: bool = False


class Recorder:
    """Takes down what is done on this thread, until something cannot be."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self.slots: dict[int, _Known] = {}
        self.arguments, self.device = len(arguments), arguments[0].device
        self.count = 0
        self.steps: list[tuple[Any, Any, Sequence[Slot]]] = []
        self.lasting: set[int] = set()
        self.values: dict[Any, Any] = {}
        self.complete = True
        self.paused = False
        self._add(arguments)

    def _add(self, tensors: Iterable[Tensor], shown: bool = False) -> list[Slot]:
        first = self.count
        for t in tensors:
            self.slots[id(t)] = _Known(weakref.ref(t), Slot(self.count), shown)
            self.count += 1
        return [Slot(i) for i in range(first, self.count)]

    def _known(self, t: Tensor) -> _Known | None:
        known = self.slots.get(id(t))
        return None if known is None or known.tensor() is not t else known

    def _slot(self, t: Tensor) -> Slot:
        known = self._known(t)
        if known is None:
            raise LookupError
        return known.slot

    def _read(self, t: Tensor) -> Slot:
        """The slot for who reads more of a tensor than its address: the view is made now."""
        known = self._known(t)
        if known is not None and known.shown:
            made = self._add([t])
            self.steps.append((_VIEW, (known.slot, t.dtype), made))
        return self._slot(t)

    def apart(self, t: Tensor) -> Tensor:
        """t, or where t has a slot, the same tensor as another object."""
        return t if self._known(t) is None else t.detach()

    def step(self, do: Any, args: Sequence[Any], out: Any = None, *, addresses: bool = False) -> Sequence[Any]:
        """One step, with the tensors that it was given and that it returned; its arguments with slots.

        ``addresses``: it reads nothing else of its tensors, and what it returns of them may be in their dtype.
        """
        slots: Sequence[Any] = ()
        try:
            slots = replaced(Tensor, self._slot if addresses else self._read, args)
        except LookupError:
            self.complete = False
        shown = addresses and any(known is not None and known.shown for known in map(self._known, tensors_of(args)))
        self.steps.append((do, slots, self._add(tensors_of(out), shown)))
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
        if (known := self._viewed(op, args, out)) is not None:
            # float8 as bytes begins where it does, and most of it goes to launches alone: no step until something else reads it.
            self.slots[id(out)] = _Known(weakref.ref(out), known.slot, True)
        elif op.overloadpacket in _EMPTY and out.device == self.device:
            self.step(empty_cuda, (tuple(out.shape), out.stride(), out.dtype), out)
        else:
            self.step(functools.partial(_named, op, tuple(named)), (args, [*named.values()]), out)

    def _viewed(self, op: Any, args: Sequence[Any], out: Any) -> _Known | None:
        """What ``out`` shows in another dtype of the same size. (Autograd detaches what a mode has seen of a view.)"""
        known = self._known(args[0]) if op in (_VIEW, _DETACH) else None
        if known is None or out.element_size() != args[0].element_size():
            return None
        return known if op is _VIEW or known.shown else None

    def finish(self, result: Any) -> Record | None:
        """The record of all steps but those that make memory for nobody; None if it would not be complete."""
        try:
            result = replaced(Tensor, self._read, result)
        except LookupError:
            return None
        if not self.complete or not any(type(do) is Launch for do, _, _ in self.steps):
            return None  # operations of torch alone are as quick from Python
        last = {slot: n for n, (_, args, _) in enumerate(self.steps) for slot in slots_of(args)}
        kept = self.lasting.union(range(self.arguments), slots_of(result))
        over: list[list[int]] = [[] for _ in self.steps]
        for slot, n in last.items():
            if slot not in kept:
                over[n].append(slot)
        tensors = kept.union(*(slots_of(args) for do, args, _ in self.steps if type(do) is not Launch))
        launched = last.keys() - tensors
        places, size = together((made[0], args) for do, args, made in self.steps if do is empty_cuda and made[0] in launched)
        alone = kept.union(last).difference(slot for slot, _ in places)
        steps = [
            (do, args, made, free)
            for (do, args, made), free in zip(self.steps, over, strict=True)
            if do is not empty_cuda or made[0] in alone
        ]
        return Record(steps, self.count - self.arguments, result, places, size)


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
    recorder.lasting.update(slots_of(recorder.step(function, args, out, addresses=True)))
    return out


def as_value(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Any:
    """:func:`as_step`, of a function whose result follows from where the tensors begin: it is called once in a call."""
    recorder = active()
    if recorder is None:
        return function(tensors)
    try:
        key = function, *map(recorder._slot, tensors)
    except LookupError:
        return as_step(function, tensors)
    if key not in recorder.values:
        recorder.values[key] = as_step(function, tensors)
    return recorder.values[key]


def as_launch(function: Callable[..., None], it: Launch, tensors: Sequence[Tensor]) -> None:
    """Make a launch for the first time, by ``function(it, tensors)``."""
    recorder = active()
    if recorder is None:
        function(it, tensors)
        return
    with recorder.pause():
        function(it, tensors)
    recorder.step(it, tensors, addresses=True)
    recorder.complete &= it.compiled is not None


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of tensors, lists, tuples and options be recorded. It runs with the device of its first tensor as the current one."""

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        if INTERPRETED or active() is not None:
            return function(*args)
        tensors: list[Any] = []
        kinds = [kind_of(a, tensors) for a in args]
        return _on_device((tf32_allowed(), *kinds), None, function, args, tensors)

    return wrapper


def by_kind(check: Callable[..., Any], run: Callable[..., Any], data: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """``run(check(*data, **options))`` for an op, as a record where the kind of all that the op is given has one.

    Whether a call is legal, who computes it and how follow from its kind, and ``exact_kinds`` leaves nothing of it out. So a call of a kind
    that has a record needs no check: the one that was recorded has passed all of them, and no kind has a record whose calls raise.

    Args:
        check: raises where the arguments do not fit; what it does is no part of a record.
        run: computes what ``check`` returns.
        data: tensors and lists of tensors.
        options: values, and lists of such.
    """
    if INTERPRETED or active() is not None:
        return run(check(*data, **options))
    tensors: list[Any] = []
    for value in data:
        if isinstance(value, Tensor):
            tensors.append(value)
        else:
            tensors += value
    given = [tuple(value) if type(value) is list else value for value in options.values()]
    tf32 = tensors[0].dtype == torch.float32 and tf32_allowed()
    key = tf32, *options, *given, *exact_kinds(data, tensors, [*map(Tensor.data_ptr, tensors)])

    def checked(*args: Any) -> Any:
        return check(*args, **options)

    return _on_device(key, checked, run, data, tensors)


def _on_device(key: Any, check: Any, function: Callable[..., Any], args: Sequence[Any], tensors: list[Any]) -> Any:
    """The function of what ``check`` makes of the arguments, if there is one; ``tensors``: all among these."""
    device = tensors[0].get_device()
    key = function, device, config.PRODUCTS, *key
    if device < 0 or device == current_device():
        return _call(key, check, function, args, tensors, device)
    with torch.cuda.device(device):
        return _call(key, check, function, args, tensors, device)


def _call(key: Any, check: Any, function: Callable[..., Any], args: Sequence[Any], tensors: list[Any], device: int) -> Any:
    record = RECORDS.get(key)
    if record is not None:
        return record.play(tensors, device)
    if key in RECORDS or _first_time(key):
        return function(*args) if check is None else function(check(*args))
    # A tensor that is given twice is two tensors in another call of this kind.
    arguments = iter(own := [t.detach() for t in tensors])
    args = replaced(Tensor, lambda _: next(arguments), args)
    if check is not None:
        args = (check(*args),)
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


def forget_records() -> None:
    """Record every call anew."""
    RECORDS.clear()
    _MET.clear()
