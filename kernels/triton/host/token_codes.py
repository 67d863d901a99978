"""Products that round their rows, too: what the kernels take of such an encoding, block sizes, and the launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.device import token_codes
from moefuse.kernels.triton.device.structs import Experts, Rows, Tiling
from moefuse.kernels.triton.host import coded, sorted_rows
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import Device, device_of
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.sorted_rows import Sorted, bins, blocks, fit
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import Encoding
from moefuse.ops.meaning.token_codes import ALIGN, CODES, Rounding, parts
from moefuse.tuning.problem import Tiles, power_of_two

AT_ONCE, LARGE = 4, 1 << 24
"""Groups that a program of rounding makes, where rows have so many elements that the device is full anyway."""
MANY = 1 << 25
"""Numbers of all rows from which on tokens are rounded before they are sorted: two launches more. Tests set it."""
LEAST = 32
"""Inputs of the smallest group: of fewer a tensor core takes more than there are."""


class Coding(NamedTuple):
    """Constants of the kernels: of tokens ELEMENT, LIMIT (the largest code), GROUP, POWER and LEAST; the rest as of ``host/coded.Coding``.

    DIRECT: tensor cores multiply the codes as they are.
    """

    ELEMENT: str
    LIMIT: float
    GROUP: int
    POWER: bool
    LEAST: float
    DIRECT: bool
    KIND: str
    FLOAT8: bool
    BLOCK_N: int
    BLOCK_K: int
    OF: Any
    SCALES: Any
    SCALE: str
    APART: bool
    BIAS: bool
    BIAS_APART: bool
    WIDE: bool


class Rounded(NamedTuple):
    """Rows in sorted order: codes [S, K], bytes, and scales [S, groups] in float32."""

    codes: Tensor
    scales: Tensor
    rounding: Rounding


def refusal(codes: Codes, x: Tensor) -> str | None:
    """Why the kernels do not take a projection that rounds its rows; ``x``: the tokens."""
    encoding = codes.encoding
    rounding = encoding.activation
    assert rounding is not None
    if rounding.came and (x.stride(1) != 1 or x.stride(0) % ALIGN or x.data_ptr() % ALIGN):
        return "tokens come rounded, and do not begin at whole 16 bytes"
    said = f"the program rounds {rounding.describe()}"
    if encoding.table != rounding.element or encoding.zero or encoding.scale == "ldexp":
        return f"{said}, and multiplies them with {encoding.describe()}"
    group, block = rounding.group, encoding.block[1]
    if group and (group % LEAST or group & (group - 1) or (block % group)):
        return f"{said}, and weights have blocks of {block} inputs"
    return f"{said}, and weights have blocks of {block} inputs" if not group and block else None


def coding(encoding: Encoding, held: Held | None, bias: Weight | None, device: Device) -> Coding:
    """The constants of a projection; without ``held`` those of its tokens alone."""
    rounding = encoding.activation
    assert rounding is not None
    direct = rounding.element == "e4m3" and device.hopper and not INTERPRETED
    storage = None if held is None else held.storage
    wide = held is not None and (held.storage.operand.wide or held.features * held.inputs >= 1 << 31)
    return Coding(
        ELEMENT=rounding.element,
        LIMIT=CODES[rounding.element][1],
        GROUP=rounding.group,
        POWER=rounding.power,
        LEAST=rounding.least,
        DIRECT=direct,
        KIND=str(encoding.table),
        FLOAT8=direct,
        BLOCK_N=encoding.block[0],
        BLOCK_K=encoding.block[1],
        OF=None if storage is None else coded.ELEMENTS[storage.tensors[0].dtype],
        SCALES=None if held is None else coded.ELEMENTS[held.scale.tensors[0].dtype],
        SCALE=encoding.scale,
        APART=storage is not None and storage.operand.table,
        BIAS=bias is not None,
        BIAS_APART=bias is not None and bias.operand.table,
        WIDE=wide,
    )


def round_rows(x: Tensor, it: Sorted | None, encoding: Encoding, *, tokens: bool = False) -> Rounded:
    """Codes of rows x [S, K] in sorted order, without ``it`` in any; ``tokens``: x is [T, K], read through the order."""
    rounding, k = encoding.activation, x.shape[1]
    assert rounding is not None
    if rounding.came:
        once = Rounded(*parts(rounding, x), rounding)
        return once if it is None else gathered(once, it)
    rows = x.shape[0] if it is None else it.slots
    codes = torch.empty((rows, k), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, rounding.groups(k)), dtype=torch.float32, device=x.device)
    _round(x, it, encoding, codes, scales, tokens)
    return Rounded(codes, scales, rounding)


def packed_rows(x: Tensor, rounding: Rounding) -> Tensor:
    """``token_codes.packed`` of rows x [T, K]."""
    out = torch.empty((x.shape[0], rounding.width(x.shape[1])), dtype=torch.uint8, device=x.device)
    codes, scales = parts(rounding, out)
    _round(x, None, Encoding(rounding.element, (0, 0), activation=rounding), codes, scales, False)
    return out


def gathered(once: Rounded, it: Sorted) -> Rounded:
    """The codes of tokens, in the order of rows."""
    codes, scales = (torch.empty((it.slots, t.shape[1]), dtype=t.dtype, device=t.device) for t in once[:2])
    sorted_rows.gather(codes, once.codes, it)
    sorted_rows.gather(scales, once.scales, it)
    return Rounded(codes, scales, once.rounding)


def _round(x: Tensor, it: Sorted | None, encoding: Encoding, codes: Tensor, scales: Tensor, tokens: bool) -> None:
    """Writes codes [S, K], bytes, and scales [S, groups] of :func:`round_rows`."""
    (rows, k), groups, device = codes.shape, scales.shape[1], device_of(x.device)
    rounding = encoding.activation
    assert rounding is not None
    bk = rounding.group or min(max(power_of_two(k), 16), 1024)
    br = max(2048 // bk, 1)
    at = min(groups, AT_ONCE) if rows * k >= LARGE else 1
    if not k:
        scales.zero_()
    elif rows:
        launch(
            token_codes.round_rows,
            (-(-rows // br), -(-groups // at)),
            {"x": x, "order": x if it is None else it.order, "offsets": x if it is None else it.offsets, "codes": codes, "scales": scales},
            pdl=device.hopper,
            S=rows,
            E=0 if it is None else it.experts,
            top_k=1 if it is None else it.top_k,
            K=k,
            GROUPS=groups,
            at_x=Rows(*x.stride()),
            steps=(codes.stride(0), scales.stride(0)),
            GATHER=tokens,
            ALL=it is None,
            coding=coding(encoding, None, None, device),
            BR=br,
            BK=bk,
            AT=at,
            PDL=device.hopper,
        )


def weight_grads(d_a: Tensor, a: Rounded, it: Sorted, held: Held, d_weights: Tensor, grad: Tensor, bias: Weight | None) -> None:
    """Writes d_weights [T, K] from d_a [S, I] and the activation as it was multiplied; ``held``, ``bias``: of the second projection.

    grad [T, N] is that of the output.
    """
    inter, device = d_a.shape[1], device_of(d_a.device)
    br, bk = blocks(inter, 512)
    launch(
        token_codes.weight_grads,
        (-(-it.slots // br),),
        {
            "d_a": d_a, "codes": a.codes, "scales": a.scales, "grad": grad, "b": a.scales if bias is None else bias.pointer,
            "order": it.order, "offsets": it.offsets, "d_weights": d_weights,
        },
        S=it.slots,
        top_k=it.top_k,
        E=it.experts,
        I=inter,
        GROUPS=a.scales.shape[1],
        N=grad.shape[1],
        at_grad=Rows(*grad.stride()),
        at_b=Rows(*((0, 0) if bias is None else bias.strides)),
        coding=coding(held.codes.encoding, None, None, device),
        bias=(bias is not None, bias is not None and bias.operand.table, bias is not None and bias.tensors[0].dtype != d_a.dtype),
        BE=bins(it.experts),
        BR=br,
        BK=bk,
    )  # fmt: skip


def round_tokens(x: Tensor, it: Sorted, encoding: Encoding) -> Rounded:
    """Codes of the tokens x [T, K] of sorted rows: where there are many, each token is rounded once, and its codes are copied."""
    if it.slots * x.shape[1] < MANY or it.slots == x.shape[0]:
        return round_rows(x, it, encoding, tokens=True)
    return gathered(round_rows(x, None, encoding), it)


def sizes(bm: int, encoding: Encoding, device: Device) -> Tiles:
    """Tiles of ``rounded_tiles``."""
    rounding = encoding.activation
    assert rounding is not None
    bk = rounding.group or 128
    if not device.hopper:
        return fit(Tiles(16 if bm > 64 else 32, bk, 8, 2, 8), bm, 2, device, 4)
    return fit(Tiles(128, bk, 8 if bm >= 128 else 4, 4, 8), bm, 1, device)


def product(out: Tensor, x: Rounded, held: Held, it: Sorted, bias: Weight | None = None) -> None:
    """out [S, F] = rows that are rounded times w[e]^T (+ bias[e]). Dead rows are not written."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    encoding, n, k, device = held.codes.encoding, out.shape[1], x.codes.shape[1], device_of(out.device)
    part = sizes(it.bm, encoding, device)
    operand = held.storage.operand
    form = operand.form(1) if device.hopper and not INTERPRETED else ""
    shown = form == "out-in" and operand.strides[0] == n * operand.strides[1]
    w: Any = held.storage.pointer
    if shown:
        w = Described(w, *operand.matrix(form, it.experts, n, k, part.bn, part.bk, 1))
    launch(
        token_codes.rounded_tiles,
        (it.max_tiles * -(-n // part.bn),),
        {
            "x": x.codes, "scales": x.scales, "w": w, "s": held.scale.pointer, "b": x.scales if bias is None else bias.pointer, "out": out,
            "offsets": it.offsets, "tiles": it.tiles, "num_tiles": it.num_tiles,
        },
        warps=part.warps,
        stages=part.stages,
        max_tiles=it.max_tiles,
        F=n,
        I=k,
        GROUPS=x.scales.shape[1],
        at_w=operand.at(None if bias is None else bias.operand),
        at_s=Experts(*held.scale.strides),
        stride_or=out.stride(0),
        coding=coding(encoding, held, bias, device),
        tiling=Tiling(it.bm, part.bn, part.bk, part.group, n % part.bn == 0, k % part.bk == 0, "ieee", ROWS_DESC=shown),
    )  # fmt: skip


__all__ = ["Coding", "Rounded", "packed_rows", "product", "refusal", "round_rows", "round_tokens", "weight_grads"]
