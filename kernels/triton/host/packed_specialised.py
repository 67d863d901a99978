"""Rows of 16 bits times weights in few bits by kernels with specialised warps (``hopper/packed.py``): which they take, and the launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.device import rows as moving
from moefuse.kernels.triton.device.structs import Experts, Rows
from moefuse.kernels.triton.hopper.available import available
from moefuse.kernels.triton.hopper.forms import PIECE, Form, PackedCut, rows_layout
from moefuse.kernels.triton.host import coded, specialised, words
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of, first_features, kernel_gating
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.operands import is_apart, steps_table
from moefuse.kernels.triton.host.sorted_rows import Sorted, aligned_rows
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.launch import Described
from moefuse.kernels.triton.launch.record import as_value
from moefuse.ops.call import Body

STEP = 64
"""Inputs of a step, which rows have in an order of their own; and features that one group has of each half."""
GROUPS = {256: 2, 128: 2, 64: 4, 32: 4, 16: 4}
"""Groups that multiply, by the rows of a tile: where these are few, sums leave registers for more of them."""
REGISTERS = {2: 232, 4: 112}
"""Of a thread of a group."""
STAGES = 4
COPIED = 8, 256
"""Rows and inputs of a block that is copied. All blocks of the same inputs come one after the other, so tokens are read from the L2."""
TALL = 256
"""Rows of a tile from which on there is room for steps of 64 inputs only, others have 128 where inputs are so many times whole."""


def refusal(held: Held, dtype: torch.dtype, out: Tensor) -> str | None:
    """Why they do not make a product with a projection."""
    device = device_of(out.device)
    if not available(device) or held.codes.encoding.activation is not None:
        return "no Hopper, or rows that are rounded"
    if held.inputs % STEP or out.shape[1] % 8 or not aligned_rows(out) or out.dtype != dtype:
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
    out: Tensor, x: Tensor, parts: tuple[Held, Held], it: Sorted, bias: tuple[Weight | None, Weight | None], body: Body | None = None,
    following: Held | None = None,
) -> None:  # fmt: skip
    """out [S, N], sorted rows: those of x (:func:`in_order`) times one projection, or with ``body`` the activation of two, in the order of
    what is ``following``."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    one, two = parts
    n, k, operand = out.shape[1], one.inputs, one.storage.operand
    storage = one.storage.tensors[0]
    item, pack = storage.element_size(), one.inputs // storage.shape[-1]
    gating = "plain" if body is None else kernel_gating(body)
    split = 2 if gating == "halves" else 1
    biased = bias[0] is not None
    base = words.coding(one, bias[0])
    # Zeros in float32 take more registers than four groups leave.
    groups = 2 if base.ZERO and base.WIDE else GROUPS[it.bm]
    bk = STEP if it.bm >= TALL or k % (2 * STEP) else 2 * STEP
    cut = PackedCut(
        it.bm, STEP * groups, groups, STAGES, max(it.bm // PIECE, 1), bk, apart(one), following is not None and apart(following),
        REGISTERS=REGISTERS[groups],
    )  # fmt: skip
    width, form = cut.BN // split, operand.form(item)
    outputs = cut.BN // (1 if gating == "plain" else 2)
    first, second = (0, 0) if body is None else first_features(body, n)
    shown, steps = zip(*[_weights(h, form, it.experts, pack, width, bk // pack, item) for h in parts], strict=True)
    pointers = [h.storage.pointer if b is None else b.pointer for h, b in zip(parts, (bias[0], bias[1] or bias[0]), strict=True)]
    columns = -(-n // outputs)
    zeros = [h.zero or h.scale for h in parts]
    launch(
        _kernel(),
        (min(device_of(out.device).sms, it.max_tiles * columns),),
        {
            "x_rows": Described(x, (it.slots, k), (k, 1), (cut.piece, STEP), rows_layout(STEP)), "w_a": shown[0], "w_b": shown[1],
            "s_a": one.scale.pointer, "s_b": two.scale.pointer, "z_a": zeros[0].pointer, "z_b": zeros[1].pointer,
            "b_a": pointers[0], "b_b": pointers[1],
            "out_rows": specialised.clipped(out, n, it.bm, outputs // groups, out.stride(0)), "tiles": it.tiles,
            "num_tiles": it.num_tiles, "steps_a": steps[0], "steps_b": steps[1],
        },
        max_tiles=it.max_tiles,
        blocks=columns,
        K=k,
        features=one.features,
        at_a=operand.at(None if bias[0] is None else bias[0].operand, form, first),
        at_b=operand.at(None if bias[1] is None else bias[1].operand, form, second),
        at_s=Experts(*one.scale.strides),
        at_z=Experts(*zeros[0].strides),
        args=(0.0, 0.0) if body is None else body.pair,
        form=Form(
            split, form, biased, split == 2 and biased, biased and base.BIAS_APART, "" if body is None else body.activation, gating,
            body is not None and body.up_first and gating == "interleaved", pack,
        ),
        coding=base,
        cut=cut,
    )  # fmt: skip


def _kernel() -> Any:
    from moefuse.kernels.triton.hopper.packed import packed_products  # Gluon is there only in some versions of Triton

    return packed_products


def _weights(held: Held, form: str, experts: int, pack: int, width: int, inner: int, item: int) -> tuple[Described, Any]:
    """The descriptor of a projection's storage, and the steps between experts that are apart."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    shape, strides, block = held.storage.operand.matrix(form, experts, held.features, held.inputs // pack, width, inner, item)
    pointer, steps = as_value(steps_table, held.storage.tensors) if is_apart(form) else (held.storage.pointer, held.storage.pointer)
    layout = NVMMASharedLayout(swizzle_byte_width=inner * item, element_bitwidth=8 * item, rank=len(block))
    return Described(pointer, shape, strides, block, layout), steps


__all__ = ["in_order", "product", "refusal"]
