"""One function in the three ways: warmed up, compared, its memory measured, timed in turns."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from moefuse import _torch_private
from moefuse.diagnosis.undo import TakenBack, taken_back
from moefuse.errors import first_line
from moefuse.gains import turns
from moefuse.gains.call import Call, Result, detached, difference, tolerance
from moefuse.gains.rows import EAGER, INDUCTOR, NAMES, Row, Timed
from moefuse.machine.logs import unlogged
from moefuse.tuning.measure.progress import Progress

Made = Callable[[Callable[..., Any]], dict[str, Callable[..., Any]]]
"""A function or module -> what is called in each of the three ways."""

WAYS = len(NAMES)
WARM_UP = 3
"""Calls of each way before it is timed: the third of a known call is moefuse's fast one."""


class Compared:
    """One function, with what is known of each way to call it.

    Attributes:
        function: in eager.
        call: what is called.
        undo: puts back what a call changes.
        ways: eager, Inductor, moefuse -> what is called.
        clock: seconds.
        devices: the CUDA devices that hold something of it.
        notes: what is to say.
    """

    def __init__(
        self, function: Callable[..., Any], call: Call, undo: TakenBack, ways: dict[str, Callable[..., Any]], clock: Callable[[], float]
    ) -> None:
        self.function, self.call, self.undo, self.ways, self.clock = function, call, undo, ways, clock
        self.devices = sorted({t.device for t in undo.tensors if t.is_cuda}, key=str)
        self.notes: list[str] = []
        self._problems: dict[str, str] = {}
        self._differences: dict[str, float | None] = {}
        self._tolerance = tolerance(undo.tensors)

    def warm_up(self, bar: Progress, name: str = "") -> None:
        """Compile, and compare results with those in eager. What eager raises is the caller's."""
        wanted = self._eager(bar, name)
        for way in NAMES:
            if way == EAGER:
                continue
            bar.at(f"compiling with {way}{name and f' {name}'}")
            try:
                with self._without_breaks(name) if way == INDUCTOR else contextlib.nullcontext():
                    got = self._result(way)
                    for _ in range(WARM_UP - 1):
                        self.prepare()
                        self.call.once(self.ways[way])
            except Exception as error:
                self._problems[way] = f"{type(error).__name__}: {first_line(_torch_private.beneath(error))}"
            else:
                self._differences[way] = None if wanted is None else difference(wanted, got)
            bar.step()

    @contextlib.contextmanager
    def _without_breaks(self, name: str) -> Iterator[None]:
        """What torch says of another compiler's graphs would stand for what is said of ours: it becomes a note."""
        before = _torch_private.broken_graphs()
        with unlogged("torch._dynamo"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        broken = _torch_private.broken_graphs() - before
        if not broken:
            return
        why, times = broken.most_common(1)[0][0], broken.total()
        self.notes.append(f"with Inductor torch breaks the graphs of {name or 'the model'} ({times}), most often because of: {why}")

    def _eager(self, bar: Progress, name: str) -> Result | None:
        """The result in eager; None if another call gives another one."""
        bar.at(f"calling {name or 'the model'} in eager")
        self.undo.put_back()
        self.call.clear()
        wanted = self.call.result(self.function)
        self.undo.unwatch()
        self._tolerance = max(self._tolerance, tolerance(wanted.outputs))
        noise = difference(wanted, self._result(EAGER))
        self.prepare()
        self.call.once(self.function)
        bar.step()
        if noise is None:
            self.notes.append(f"{name or 'the model'} has no floating-point output to compare")
        elif not noise <= self._tolerance:
            self.notes.append(
                f"results were not compared: two calls of {name or 'the model'} in eager differ by {noise:.2g} of the largest value"
            )
            return None
        return wanted

    def timed(self, budget_s: float, bar: Progress, name: str = "", fused: bool = True) -> Timed:
        """Take turns for so long."""
        bar.at(f"timing{name and f' {name}'}")
        running = [way for way in NAMES if way not in self._problems]
        memory = {way: self._memory(way) for way in running}
        times = turns.take({way: functools.partial(self._seconds, way) for way in running}, budget_s, self.clock)
        bar.step()
        rows = [self._row(way, [1e3 * s for s in times.get(way, ())], memory.get(way)) for way in NAMES]
        return Timed((rows[0], rows[1], rows[2]), self._tolerance, name, fused)

    def _row(self, way: str, ms: list[float], memory: int | None) -> Row:
        return Row(way, tuple(ms), memory, self._differences.get(way), self._problems.get(way, ""))

    def _result(self, way: str) -> Result:
        self.prepare()
        return self.call.result(self.ways[way])

    def prepare(self) -> None:
        """What it was before the first call, outside of what is timed: a cache of keys and values must not grow from turn to turn."""
        self.undo.put_back()
        self.call.clear()
        self._wait()

    def _seconds(self, way: str) -> float:
        self.prepare()
        start = self.clock()
        kept = self.call.once(self.ways[way])
        self._wait()
        taken = self.clock() - start
        del kept
        return taken

    def _memory(self, way: str) -> int | None:
        if not self.devices:
            return None
        self.prepare()
        before = {device: torch.cuda.memory_allocated(device) for device in self.devices}
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)
        kept = self.call.once(self.ways[way])
        self._wait()
        del kept
        return sum(torch.cuda.max_memory_allocated(device) - held for device, held in before.items())

    def _wait(self) -> None:
        for device in self.devices:
            torch.cuda.synchronize(device)


@contextlib.contextmanager
def opened(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], train: bool, made: Made, clock: Callable[[], float]
) -> Iterator[Compared]:
    """A function to compare; what its calls do is taken back when the block ends."""
    given, named = detached((args, dict(kwargs)))
    with taken_back(function, given, named) as undo:
        leaves = [t for t in undo.tensors if t.is_leaf and t.requires_grad and not t.is_inference()] if train else []
        yield Compared(function, Call(given, named, leaves, train), undo, made(function), clock)
