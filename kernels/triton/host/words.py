"""Few rows with quantised weights: which projections are read as words, how a product is cut, and its launch (``words/products.py``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.device.structs import Experts, Form, Rows
from moefuse.kernels.triton.host import coded
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import Device, device_of, first_features, kernel_gating
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.launch.calls import launch
from moefuse.ops.meaning.call import Body
from moefuse.ops.meaning.encoding import BITS, EXPONENTS, Encoding
from moefuse.ops.meaning.token_codes import CODES

QUARTER = 16
"""Bytes of a row that one thread reads at once: the least that blocks of scales are long."""
ROUNDED = 128
"""Inputs that are multiplied together where tokens are rounded, too: those of a scale, if that is not for all."""
NATURAL = {(0, 4): False, (4, 0): True, tuple(range(0, 32, 4)): False}
"""Shifts of neighbours along the inputs that kernels know; True: of two codes in a byte the first is the high one."""


class Coding(NamedTuple):
    """An encoding as constants of ``word_tiles``; fields as of ``host/coded.Coding``. PER: codes in a word of 32 bits. WIDE: ARITH is
    float32. From GROUP on: how rows are rounded, as of ``host/token_codes.Coding``; WHOLE: groups have one scale, that of all inputs."""

    KIND: str
    FIRST: int
    PER: int
    HIGH_FIRST: bool
    BLOCK_N: int
    BLOCK_K: int
    ARITH: Any
    WIDE: bool
    OF: Any
    SCALES: Any
    ZEROS: Any
    SCALE: str
    ZERO: bool
    APART: bool
    ALIGNED: bool
    BIAS: bool
    BIAS_APART: bool
    GROUP: int
    WHOLE: bool
    LEAST: float
    POWER: bool
    ELEMENT: str = "e4m3"
    LIMIT: float = CODES["e4m3"][1]
    DIRECT: bool = True


class Cut(NamedTuple):
    """How a product is cut: rows of a tile, steps of 64 bytes at once, HIGH times 16 features of a warp;
    EVEN: steps are whole. SORTED: rows come by tiles of the sort."""

    COLS: int
    STEPS: int
    HIGH: int
    EVEN: bool
    SORTED: bool
    PDL: bool


class Part(NamedTuple):
    """Sizes that are chosen: warps of a program, steps at once, and how often 16 features a warp has."""

    warps: int = 4
    steps: int = 2
    high: int = 1


def per_word(encoding: Encoding) -> int:
    """Codes in a word."""
    return 4 if encoding.packing is None else 32 // BITS


def refusal(held: Held, dtype: torch.dtype, device: Device) -> str | None:
    """Why a projection is not read as words."""
    encoding, (first, *_), (e, n, k) = held.codes.encoding, held.storage.tensors, held.storage.strides
    item, packing = first.element_size(), encoding.packing
    if dtype != torch.bfloat16:
        return f"tokens in {dtype}"
    if packing is not None and (packing.axis != 1 or packing.halves or packing.shifts not in NATURAL or packing.per * BITS != 8 * item):
        return f"codes are packed as {packing}"
    if encoding.behind or encoding.zeros is not None:
        return "zeros are packed, or subtracted from products with scales"
    if packing is None and item != 1:
        return "codes are no bytes"
    kind, first_code, _ = coded.kind_of(encoding)
    if not _knows(encoding, kind, first_code, device):
        return f"no instructions for {encoding.describe()} in {encoding.arithmetic}"
    if k != 1 or n * item % QUARTER or e * item % QUARTER or not held.storage.operand.aligned:
        return "rows do not begin at whole 16 bytes"
    least = QUARTER // item * (1 if packing is None else packing.per)
    if encoding.activation is not None:
        least = ROUNDED
    if held.inputs % least or encoding.block[1] % least:
        return f"{held.inputs} inputs in blocks of {encoding.block[1]}"
    return "offsets take 64 bits" if held.storage.operand.wide or held.features * held.inputs >= 1 << 31 else None


def _knows(encoding: Encoding, kind: str, first: int, device: Device) -> bool:
    if encoding.activation is not None:
        rounding = encoding.activation
        return (
            encoding.table == rounding.element == "e4m3" and rounding.group == encoding.block[1] in (0, ROUNDED) and device.hopper
            and encoding.scale in ("", EXPONENTS)
        )  # fmt: skip
    if kind == "e2m1":
        return bool(encoding.scale) and not encoding.zero  # exact up to the last step, whatever the arithmetic
    if kind == "range":
        return encoding.packing is not None and encoding.scale == "" and abs(first) <= 64 and encoding.arithmetic in ("bf16", "f32")
    known = kind == "s8" or (kind == "e4m3" and device.hopper)
    return known and not encoding.zero and encoding.scale != "ldexp" and encoding.arithmetic in ("bf16", "f32")


def coding(held: Held, bias: Weight | None) -> Coding:
    """The constants of a projection."""
    encoding, packing = held.codes.encoding, held.codes.encoding.packing
    kind, first, _ = coded.kind_of(encoding)
    storage, scales = held.storage.operand, held.scale.tensors[0].dtype
    zeros = held.zero.tensors[0].dtype if held.zero is not None else scales
    return Coding(
        KIND=kind,
        FIRST=first,
        PER=per_word(encoding),
        HIGH_FIRST=packing is not None and NATURAL[packing.shifts],
        BLOCK_N=encoding.block[0],
        BLOCK_K=encoding.block[1],
        ARITH=coded.ARITHMETIC[encoding.arithmetic],
        WIDE=encoding.arithmetic == "f32",
        OF=coded.ELEMENTS[held.storage.tensors[0].dtype],
        SCALES=coded.ELEMENTS[scales],
        ZEROS=coded.ELEMENTS[zeros],
        SCALE=encoding.scale,
        ZERO=encoding.zero,
        APART=storage.table,
        ALIGNED=storage.aligned,
        BIAS=bias is not None,
        BIAS_APART=bias is not None and bias.operand.table,
        GROUP=0 if encoding.activation is None else ROUNDED,
        WHOLE=encoding.activation is not None and not encoding.activation.group,
        LEAST=0.0 if encoding.activation is None else encoding.activation.least,
        POWER=encoding.activation is not None and encoding.activation.power,
    )


def described(
    x: Tensor, ids: Tensor, experts: int, body: Body | None, parts: tuple[Held, Held], bias: tuple[Weight | None, Weight | None], n: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and numbers for kernels of words that make n features of rows x [., K] by ids [T, top_k]; without ``body``: the last ones."""
    one, two = parts
    gating = "none" if body is None else kernel_gating(body)
    first, second = (0, 0) if body is None else first_features(body, n)
    zero, zero_2 = one.zero or one.scale, two.zero or two.scale
    bias_e, bias_n = bias[0].operand.strides if bias[0] is not None else (0, 0)
    b_a = x if bias[0] is None else bias[0].pointer
    e_w, n_w, k_w = one.storage.strides
    arrays = {
        "x": x, "ids": ids, "w_a": one.storage.pointer, "w_b": two.storage.pointer, "s_a": one.scale.pointer, "s_b": two.scale.pointer,
        "z_a": zero.pointer, "z_b": zero_2.pointer, "b_a": b_a, "b_b": b_a if bias[1] is None else bias[1].pointer,
    }  # fmt: skip
    numbers: dict[str, Any] = {
        "top_k": ids.shape[1],
        "E": experts,
        "K": one.inputs,
        "N": n,
        "args": (0.0, 0.0) if body is None else body.pair,
        "at_x": Rows(*x.stride()),
        "at_ids": Rows(*ids.stride()),
        "at_w": Experts(e_w, n_w, k_w, bias_e, bias_n, None, first),
        "at_s": Experts(*one.scale.strides),
        "at_z": Experts(*zero.strides),
        "first_b": second,
        "form": Form(
            "" if body is None else body.activation, gating, body is not None and body.up_first and gating == "interleaved", False
        ),
        "coding": coding(one, bias[0]),
    }
    return arrays, numbers


def features_each(form: Form) -> int:
    """Outputs of 16 rows of weights."""
    return 8 if form.GATING in ("halves", "interleaved") else 16


def product(
    out: Tensor, x: Tensor, ids: Tensor, it: Sorted | None, experts: int, body: Body | None, parts: tuple[Held, Held],
    bias: tuple[Weight | None, Weight | None], part: Part, cols: int, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """out [S, N], by slots: x [T, K] times first projections and their activation; without ``body`` x [S, K] times the last one.

    ``it``: rows in sorted order, with tiles of ``cols``; None: each slot for itself. ``scales``: x has codes, and these belong to them.
    """
    n, k, slots, per = out.shape[1], parts[0].inputs, ids.numel(), per_word(parts[0].codes.encoding)
    arrays, numbers = described(x, ids, experts, body, parts, bias, n)
    order, tiles, num_tiles, offsets = (it.order, it.tiles, it.num_tiles, it.offsets) if it is not None else (ids, ids, ids, ids)
    assert tiles is not None
    assert num_tiles is not None
    hopper = device_of(x.device).hopper
    from moefuse.kernels.triton.words import products  # Gluon is there only in some versions of Triton

    max_tiles = it.max_tiles if it is not None else slots
    launch(
        products.word_tiles,
        (-(-n // (part.warps * part.high * features_each(numbers["form"]))), max_tiles),
        arrays | {
            "x_scales": x if scales is None else scales, "order": order, "tiles": tiles, "num_tiles": num_tiles, "offsets": offsets,
            "out": out,
        },
        warps=part.warps,
        pdl=hopper,
        max_tiles=max_tiles,
        step_scales=0 if scales is None else scales.stride(0),
        cut=Cut(cols, part.steps, part.high, k % (16 * per * part.steps) == 0, it is not None, hopper),
        **numbers,
    )  # fmt: skip


__all__ = ["Part", "described", "features_each", "per_word", "product", "refusal"]
