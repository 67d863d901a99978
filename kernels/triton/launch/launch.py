"""Launching a Triton kernel whose arguments have names.

A :class:`Launch` binds its arguments once, by the names of the kernel's parameters: arrays are named as their owner calls them, all else is
given by value.
The first call goes Triton's way: ``kernel[grid](...)`` compiles, binds and specialises. Doing that on every call takes 21 us of the
host, longer than a small kernel runs. So later calls hand addresses straight to the driver (``driver_launch.py``, 0.9 us), for whole plans
and for single launches, from Python and, where the call itself is the cost, from C++ (``dispatcher.py``). That is right because everything
that Triton specialises on (integers, dtypes, alignment of addresses) is part of the key of whoever owns the launch. Where the driver's way
is not known, on another platform say, all calls go as the first one.

Times are of the host for one launch, with the driver's function replaced by one that returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton

from moefuse._torch_private import current_device, raw_stream
from moefuse.kernels.triton.launch import gluon
from moefuse.kernels.triton.launch.descriptors import Described, descriptor
from moefuse.kernels.triton.launch.driver_launch import SWITCH, Direct
from moefuse.machine import environment, slow_paths

SLOW = "Triton's launcher starts every kernel, which takes the host ten times as long"

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on CPU tensors (TRITON_INTERPRET=1)."""


def tf32_allowed() -> bool:
    """Whether products of float32 may be rounded to tf32. (``allow_tf32``, the older name, raises where this one was set.)"""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


class Launch:
    """One kernel with its grid, arguments and options. Arrays are a kernel's first parameters.

    Attributes:
        names: of the arrays, in the order of the kernel and of launching.
        args: all arguments; in the place of an array its name, or a :class:`Described` with its name.
        compiled: Triton's kernel, once it can be launched :meth:`again`.
    """

    __slots__ = ("args", "compiled", "descs", "direct", "grid", "kernel", "names", "options", "rest")

    def __init__(
        self, kernel: Any, grid: Sequence[int], arrays: Mapping[str, str | Described], numbers: Mapping[str, Any], **options: Any
    ) -> None:
        count = len(arrays)
        wrong = set(kernel.arg_names[:count]) ^ set(arrays) | set(kernel.arg_names[count:]) ^ set(numbers)
        if wrong:
            raise TypeError(f"{kernel.__name__}: {sorted(wrong)} missing, unknown, or no array where one belongs")
        self.kernel, self.grid, self.options = kernel, (*grid, 1, 1)[:3], options
        shown = [arrays[name] for name in kernel.arg_names[:count]]
        self.rest = tuple([numbers[name] for name in kernel.arg_names[count:]])
        self.args = (*shown, *self.rest)
        self.names = tuple([a.array if isinstance(a, Described) else a for a in shown])
        self.descs = tuple([(i, a) for i, a in enumerate(shown) if isinstance(a, Described)])
        self.compiled: Any = None
        self.direct: Direct | None = None

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """What the kernel is called with, given the arrays."""
        given = list(tensors)
        for i, shown in self.descs:
            given[i] = descriptor(given[i], shown)
        return [*given, *self.rest]

    def first(self, tensors: Sequence[Any]) -> None:
        """Compile and launch."""
        options = {} if INTERPRETED else self.options
        given = self.arguments(tensors)
        gluon.compile_first(self.kernel, self.grid, given, options)
        compiled = self.kernel[self.grid](*given, **options)
        if compiled is None:
            return  # interpreted
        self.compiled = compiled
        try:
            self.direct = Direct([self], self.names, current_device())
        except NotImplementedError as reason:
            self.compiled = None
            if not environment.is_off(SWITCH):
                slow_paths.taken(SLOW, str(reason))

    def again(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with other arrays. Only after :meth:`first` has set ``compiled``."""
        assert self.direct is not None
        self.direct.run(stream, addresses)


def stream_of(device: torch.device) -> int:
    """The raw current stream."""
    return raw_stream(device.index)
