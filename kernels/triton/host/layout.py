"""What a plan is put together from: names, the device, sections of the workspace, steps, and descriptors of rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.config import SHARED_BYTES
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.ops.meaning.call import Body
from moefuse.runtime.rounding import tf32_allowed

Lists = tuple[Sequence[Tensor], ...]
"""w_in, w_up, w_out, b_in, b_up, b_out."""

INPUTS = ("x", "ids", "weights", "w_in", "w_up", "w_out", "b_in", "b_up", "b_out")
"""Names of the tensors that a call brings."""
SORT_AT_ONCE = 8192
"""Up to this many slots one kernel sorts; each of its programs reads all ids."""
CHUNK = 256
"""Slots of a chunk of the sort for more."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What the kernels store."""
TILE_FIELDS = 5
"""Numbers of a tile (``device/routing.py``)."""
UNROLLED = 16
"""Up to so many slots per token the combine has all their rows in flight at once."""


@dataclass(frozen=True)
class Device:
    """What a configuration depends on of the device."""

    name: str
    sms: int
    shared: int
    hopper: bool
    tf32: bool = True
    """Whether tensor cores multiply float32 in parts."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """Properties of a device; of the interpreter's, those of a small Hopper."""
    if device.type != "cuda":
        return Device("interpreter", 2, SHARED_BYTES, False)
    p = torch.cuda.get_device_properties(device)
    shared = getattr(p, "shared_memory_per_block_optin", SHARED_BYTES)
    cuda = torch.version.hip is None
    return Device(p.name, p.multi_processor_count, shared, cuda and p.major == 9, cuda and p.major >= 8)


def starts_early(device: Device) -> bool:
    """Whether a launch may begin beside the one before it (programmatic dependent launch)."""
    return device.hopper and not INTERPRETED


class Workspace:
    """Sections of one allocation, each at a multiple of 256 bytes."""

    def __init__(self) -> None:
        self.size = 0
        self.parts: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, over: str | None = None) -> None:
        """Append a section, or put it where the last one (``over``) is, which is not read any more when the new one is written."""
        start = self.size if over is None else self.parts[over][0]
        self.parts[name] = (start, shape, dtype)
        self.size = max(self.size, start + -(-math.prod(shape) * dtype.itemsize // 256) * 256)

    def views(self, base: Tensor) -> dict[str, Tensor]:
        """Every section as a tensor."""
        out = {}
        for name, (offset, shape, dtype) in self.parts.items():
            count = math.prod(shape) * dtype.itemsize
            out[name] = base[offset : offset + count].view(dtype).view(shape)
        return out


def kernel_gating(body: Body) -> str:
    """The kernels' form of a gating: halves of one tensor and two tensors are one form."""
    return {"merged": "halves", "separate": "halves"}.get(body.gating, body.gating)


def first_features(body: Body, inter: int) -> tuple[int, int]:
    """First feature of gate and of up."""
    if body.gating != "merged":
        return 0, 0
    return (inter, 0) if body.up_first else (0, inter)


def in_triton(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """How numbers of a dtype are multiplied.

    float32 without leave to round is split into two tf32 each, and three of the four products summed: what is left out is below the
    rounding of float32, tensor cores do it, and a sum of theirs rounds less often than one without them
    (docs/design/gpu-kernels.md, "float32"; CUTLASS calls it 3xTF32).
    """
    if dtype != torch.float32 or not device.tf32:
        return "ieee"
    return "tf32" if tf32_allowed() else "tf32x3"


def rows_descriptor(features: int, bm: int, bn: int, stride: int | None = None) -> tuple[Any, ...]:
    """(shape, strides, block) of a descriptor of rows through which ``functions.store_rows`` stores and ``load_rows`` loads.

    ``stride``: elements from row to row, ``features`` where rows are contiguous.

    Rows are clipped at FAR_ROW = 2**30; coordinate FAR_ROW of the first dimension goes 2**64 bytes (a power of two times that), which is
    nowhere, minus FAR_ROW rows. (The constants are those of ``ragged_tma.py`` in Triton's tools, whose idea this is.)
    """
    huge = 0x7FFF0000
    step = features if stride is None else stride
    return (huge, huge, 1 << 30, features), ((1 << 34) - step, step, step, 1), (1, 1, bm, bn)
