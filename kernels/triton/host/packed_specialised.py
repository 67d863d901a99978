"""Rows of 16 bits times quantised weights by warp-specialised kernels (``hopper/packed.py``): which they take, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.device import rows as moving
from moefuse.kernels.triton.device.structs import Experts, Rows
from moefuse.kernels.triton.hopper.forms import PIECE, PackedCut, rows_layout
from moefuse.kernels.triton.host import coded, specialised, words
from moefuse.kernels.triton.host.available import available
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.coded_specialised import Biases, arguments, form_of
from moefuse.kernels.triton.host.layout import Device, device_of
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.ops.meaning.call import Body

STEP = 64
"""Inputs of a step, which rows have in an order of their own; and features that one group has of each half."""
GROUPS = {256: 2, 128: 2, 64: 4, 32: 4, 16: 4}
"""Groups that multiply, by the rows of a tile: where these are few, sums leave registers for more of them."""
REGISTERS = {2: 232, 4: 112}
"""Registers of a thread that multiplies, by the number of groups."""
STAGES = 4
COPIED = 8, 256
"""Rows and inputs of a block that is copied. All blocks of the same inputs come one after the other, so tokens are read from the L2."""
TALL = 256
"""Rows of a tile from which on there is room for steps of 64 inputs only, others have 128 where inputs are so many times whole."""


def refusal(held: Held, dtype: torch.dtype, features: int, device: Device) -> str | None:
    """Why they do not make a product with a projection, of rows in ``dtype`` into so many features."""
    if not available(device) or held.codes.encoding.activation is not None:
        return "no Hopper, or rows that are rounded"
    if held.inputs % STEP or features % 8:
        return "inputs are not whole steps, or rows not whole 16 bytes"
    item = held.storage.tensors[0].element_size()
    if held.storage.operand.form(item) not in ("out-in", "apart out-in"):
        return "no descriptor can show the weights"
    return words.refusal(held, dtype, device)


def apart(held: Held) -> bool:
    """Whether pairs of a projection's inputs are neighbours but one: what words of four bits come apart into without another step."""
    kind, _, _ = coded.kind_of(held.codes.encoding)
    return kind == "range" and held.codes.encoding.arithmetic != "f32"


def in_order(x: Tensor, held: Held, it: Sorted, *, tokens: bool = False) -> Tensor:
    """Rows [S, K] in the order of inputs in which they are multiplied; of tokens [T, K] those of each row."""
    out = torch.empty((it.slots, x.shape[1]), dtype=x.dtype, device=x.device)
    launch(
        moving.gather_in_order,
        (-(-it.slots // COPIED[0]), -(-out.shape[1] // COPIED[1])),
        {"x": x, "order": it.order, "out": out},
        S=it.slots,
        top_k=it.top_k,
        N=out.shape[1],
        at_x=Rows(*x.stride()),
        GATHER=tokens,
        APART=apart(held),
        BR=COPIED[0],
        BN=COPIED[1],
    )
    return out


def product(
    out: Tensor, x: Tensor, parts: tuple[Held, Held], it: Sorted, bias: Biases, body: Body | None = None, following: Held | None = None
) -> None:
    """out [S, N], sorted rows: those of x (:func:`in_order`) times one projection, or with ``body`` the activation of two, in the order of
    what is ``following``."""
    one, n = parts[0], out.shape[1]
    form, base = form_of(parts, bias, body), words.coding(one, bias[0])
    # Zeros in float32 take more registers than four groups leave.
    groups = 2 if base.ZERO and base.WIDE else GROUPS[it.bm]
    bk = STEP if it.bm >= TALL or one.inputs % (2 * STEP) else 2 * STEP
    cut = PackedCut(
        it.bm, STEP * groups, groups, STAGES, max(it.bm // PIECE, 1), bk, apart(one), following is not None and apart(following),
        REGISTERS=REGISTERS[groups],
    )  # fmt: skip
    outputs = cut.BN // (1 if form.GATING == "plain" else 2)
    columns = -(-n // outputs)
    zeros = [h.zero or h.scale for h in parts]
    arrays, numbers = arguments(out, parts, it, bias, body, form, cut.BN // form.HALVES, bk)
    launch(
        _kernel(),
        (min(device_of(out.device).sms, it.max_tiles * columns),),
        {
            **arrays,
            "x_rows": Described(x, (it.slots, one.inputs), (one.inputs, 1), (cut.piece, STEP), rows_layout(STEP)),
            "z_a": zeros[0].pointer,
            "z_b": zeros[1].pointer,
            "out_rows": specialised.clipped(out, n, it.bm, outputs // groups, out.stride(0)),
        },
        **numbers,
        blocks=columns,
        at_z=Experts(*zeros[0].strides),
        coding=base,
        cut=cut,
    )


def _kernel() -> Any:
    from moefuse.kernels.triton.hopper.packed import packed_products  # Gluon is there only in some versions of Triton

    return packed_products


__all__ = ["in_order", "product", "refusal"]
