"""Launching a Triton kernel whose arguments have names.

A :class:`Launch` binds its arguments once, by the names of the kernel's parameters: arrays are named as their owner calls them, all else is
given by value.
There are two ways to launch:

* Triton's launcher. ``kernel[grid](...)`` binds and specialises its arguments on every call: 21 us of the host, longer than a small kernel
  runs. The first call goes that way and keeps the compiled kernel; later ones hand addresses straight to the launcher that Triton generated
  for it (3.8 us). That is right because everything Triton specialises on (integers, dtypes, alignment of addresses) is part of the key of
  whoever owns the launch.
* The driver's launch function (``driver_launch.py``), for whole plans and for single launches (``launch_again``): it reads arguments from
  memory that was laid out once (0.9 us). The same memory is launched from Python and, where the call itself is the cost, from C++
  (``dispatcher.py``).

Times are of the host for one launch, with the driver's function replaced by one that returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from moefuse._torch_private import raw_stream

_DIRECT = tuple(int(n) for n in triton.__version__.split(".")[:2]) in ((3, 6), (3, 7))
"""Versions whose compiled kernels are called as below; others go the usual way on every call."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Kernels run in Python on CPU tensors (TRITON_INTERPRET=1)."""


def tf32_allowed() -> bool:
    """Whether products of float32 may be rounded to tf32. (``allow_tf32``, the older name, raises where this one was set.)"""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


class Described(NamedTuple):
    """An array that a kernel takes through a tensor descriptor: its name (or the tensor), and what the descriptor shows of it.

    ``layout``: of a block in shared memory, for a kernel in Gluon; Triton finds its own.
    """

    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None


class Launch:
    """One kernel with its grid, arguments and options. Arrays are a kernel's first parameters.

    Attributes:
        names: of the arrays, in the order of the kernel and of launching.
        driver: the same by the driver's function (``driver_launch.Direct``); False where that cannot be, None where nobody asked yet.
        args: all arguments; in the place of an array its name, or a :class:`Described` with its name.
    """

    __slots__ = ("args", "compiled", "descs", "driver", "function", "grid", "kernel", "names", "options", "packed", "rest", "run")

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
        self.driver: Any = None

    def arguments(self, tensors: Sequence[Any]) -> list[Any]:
        """What the kernel is called with, given the arrays."""
        given = list(tensors)
        for i, shown in self.descs:
            given[i] = _described(given[i], shown)
        return [*given, *self.rest]

    def first(self, tensors: Sequence[Any]) -> None:
        """Compile and launch."""
        options = {} if INTERPRETED else self.options
        compiled = self.kernel[self.grid](*self.arguments(tensors), **options)
        if _DIRECT and isinstance(self.kernel, JITFunction):
            self.run, self.function, self.packed = compiled.run, compiled.function, compiled.packed_metadata
            self.compiled = compiled

    def again(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch with other arrays. Only after :meth:`first` has set ``compiled``."""
        given: Any = addresses
        if self.descs:
            given = list(addresses)
            for i, shown in self.descs:
                given[i] = _Descriptor(_Address(given[i]), shown.shape, shown.strides)
        x, y, z = self.grid
        self.run(x, y, z, stream, self.function, self.packed, None, None, None, *given, *self.rest)


def _described(array: Any, shown: Described) -> Any:
    """The descriptor that a kernel is called with."""
    sizes = list(shown.shape), list(shown.strides), list(shown.block)
    if shown.layout is None:
        return TensorDescriptor(array, *sizes)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as InGluon

    return InGluon(array, *sizes, shown.layout)


class _Descriptor:
    """What Triton's launcher asks of a tensor descriptor, without the checks of its class, which the first call has made."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: Any, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.base, self.shape, self.strides, self.padding = base, shape, strides, "zero"


class _Address:
    """An address that a descriptor can begin at."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def stream_of(device: torch.device) -> int:
    """The raw current stream."""
    return raw_stream(device.index)
