"""Calls as records: what the first calls of a kind allocate and launch, done again for every later one by the C++ of ``player.py``.

The Python of an op works out sizes, strides and configurations, which follow from the kind of its arguments alone: shapes, strides, dtypes,
alignments, device and options. So it runs twice for each kind, and the second time a :class:`Recorder` takes down every operation of torch
and every launch with the tensors that go in and come out. A record knows no tensor, only slots: when it is played, the arguments are in the
first slots, and each step fills the next ones. A view is an address for what only launches read. A tensor is let go after its last step,
but for small ones, which are made at once (``together.py``), so a call takes hardly more memory than the one that was recorded.

What cannot be taken down is not: a call with an operation that reads values, with one whose arguments C++ cannot hand on, with a tensor
that comes from elsewhere, or with a launch that only Triton can make, runs in Python always.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse._torch_private import after_operations
from moefuse.kernels.triton.launch import operations, player
from moefuse.kernels.triton.launch.launch import SLOW, Launch
from moefuse.kernels.triton.launch.nested import Slot, replaced, tensors_of
from moefuse.kernels.triton.launch.steps import ASIDE, BACK, CALL, FIXED, FORK, LAUNCH, MAKE, MEET, TURN, VIEW, ZERO, Place, Step, written
from moefuse.kernels.triton.launch.together import extent
from moefuse.machine import slow_paths

_EMPTY = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty")}
_ZEROS = {getattr(torch.ops.aten, name) for name in ("zeros", "zeros_like", "new_zeros")}
_ZERO = torch.ops.aten.zero_
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_active = threading.local()


class _Known(NamedTuple):
    """A tensor of the call that is recorded. Weakly: who records a call holds none of its memory. ``whole``: the slot holds this tensor."""

    tensor: weakref.ref[Tensor]
    place: Place
    whole: bool


class Recorder:
    """Takes down what is done on this thread, until something cannot be."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        self.known: dict[int, _Known] = {}
        self.arguments, self.device = len(arguments), arguments[0].device
        self.count = 0
        self.steps: list[Step] = []
        self.guards: list[int] = []
        self.fixed: dict[int, int] = {}
        self.kept: list[Any] = []
        self.held: dict[int, torch.dtype] = {}
        self.refusal: str | None = None
        self.paused = False
        self.aside = False
        for t in arguments:
            self._add(t)

    def refuse(self, reason: str) -> None:
        """There will be no record; the first reason counts."""
        self.refusal = self.refusal or reason

    def guard(self, number: ctypes.c_int64) -> None:
        """Play only as long as a number is zero. A call that fails while it is played sets it to -1."""
        self.guards.append(ctypes.addressof(number))
        self.kept.append(number)

    def slot(self) -> int:
        """A new one."""
        self.count += 1
        return self.count - 1

    def _add(self, t: Tensor) -> int:
        slot = self.slot()
        self.known[id(t)], self.held[slot] = _Known(weakref.ref(t), Place(slot, 0), True), t.dtype
        return slot

    def find(self, t: Tensor) -> _Known | None:
        """What is known of a tensor of this call."""
        known = self.known.get(id(t))
        return None if known is None or known.tensor() is not t else known

    def place(self, t: Tensor) -> Place:
        """Where it begins.

        Raises:
            LookupError: it comes from elsewhere.
        """
        known = self.find(t)
        if known is None:
            raise LookupError("a tensor that comes from elsewhere")
        return known.place

    def whole(self, t: Tensor) -> Slot:
        """A slot that holds the tensor itself, for who reads more of it than its address: a view is made now.

        Raises:
            LookupError: as :meth:`place`, or a view that cannot be made so.
        """
        slot, behind = self.place(t)
        if not self.known[id(t)].whole:
            base = self._shown(slot, t.dtype)
            slot = self._add(t)
            numbers = (behind // t.element_size(), t.dim(), *t.shape, *t.stride())
            self.steps.append(Step(VIEW, numbers, (slot,), (Place(base, 0),)))
        return Slot(slot)

    def _shown(self, slot: int, dtype: torch.dtype) -> int:
        """A slot that holds what is in this one in a dtype of the same size."""
        of = self.held.get(slot)
        if of is None or of.itemsize != dtype.itemsize:
            raise LookupError(f"a view of {of} as {dtype}")
        if of == dtype:
            return slot
        made = self.slot()
        self.held[made] = dtype
        shown = (2, operations.TENSOR, slot, operations.WORD, operations.dtype_code(dtype), 1, made)
        self.steps.append(Step(CALL, (("aten::view", "dtype"), shown), (made,), (Place(slot, 0),)))
        return made

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What is done here is no step, but part of one."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def turn(self, what: int, side: Any) -> None:
        """FORK, ASIDE, BACK or MEET of a second stream (``overlap.Side``), which is None where there is one stream only."""
        self.aside = what == ASIDE or (self.aside and what != BACK)
        self.kept.append(side)
        handles = (0, 0) if side is None else (side.stream.cuda_stream, (side.fork if what == FORK else side.join).cuda_event)
        reads = [place for step in self.steps for place in step.reads] if what == MEET else ()
        self.steps.append(Step(TURN, (what, *handles), (), reads))

    def operation(self, op: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        """An operation of torch."""
        if self.paused:
            return
        try:
            self._operation(op, args, named, out)
        except LookupError as error:
            self.refuse(f"{op}: {error.args[0]}")

    def _operation(self, op: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        if not _READS.isdisjoint(op.tags) or not isinstance(out, Tensor | list | tuple):
            raise LookupError("it waits for the device")
        packet, results, given = op.overloadpacket, tensors_of(out), tensors_of((args, [*named.values()]))
        if packet in _EMPTY | _ZEROS and results[0].device == self.device:
            self._made(results[0], zero=packet in _ZEROS)
        elif packet is _ZERO and args[0].is_contiguous():
            self._zero(args[0])
        elif not all(self._viewed(t, given) for t in results):
            if [str(returned.type) for returned in op._schema.returns] != ["Tensor"] * len(results):
                raise LookupError("it returns a list, or no tensor")
            if self.aside:
                raise LookupError("an operation on a second stream")
            names, numbers = operations.call(op, args, named, self.whole)
            made = [-1 if self.find(t) is not None else self._add(t) for t in results]
            reads = [Place(self.whole(t), 0) for t in given]
            self.steps.append(Step(CALL, (names, (*numbers, len(made), *made)), [slot for slot in made if slot >= 0], reads))

    def _made(self, t: Tensor, zero: bool) -> None:
        slot = self._add(t)
        self.steps.append(Step(MAKE, (tuple(t.shape), t.stride(), t.dtype), (slot,)))
        if zero:
            self._zero(t)

    def _zero(self, t: Tensor) -> None:
        if size := extent(tuple(t.shape), t.stride(), t.dtype):
            self.steps.append(Step(ZERO, (size,), (), (self.place(t),)))

    def _viewed(self, t: Tensor, given: Sequence[Tensor]) -> bool:
        """Whether a result shows memory of an argument, or is one."""
        if self.find(t) is not None:
            return False  # written to
        memory = t.untyped_storage().data_ptr()
        of = next((a for a in given if memory and self.find(a) is not None and a.untyped_storage().data_ptr() == memory), None)
        if of is None:
            return False
        slot, behind = self.place(of)
        same = (t.shape, t.stride(), t.dtype, t.data_ptr()) == (of.shape, of.stride(), of.dtype, of.data_ptr())
        place = Place(slot, behind + t.data_ptr() - of.data_ptr())
        self.known[id(t)] = _Known(weakref.ref(t), place, same and self.known[id(of)].whole)
        return True

    def finish(self, result: Any) -> tuple[Sequence[int], Sequence[str], Any] | None:
        """The record in numbers (player.cpp has their order), the names in it and the memory that it needs; None if it is not complete."""
        try:
            slots = [self.whole(t) for t in tensors_of(result)]
            if not any(step.do == LAUNCH for step in self.steps):
                self.refuse("nothing is launched")
            if len({*slots}) < len(slots):
                self.refuse("one tensor is returned twice")
            return None if self.refusal else written(self, slots, isinstance(result, list))
        except LookupError as error:
            self.refuse(error.args[0])
        except NotImplementedError as reason:
            slow_paths.taken(SLOW, str(reason))
            self.refuse(str(reason))
        return None


def active() -> Recorder | None:
    """Who records this thread's call."""
    return getattr(_active, "recorder", None)


def as_value(function: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]) -> Any:
    """Call a function whose result follows from where tensors begin, and is kept: what is recorded is for tensors that begin there.

    Without tensors: what is the same in every call until records are forgotten.
    """
    recorder = active()
    if recorder is None:
        return function(tensors)
    with recorder.pause():
        out = function(tensors)
    places = [known.place for t in tensors if (known := recorder.find(t)) is not None]
    if len(places) < len(tensors) or any(place.slot >= recorder.arguments for place in places):
        recorder.refuse("a table of addresses that are new in every call")
        return out
    for t, place in zip(tensors, places, strict=True):
        recorder.fixed[place.slot] = t.data_ptr() - place.behind
    for t in tensors_of(out):
        if recorder.find(t) is None:
            slot = recorder._add(t)
            del recorder.held[slot]  # an address alone
            recorder.steps.append(Step(FIXED, (t.data_ptr(),), (slot,)))
            recorder.kept.append(t)
    return out


def as_launch(it: Launch, tensors: Sequence[Tensor]) -> None:
    """Make a launch."""
    recorder = active()
    if recorder is None:
        it.run(tensors)
        return
    with recorder.pause():
        it.run(tensors)
    try:
        recorder.steps.append(Step(LAUNCH, it, (), [recorder.place(t) for t in tensors]))
    except LookupError as error:
        recorder.refuse(f"{it.kernel.__name__}: {error.args[0]}")


def asked(op: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    """The Python of an op that C++ asks for what it does not know: it is recorded if C++ wants that."""
    it = player.active()
    kind = None if it is None else it.asked()
    if it is None or kind is None:
        return op(*args, **options)
    if active() is not None or _capturing(args):
        it.decline(kind)  # within another record; or of a graph, whose tables hold nothing yet
        return op(*args, **options)
    return _recorded(it, kind, op, args, options)


def _capturing(args: Sequence[Any]) -> bool:
    return tensors_of(args)[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _recorded(it: player.Player, kind: int, op: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]) -> Any:
    # A tensor that is given twice is two tensors in another call of this kind.
    own = [t.detach() for t in tensors_of((args, [*options.values()]))]
    arguments = iter(own)
    args, values = replaced(Tensor, lambda _: next(arguments), (tuple(args), [*options.values()]))
    recorder = _active.recorder = Recorder(own)
    try:
        with after_operations(recorder.operation):
            out = op(*args, **dict(zip(options, values, strict=True)))
    finally:
        _active.recorder = None
    found = recorder.finish(out)
    it.remember(kind, *(found or (None,)))
    return out
