"""Arrays that a kernel takes through a tensor descriptor, and the map that the driver makes of one (``cuTensorMapEncodeTiled``).

Triton has functions for it whose names and results change from release to release; the driver's own does not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

from triton.tools.tensor_descriptor import TensorDescriptor

_MOST = 5
"""Dimensions of a map."""
_KINDS = {
    "u8": 0, "i8": 0, "fp8e4nv": 0, "fp8e5": 0, "u16": 1, "i16": 1, "u32": 2, "i32": 3, "u64": 4, "i64": 5,
    "fp16": 6, "fp32": 7, "fp64": 8, "bf16": 9,
}  # fmt: skip
"""CUtensorMapDataType by the name of an element's type."""


class Described(NamedTuple):
    """An array that a kernel takes through a tensor descriptor: its name (or the tensor), and what the descriptor shows of it.

    ``layout``: of a block in shared memory, for a kernel in Gluon; Triton finds its own.
    """

    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None


def descriptor(array: Any, shown: Described) -> Any:
    """What Triton's launcher takes for an array."""
    sizes = list(shown.shape), list(shown.strides), list(shown.block)
    if shown.layout is None:
        return TensorDescriptor(array, *sizes)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as InGluon

    return InGluon(array, *sizes, shown.layout)


class Tiled(ctypes.Structure):
    """What a map shows, innermost dimension first, as player.cpp reads it."""

    _fields_ = (
        ("shape", ctypes.c_uint64 * _MOST),
        ("strides", ctypes.c_uint64 * _MOST),
        ("block", ctypes.c_uint32 * _MOST),
        ("steps", ctypes.c_uint32 * _MOST),
        ("kind", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
    )


def tiled(shown: Described, element: str, meta: Mapping[str, Any]) -> Tiled:
    """The map of a descriptor of a launch.

    Raises:
        NotImplementedError: Triton says of it what is not known here.
    """
    size, block = meta["elem_size"], list(meta["block_size"])
    if meta.get("fp4_padded") or meta.get("is_im2col") or element not in _KINDS or len(block) != len(shown.shape):
        raise NotImplementedError(f"a tensor descriptor of {element} with {dict(meta)}")
    found = Tiled(kind=_KINDS[element], rank=len(block), swizzle=meta["swizzle"])
    for of, values in (("shape", shown.shape), ("strides", [step * size for step in shown.strides[:-1]]), ("block", block)):
        for i, value in enumerate(reversed(values)):
            getattr(found, of)[i] = value
    found.steps[:] = [1] * _MOST
    return found


def element_of(kind: str) -> str:
    """The name of the element's type in ``tensordesc<bf16[64, 64], ...>``."""
    return kind.partition("<")[2].partition("[")[0]
