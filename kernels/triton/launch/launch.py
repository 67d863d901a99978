"""Launching a Triton kernel whose arguments have names.

A :class:`Launch` binds its arguments by the names of the kernel's parameters: arrays are named as their owner calls them, all else is given
by value. It goes Triton's way: ``kernel[grid](...)`` compiles, binds and specialises, which takes 21 us of the host, longer than a small
kernel runs. That is for the calls that run in Python, two for each kind: later ones are played from a record (``record.py``), where C++
hands addresses straight to the driver. That is right because everything that Triton specialises on (integers, dtypes, alignment of
addresses) is part of the kind. Where the driver's way is not known, on another platform say, all calls go as the first one.

The time is of the host for one launch, with the driver's function replaced by one that returns.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton

from moefuse.kernels.triton.launch import gluon, player
from moefuse.kernels.triton.launch.descriptors import Described, descriptor

SLOW = "Triton's launcher starts every kernel, which takes the host ten times as long"

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on CPU tensors (TRITON_INTERPRET=1)."""


class Begin(NamedTuple):
    """An array that a kernel takes as a number, where it begins: its name (or the tensor)."""

    array: Any


class Launch:
    """One kernel with its grid, arguments and options. Arrays are a kernel's first parameters.

    Attributes:
        names: of the arrays, in the order of the kernel and of launching.
        args: all arguments; in the place of an array its name, or a :class:`Described` with its name.
        compiled: what Triton launched last; None where it interprets.
    """

    __slots__ = ("args", "begins", "compiled", "descs", "grid", "kernel", "names", "options", "rest")

    def __init__(
        self, kernel: Any, grid: Sequence[int], arrays: Mapping[str, str | Described | Begin], numbers: Mapping[str, Any], **options: Any
    ) -> None:
        count = len(arrays)
        wrong = set(kernel.arg_names[:count]) ^ set(arrays) | set(kernel.arg_names[count:]) ^ set(numbers)
        if wrong:
            raise TypeError(f"{kernel.__name__}: {sorted(wrong)} missing, unknown, or no array where one belongs")
        self.kernel, self.grid, self.options = kernel, (*grid, 1, 1)[:3], options
        shown = [arrays[name] for name in kernel.arg_names[:count]]
        self.rest = tuple([numbers[name] for name in kernel.arg_names[count:]])
        self.args = (*(a.array if isinstance(a, Begin) else a for a in shown), *self.rest)
        self.names = tuple([a if isinstance(a, str) else a.array for a in shown])
        self.descs = tuple([(i, a) for i, a in enumerate(shown) if isinstance(a, Described)])
        self.begins = tuple([i for i, a in enumerate(shown) if isinstance(a, Begin)])
        self.compiled: Any = None

    def over(self, rows: int) -> Launch:
        """The same with another first dimension of its grid."""
        it = copy.copy(self)
        it.grid = (rows, *self.grid[1:])
        return it

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """What the kernel is called with, given the arrays."""
        given = list(tensors)
        for i, shown in self.descs:
            given[i] = descriptor(given[i], shown)
        for i in self.begins:
            given[i] = given[i].data_ptr()
        return [*given, *self.rest]

    def run(self, tensors: Sequence[Any]) -> None:
        """Compile it if need be, and launch."""
        options = {} if INTERPRETED else self.options
        if not INTERPRETED:
            player.start()
        given = self.arguments(tensors)
        if self.compiled is None:
            gluon.compile_first(self.kernel, self.grid, given, options)
        self.compiled = self.kernel[self.grid](*given, **options)
