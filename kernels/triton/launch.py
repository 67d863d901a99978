"""Launching a Triton kernel with little host work.

``kernel[grid](...)`` binds and specialises its arguments on every call, which costs more than a small kernel runs. A :class:`Launch` does
that once: its first call goes the usual way and keeps the compiled kernel, later calls hand addresses straight to it. That is right because
everything Triton specialises on (integers, dtypes, alignment of addresses) is part of the key of the plan that owns the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from moefuse._torch_private import raw_stream

_DIRECT = tuple(int(n) for n in triton.__version__.split(".")[:2]) in ((3, 6), (3, 7))
"""Versions whose compiled kernels are called as below; others go the usual way on every call."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on CPU tensors (TRITON_INTERPRET=1)."""


class Launch:
    """One kernel with its grid, its arguments after the pointers, and its options."""

    __slots__ = ("compiled", "function", "grid", "kernel", "options", "packed", "rest", "run")

    def __init__(self, kernel: Any, grid: Sequence[int], rest: Sequence[Any], **options: Any) -> None:
        self.kernel, self.grid, self.rest, self.options = kernel, (*grid, 1, 1)[:3], tuple(rest), options
        self.compiled: Any = None

    def first(self, pointers: Sequence[Any]) -> None:
        """Compile and launch; ``pointers`` are tensors and descriptors."""
        options = {} if INTERPRETED else self.options
        compiled = self.kernel[self.grid](*pointers, *self.rest, **options)
        if _DIRECT and isinstance(self.kernel, JITFunction):
            self.run, self.function, self.packed = compiled.run, compiled.function, compiled.packed_metadata
            self.compiled = compiled

    def again(self, stream: int, pointers: Sequence[Any]) -> None:
        """Launch; ``pointers`` may be addresses. Only after :meth:`first` has set ``compiled``."""
        x, y, z = self.grid
        self.run(x, y, z, stream, self.function, self.packed, None, None, None, *pointers, *self.rest)


class Descriptor:
    """What Triton's launcher asks of a tensor descriptor, without the checks of its class, which the plan has made."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Any, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


class Address:
    """An address that a descriptor can begin at."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def stream_of(device: torch.device) -> int:
    """The raw current stream."""
    return raw_stream(device.index)
