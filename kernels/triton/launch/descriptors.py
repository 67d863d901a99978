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
_BYTES, _ALIGNED = 128, 64
_PROMOTION = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B, as Triton makes them."""
_KEPT = 64
"""Maps kept per descriptor; an address that is new makes one, which takes a microsecond."""
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
    """What a map shows, innermost dimension first, and where it is; C++ reads it too (``Map`` in dispatcher.cpp)."""

    _fields_ = (
        ("cell", ctypes.c_uint64),
        ("at", ctypes.c_uint64),
        ("last", ctypes.c_uint64),
        ("shape", ctypes.c_uint64 * _MOST),
        ("strides", ctypes.c_uint64 * _MOST),
        ("block", ctypes.c_uint32 * _MOST),
        ("steps", ctypes.c_uint32 * _MOST),
        ("kind", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("swizzle", ctypes.c_uint32),
    )


class TensorMap:
    """The maps of one descriptor of a launch. ``cell``: where the address of its array is kept.

    Raises:
        NotImplementedError: Triton says of it what is not known here.
    """

    def __init__(self, shown: Described, element: str, meta: Mapping[str, Any], cell: int, encode: Any) -> None:
        size, block = meta["elem_size"], list(meta["block_size"])
        if meta.get("fp4_padded") or meta.get("is_im2col") or element not in _KINDS or len(block) != len(shown.shape):
            raise NotImplementedError(f"a tensor descriptor of {element} with {dict(meta)}")
        self.encode = encode
        self.known: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self.tiled = Tiled(cell=cell, kind=_KINDS[element], rank=len(block), swizzle=meta["swizzle"])
        for of, values in (("shape", shown.shape), ("strides", [step * size for step in shown.strides[:-1]]), ("block", block)):
            for i, value in enumerate(reversed(values)):
                getattr(self.tiled, of)[i] = value
        self.tiled.steps[:] = [1] * _MOST
        self.own = ctypes.create_string_buffer(_BYTES + _ALIGNED)
        self.tiled.at = _aligned(self.own)

    def of(self, address: int) -> int:
        """Where the map of an array that begins there is."""
        known = self.known.get(address)
        if known is None:
            if len(self.known) >= _KEPT:
                self.known.clear()
            known = ctypes.create_string_buffer(_BYTES + _ALIGNED)
            it = self.tiled
            error = self.encode(
                ctypes.c_void_p(_aligned(known)), it.kind, it.rank, ctypes.c_void_p(address), it.shape, it.strides, it.block, it.steps,
                0, it.swizzle, _PROMOTION, 0,
            )  # fmt: skip
            if error:
                raise RuntimeError(f"CUDA error {error}: no tensor map at {address:#x} with {shown_by(it)}")
            self.known[address] = known
        return _aligned(known)


def shown_by(it: Tiled) -> str:
    """Sizes, for a message."""
    return ", ".join(f"{name} {[*getattr(it, name)[: it.rank]]}" for name in ("shape", "strides", "block"))


def _aligned(buffer: ctypes.Array[ctypes.c_char]) -> int:
    return -(-ctypes.addressof(buffer) // _ALIGNED) * _ALIGNED


def element_of(kind: str) -> str:
    """The name of the element's type in ``tensordesc<bf16[64, 64], ...>``."""
    return kind.partition("<")[2].partition("[")[0]
