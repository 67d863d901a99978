"""What warp-specialised products take of quantised weights, whether their rows are rounded or not: arguments and descriptors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moefuse.kernels.triton.device.structs import Experts
from moefuse.kernels.triton.hopper.forms import Form
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import first_features, kernel_gating
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.operands import is_apart, steps_table
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.launch.descriptors import Described
from moefuse.kernels.triton.launch.record import as_value
from moefuse.ops.meaning.call import Body

Biases = tuple[Weight | None, Weight | None]
"""The bias of one projection, or those of gate and up."""


def form_of(parts: tuple[Held, Held], bias: Biases, body: Body | None) -> Form:
    """What is computed: one projection, or with ``body`` the activation of two."""
    storage = parts[0].storage.tensors[0]
    gating = "plain" if body is None else kernel_gating(body)
    halves, biased = 2 if gating == "halves" else 1, bias[0] is not None
    return Form(
        halves, parts[0].storage.operand.form(storage.element_size()), biased, halves == 2 and biased,
        bias[0] is not None and bias[0].operand.table, "" if body is None else body.activation, gating,
        body is not None and body.up_first and gating == "interleaved", parts[0].inputs // storage.shape[-1],
    )  # fmt: skip


def arguments(
    out: Tensor, parts: tuple[Held, Held], it: Sorted, bias: Biases, body: Body | None, form: Form, width: int, inner: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arrays and numbers of a product to out [S, N]. ``width``, ``inner``: features of a block of weights, and inputs of a step."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    one, two = parts
    first, second = (0, 0) if body is None else first_features(body, out.shape[1])
    (w_a, steps_a), (w_b, steps_b) = (_shown(h, form, it.experts, width, inner) for h in parts)
    b_a, b_b = (h.storage.pointer if b is None else b.pointer for h, b in zip(parts, (bias[0], bias[1] or bias[0]), strict=True))
    arrays = {
        "w_a": w_a, "w_b": w_b, "s_a": one.scale.pointer, "s_b": two.scale.pointer, "b_a": b_a, "b_b": b_b, "tiles": it.tiles,
        "num_tiles": it.num_tiles, "steps_a": steps_a, "steps_b": steps_b,
    }  # fmt: skip
    operand = one.storage.operand
    numbers: dict[str, Any] = {
        "max_tiles": it.max_tiles,
        "K": one.inputs,
        "features": one.features,
        "at_a": operand.at(None if bias[0] is None else bias[0].operand, form.DESC, first),
        "at_b": operand.at(None if bias[1] is None else bias[1].operand, form.DESC, second),
        "at_s": Experts(*one.scale.strides),
        "args": (0.0, 0.0) if body is None else body.pair,
        "form": form,
    }
    return arrays, numbers


def bytes_layout(rank: int, wide: int = 128, item: int = 1) -> Any:
    """Rows of ``wide`` bytes in shared memory, of elements of ``item`` bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout  # Gluon is there only in some versions of Triton

    return NVMMASharedLayout(swizzle_byte_width=wide, element_bitwidth=8 * item, rank=rank)


def _shown(held: Held, form: Form, experts: int, width: int, inner: int) -> tuple[Described, Any]:
    """The descriptor of a projection's storage, and the steps between experts that are apart."""
    item, inner = held.storage.tensors[0].element_size(), inner // form.PACK
    shape, strides, block = held.storage.operand.matrix(
        form.DESC, experts, held.features, held.inputs // form.PACK, width, inner, item
    )  # fmt: skip
    apart = is_apart(form.DESC)
    pointer, steps = as_value(steps_table, held.storage.tensors) if apart else (held.storage.pointer, held.storage.pointer)
    return Described(pointer, shape, strides, block, bytes_layout(len(block), inner * item, item)), steps


__all__ = ["Biases", "arguments", "bytes_layout", "form_of"]
