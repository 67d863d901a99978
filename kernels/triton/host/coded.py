"""The product of sorted rows with quantised weights: what the kernel takes of an encoding, block sizes, and the launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device import coded
from moefuse.kernels.triton.device.structs import Experts, Rows, Tiling
from moefuse.kernels.triton.host.layout import device_of, precision_of
from moefuse.kernels.triton.host.linear import Weight, weight
from moefuse.kernels.triton.host.operands import describe
from moefuse.kernels.triton.host.sorted_rows import Sorted, fit, rows_of, whole
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import BITS, Encoding, Packing, counts_from
from moefuse.tuning.problem import Tiles

ELEMENTS = {
    torch.uint8: tl.uint8, torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64,
    torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32,
}  # fmt: skip
"""Dtypes in which storage, scales and zeros may be, float8 as bytes."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of rows."""
ARITHMETIC = {"f32": tl.float32, "bf16": tl.bfloat16, "f16": tl.float16}


class Coding(NamedTuple):
    """An encoding as constants of a kernel.

    Attributes:
        KIND: how codes become numbers (``device/coded.number_of``); FLOAT8: the device has instructions for it; FIRST, TABLE: what else
            that needs.
        PER, AXIS, HALVES: of ``encoding.Packing``; ORDER: its shifts, by four, four bits each.
        BLOCK_N, BLOCK_K: features and inputs of a scale; 0 for all.
        ARITH: the dtype of each step. OF, SCALES, ZEROS: of the elements. SCALE: of ``Encoding.scale``.
        APART: lists are addresses; BIAS: there are biases, BIAS_APART: as addresses. WIDE: offsets take 64 bits. EVEN: blocks are whole.
    """

    KIND: str
    FLOAT8: bool
    FIRST: int
    TABLE: tuple[float, ...]
    PER: int
    AXIS: int
    HALVES: bool
    ORDER: int
    BLOCK_N: int
    BLOCK_K: int
    ARITH: Any
    OF: Any
    SCALES: Any
    ZEROS: Any
    SCALE: str
    ZERO: bool
    APART: bool
    BIAS: bool
    BIAS_APART: bool
    WIDE: bool
    EVEN: bool


class Held(NamedTuple):
    """One projection as kernels take it; see :class:`Weight`. Storage has bytes where it has float8."""

    codes: Codes
    storage: Weight
    scale: Weight
    zero: Weight | None
    features: int
    inputs: int


def as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """float8 as bytes."""
    return [t.view(torch.uint8) if t.dtype not in ELEMENTS else t for t in tensors]


def refusal(codes: Codes, storage: Tensor) -> str | None:
    """Why the kernel does not take a projection."""
    encoding, scale, zero = codes
    for what, t in (("storage", storage), ("scales", scale[0]), *((("zeros", zero[0]),) if zero else ())):
        if t.dtype not in ELEMENTS and t.element_size() != 1:
            return f"{what} in {t.dtype}"
    if encoding.zeros is not None:
        return "zeros are packed themselves"
    if encoding.behind:
        return "zeros are subtracted behind the scales"
    if encoding.packing is not None and not _takes(encoding.packing):
        return f"codes are packed as {encoding.packing}"
    size = length(encoding, *encoding.logical(tuple(storage.shape[-2:])))
    if size % LEAST:
        return f"parts of {size} are no multiple of {LEAST}"
    return None if encoding.arithmetic in ARITHMETIC else f"unpacking computes in {encoding.arithmetic}"


def _takes(packing: Packing) -> bool:
    """Whether the kernel takes numbers apart so: two or eight codes, which begin at whole codes."""
    return packing.per in (2, 8) and not any(shift % BITS for shift in packing.shifts)


def held(storage: Any, codes: Codes) -> Held:
    """What a projection is held in: storage, scales and zeros are all stacked, or all addresses."""
    features, inputs = codes.encoding.logical(tuple(storage[0].shape[-2:]))
    lists = [storage, codes.scale, *((codes.zero,) if codes.zero else ())]
    if not all(describe(tensors, 2).uniform for tensors in lists):
        lists = [[torch.stack(list(tensors))] for tensors in lists]
    stored, scale, *zero = map(weight, lists)
    return Held(codes, stored, scale, zero[0] if zero else None, features, inputs)


@functools.lru_cache(maxsize=1024)
def kind_of(encoding: Encoding) -> tuple[str, int, tuple[float, ...]]:
    """(KIND, FIRST, TABLE)."""
    table = encoding.table
    if isinstance(table, str):
        return ("range", 0, ()) if table == "u8" else (table, 0, ())
    for name in ("s4", "e2m1"):
        if encoding.name == name:
            return name, 0, ()
    first = counts_from(table)
    return ("table", 0, table) if first is None else ("range", int(first), ())


def coding(h: Held, bias: Weight | None, even: bool, float8: bool) -> Coding:
    """The constants of a projection."""
    encoding, packing = h.codes.encoding, h.codes.encoding.packing
    kind, first, table = kind_of(encoding)
    order = sum(shift // BITS << 4 * j for j, shift in enumerate(packing.shifts)) if packing is not None else 0
    scales = h.scale.tensors[0].dtype
    return Coding(
        kind, float8, first, table, 1 if packing is None else packing.per, 0 if packing is None else packing.axis,
        packing is not None and packing.halves, order, *encoding.block, ARITHMETIC[encoding.arithmetic],
        ELEMENTS[h.storage.tensors[0].dtype], ELEMENTS[scales],
        ELEMENTS[h.zero.tensors[0].dtype] if h.zero is not None else ELEMENTS[scales], encoding.scale, encoding.zero,
        h.storage.operand.table, bias is not None, bias is not None and bias.operand.table,
        any(w.operand.wide for w in (h.storage, h.scale, *((h.zero,) if h.zero else ()))) or h.features * h.inputs >= 1 << 31,
        even,
    )  # fmt: skip


def sizes(bm: int, dtype: torch.dtype, aligned: bool, device: Any) -> Tiles:
    """Tiles of ``coded_tiles``: a block of weights is made in registers, so it is small."""
    if dtype == torch.float32:
        return fit(Tiles(32, 32, 4, 2, 4), bm, 4, device, 4)
    return fit(Tiles(64 if device.hopper else 32, 64 if aligned else 32, 4 if bm < 128 else 8, 3, 4), bm, 2, device, 4)


LEAST = 16
"""Features and inputs of the smallest block."""


def length(encoding: Encoding, features: int, inputs: int) -> int:
    """How long the parts of an axis are whose codes share numbers; 0 if neighbours share one."""
    packing = encoding.packing
    if packing is None or not packing.halves:
        return 0
    return (features, inputs)[packing.axis] // packing.per


def within_halves(t: Tiles, h: Held, back: bool) -> Tiles:
    """The tiles with blocks that are within one part, so that a block has one shift."""
    packing, size = h.codes.encoding.packing, length(h.codes.encoding, h.features, h.inputs)
    if packing is None or not size:
        return t
    most = size & -size
    return replace(t, bk=min(t.bk, most)) if (packing.axis == 0) == back else replace(t, bn=min(t.bn, most))


def product(
    out: Tensor,
    x: Tensor,
    h: Held,
    it: Sorted,
    *,
    bias: Weight | None = None,
    back: bool = False,
    tokens: bool = False,
    scale: Tensor | None = None,
    add: bool = False,
) -> None:
    """out [S, F] = rows [S, I] times w[e]^T (+ bias[e]); ``back``: out [S, I] = rows [S, F] times w[e]. The rest as ``linear.linear``."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    n, k, device = out.shape[1], x.shape[1], device_of(x.device)
    part = within_halves(sizes(it.bm, x.dtype, whole(x.element_size(), k), device), h, back)
    zero = h.zero or h.scale
    launch(
        coded.coded_tiles,
        (it.max_tiles * -(-n // part.bn),),
        {
            "x": x, "w": h.storage.pointer, "s": h.scale.pointer, "z": zero.pointer,
            "b": h.storage.pointer if bias is None else bias.pointer,
            "weights": x if scale is None else scale, "order": it.order, "out": out, "offsets": it.offsets, "tiles": it.tiles,
            "num_tiles": it.num_tiles,
        },
        warps=part.warps,
        stages=part.stages,
        max_tiles=it.max_tiles,
        top_k=it.top_k,
        F=h.features,
        I=h.inputs,
        at_x=Rows(*x.stride()),
        at_w=h.storage.operand.at(None if bias is None else bias.operand),
        at_s=Experts(*h.scale.strides),
        at_z=Experts(*zero.strides),
        at_weights=rows_of(scale),
        stride_or=out.stride(0),
        GATHER=tokens,
        SCALE=scale is not None,
        ADD=add,
        BACK=back,
        coding=coding(h, bias, not (n % part.bn or k % part.bk), device.hopper and not INTERPRETED),
        tiling=Tiling(it.bm, part.bn, part.bk, part.group, n % part.bn == 0, k % part.bk == 0, precision_of(x.dtype, device)),
    )  # fmt: skip


def unpack(held: Held, first: int, count: int, dtype: torch.dtype) -> Tensor:
    """The weights [count, F, I] of so many experts."""
    features, inputs = held.features, held.inputs
    out = torch.empty((count, features, inputs), dtype=dtype, device=held.storage.pointer.device)
    packing, size = held.codes.encoding.packing, length(held.codes.encoding, features, inputs)
    most = [64, 64]
    if packing is not None and size:
        most[packing.axis] = min(64, size & -size)
    zero, float8 = held.zero or held.scale, device_of(out.device).hopper and not INTERPRETED
    even = not (features % most[0] or inputs % most[1])
    launch(
        coded.unpack_blocks,
        (count, -(-features // most[0]), -(-inputs // most[1])),
        {"w": held.storage.pointer, "s": held.scale.pointer, "z": zero.pointer, "out": out},
        first=first,
        F=features,
        I=inputs,
        at_w=Experts(*held.storage.strides),
        at_s=Experts(*held.scale.strides),
        at_z=Experts(*zero.strides),
        coding=coding(held, None, even, float8),
        NF=most[0],
        NI=most[1],
    )
    return out


__all__ = ["Coding", "Held", "held", "product", "refusal", "unpack"]
