"""Products of float8 codes by kernels with specialised warps (``hopper/rounded.py``): which they take, and the launch."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moefuse.kernels.triton.device.structs import Experts
from moefuse.kernels.triton.hopper.available import available
from moefuse.kernels.triton.hopper.forms import Cut, Form, parts_of
from moefuse.kernels.triton.host import specialised
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of, first_features, kernel_gating
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.operands import is_apart, steps_table
from moefuse.kernels.triton.host.sorted_rows import Sorted, aligned_rows
from moefuse.kernels.triton.host.token_codes import Rounded, coding
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.launch import Described
from moefuse.kernels.triton.launch.record import as_value
from moefuse.ops.call import Body
from moefuse.ops.encoding import EXPONENTS

GROUP = 128
"""Inputs of a scale, of rows and of weights: a step."""
ROWS = 128
COLUMNS = 128
"""Of a tile's sums, of both projections together."""
CUT = Cut("shared", ROWS, COLUMNS, GROUP, 8, 6, 2, 2)
LEAST_ROWS = 8
"""Mean rows of an expert from which on they are taken. Tests set it."""


def refusal(held: Held, experts: int, slots: int, out: Tensor, halves: int) -> str | None:
    """Why they do not make a product of rows with ``halves`` projections."""
    encoding, device = held.codes.encoding, device_of(out.device)
    rounding = encoding.activation
    if not available(device) or out.dtype not in specialised.DTYPES or slots < LEAST_ROWS * experts:
        return "no Hopper, other dtypes, or few rows"
    if rounding is None or (encoding.table, rounding.element, rounding.group, encoding.block[1]) != ("e4m3", "e4m3", GROUP, GROUP):
        return "scales are of other blocks"
    if encoding.scale not in ("", EXPONENTS):
        return "scales are of another kind"
    width, form = COLUMNS // halves, held.storage.operand.form(1)
    if encoding.block[0] % width or (halves == 2 and out.shape[1] % width) or form not in ("out-in", "apart out-in"):
        return "blocks of features are not whole, or no descriptor can show the weights"
    return None if aligned_rows(out) and held.inputs % GROUP == 0 and out.shape[1] % 8 == 0 else "rows are not whole 16 bytes"


def product(
    out: Tensor, x: Rounded, parts: tuple[Held, Held], it: Sorted, bias: tuple[Weight | None, Weight | None], body: Body | None = None
) -> None:
    """out [S, N], sorted rows: those of x times one projection, or with ``body`` the activation of two."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    one, two = parts
    n, k, operand = out.shape[1], one.inputs, one.storage.operand
    gating = "plain" if body is None else kernel_gating(body)
    halves = 2 if gating == "halves" else 1
    biased = bias[0] is not None
    cut = CUT._replace(PARTS=parts_of(CUT.PARTS, biased))
    width, form = cut.BN // halves, operand.form(1)
    first, second = (0, 0) if body is None else first_features(body, n)
    shown, steps = zip(*[_weights(h, form, it.experts, h.features, k, width) for h in parts], strict=True)
    pointers = [h.storage.pointer if b is None else b.pointer for h, b in zip(parts, (bias[0], bias[1] or bias[0]), strict=True)]
    out_width = width if gating != "interleaved" else cut.BN // 2
    columns = -(-n // out_width)
    base = coding(one.codes.encoding, one, bias[0], device_of(out.device))
    launch(
        _kernel(),
        (min(device_of(out.device).sms, it.max_tiles * columns),),
        {
            "x_rows": Described(x.codes, (it.slots, k), (k, 1), (cut.piece, cut.BK), _bytes_layout(2)), "x_scales": x.scales,
            "w_a": shown[0], "w_b": shown[1], "s_a": one.scale.pointer, "s_b": two.scale.pointer, "b_a": pointers[0], "b_b": pointers[1],
            "out_rows": specialised.clipped(out, n, cut.rows, out_width // cut.PARTS, out.stride(0)), "tiles": it.tiles,
            "num_tiles": it.num_tiles, "steps_a": steps[0], "steps_b": steps[1],
        },
        max_tiles=it.max_tiles,
        blocks=columns,
        K=k,
        features=one.features,
        at_a=operand.at(None if bias[0] is None else bias[0].operand, form, first),
        at_b=operand.at(None if bias[1] is None else bias[1].operand, form, second),
        at_s=Experts(*one.scale.strides),
        args=(0.0, 0.0) if body is None else body.pair,
        form=Form(
            halves, form, biased, halves == 2 and biased, biased and base.BIAS_APART, "" if body is None else body.activation, gating,
            body is not None and body.up_first and gating == "interleaved",
        ),
        coding=base,
        cut=cut,
    )  # fmt: skip


def _kernel() -> Any:
    from moefuse.kernels.triton.hopper.rounded import rounded_products  # Gluon is there only in some versions of Triton

    return rounded_products


def _bytes_layout(rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=rank)


def _weights(held: Held, form: str, experts: int, features: int, inputs: int, width: int) -> tuple[Described, Any]:
    """The descriptor of a projection's codes, and the steps between experts that are apart."""
    shape, strides, block = held.storage.operand.matrix(form, experts, features, inputs, width, GROUP, 1)
    pointer, steps = as_value(steps_table, held.storage.tensors) if is_apart(form) else (held.storage.pointer, held.storage.pointer)
    return Described(pointer, shape, strides, block, _bytes_layout(len(block))), steps


__all__ = ["product", "refusal"]
