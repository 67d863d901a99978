"""Products of float8 codes by warp-specialised kernels (``hopper/rounded.py``): which they take, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.hopper.forms import Cut, parts_of
from moefuse.kernels.triton.host import specialised
from moefuse.kernels.triton.host.available import available
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.coded_specialised import Biases, arguments, bytes_layout, form_of
from moefuse.kernels.triton.host.layout import Device, device_of
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.host.token_codes import Rounded, coding
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.ops.meaning.call import Body
from moefuse.ops.meaning.encoding import EXPONENTS

GROUP = 128
"""Inputs of a step, which are those of a scale of rows and of weights, where it is not for all inputs."""
ROWS = 128
COLUMNS = 128
"""Rows and columns of a tile; the columns are those of both projections together."""
CUT = Cut("shared", ROWS, COLUMNS, GROUP, 8, 6, 2, 2)


def refusal(held: Held, dtype: torch.dtype, features: int, halves: int, device: Device) -> str | None:
    """Why they do not make a product with ``halves`` projections into so many features in ``dtype``."""
    encoding = held.codes.encoding
    rounding = encoding.activation
    if not available(device) or dtype not in specialised.DTYPES:
        return "no Hopper, or other dtypes"
    if rounding is None or (encoding.table, rounding.element) != ("e4m3", "e4m3") or encoding.scale not in ("", EXPONENTS):
        return "codes or scales are of another kind"
    if held.storage.operand.form(1) not in ("out-in", "apart out-in"):
        return "no descriptor can show the weights"
    if features % 8 or held.inputs % 16:
        return "rows are not whole 16 bytes"
    blocks, width = (rounding.group, encoding.block[1]), COLUMNS // halves
    if blocks == (0, 0):
        return None
    if blocks != (GROUP, GROUP) or held.inputs % GROUP or encoding.block[0] % width or (halves == 2 and features % width):
        return "scales are of other blocks"
    return None


def product(out: Tensor, x: Rounded, parts: tuple[Held, Held], it: Sorted, bias: Biases, body: Body | None = None) -> None:
    """out [S, N], sorted rows: those of x times one projection, or with ``body`` the activation of two."""
    one, n, k = parts[0], out.shape[1], parts[0].inputs
    form = form_of(parts, bias, body)
    cut = CUT._replace(PARTS=parts_of(CUT.PARTS, form.BIAS))
    width = cut.BN // form.HALVES
    out_width = width if form.GATING != "interleaved" else cut.BN // 2
    columns = -(-n // out_width)
    arrays, numbers = arguments(out, parts, it, bias, body, form, width, GROUP)
    launch(
        _kernel(),
        (min(device_of(out.device).sms, it.max_tiles * columns),),
        {
            **arrays,
            "x_rows": Described(x.codes, (it.slots, k), (k, 1), (cut.piece, cut.BK), bytes_layout(2)),
            "x_scales": x.scales,
            "out_rows": specialised.clipped(out, n, cut.rows, out_width // cut.PARTS, out.stride(0)),
        },
        **numbers,
        blocks=columns,
        coding=coding(one.codes.encoding, one, bias[0], device_of(out.device)),
        cut=cut,
    )


def _kernel() -> Any:
    from moefuse.kernels.triton.hopper.rounded import rounded_products  # Gluon is there only in some versions of Triton

    return rounded_products


__all__ = ["product", "refusal"]
