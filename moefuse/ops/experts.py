"""``moefuse::experts``: kernel entry, fake and registration, and the two internal ops its gradient goes through.

What forward saves for backward has shapes that do not depend on the routing:

* h [S, 2I] (or [S, I] for gating "plain"), dtype of x: pre-activation rows in sorted order, bias included, in the feature order of the
  projection; "separate" is kept as gate | up. Rows past offsets[E] are zeros.
* order [S] int64 and offsets [E + 1] int64 as described in ``moefuse/runtime/routing.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.body import decode, infer_args, unpack
from moefuse.ops.checks import check_experts
from moefuse.ops.schema import implement
from moefuse.runtime import native, providers

Lists = Sequence[Tensor]


def _kernel(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    data = (x, ids, weights, w_in, w_up, w_out, b_in, b_up, b_out)
    check_experts("experts", *data, activation, activation_args, gating, up_first, out_dtype)
    args = infer_args(data, activation, activation_args, gating, up_first, weight_on_input, out_dtype)
    out: Tensor = torch.ops.moefuse.experts_infer.default(*args)
    return out


def _infer_kernel(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    """Runs on the CPU until the C++ kernel takes this op over there, which may happen in here; and on any other device."""
    if tensors[0].device.type == "cpu" and native.ready():
        out: Tensor = torch.ops.moefuse.experts_infer.default(tensors, counts, body, arg0, arg1, out_dtype)
        return out
    return _general_kernel(tensors, counts, body, arg0, arg1, out_dtype)


def _general_kernel(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    """``experts_infer`` without the C++ kernel."""
    out: Tensor = providers.run("experts", *unpack(tensors, counts), *decode(body, arg0, arg1).values(), out_dtype)
    return out


def _infer_fake(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    return _fake(*unpack(tensors, counts), **decode(body, arg0, arg1), out_dtype=out_dtype)


def _fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    data = (x, ids, weights, w_in, w_up, w_out, b_in, b_up, b_out)
    _, _, hidden = check_experts("experts", *data, activation, activation_args, gating, up_first, out_dtype)
    return x.new_empty((x.shape[0], hidden), dtype=out_dtype or x.dtype)


def _forward_kernel(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = (x, ids, weights, w_in, w_up, w_out, b_in, b_up, b_out)
    check_experts("experts", *data, activation, activation_args, gating, up_first, out_dtype)
    out: tuple[Tensor, Tensor, Tensor, Tensor] = providers.run(
        "experts_forward", *data, activation, activation_args, gating, up_first, weight_on_input, out_dtype
    )
    return out


def _forward_fake(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    *,
    activation: str = "silu",
    activation_args: Sequence[float] = (),
    gating: str = "merged",
    up_first: bool = False,
    weight_on_input: bool = False,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data = (x, ids, weights, w_in, w_up, w_out, b_in, b_up, b_out)
    experts, width, hidden = check_experts("experts", *data, activation, activation_args, gating, up_first, out_dtype)
    slots = x.shape[0] * ids.shape[1]
    out = x.new_empty((x.shape[0], hidden), dtype=out_dtype or x.dtype)
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    return out, x.new_empty((slots, width)), order, offsets


def _backward_kernel(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    *,
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    data = (grad, x, weights, h, order, offsets, w_in, w_up, w_out, b_in, b_up, b_out, needs)
    out: list[Tensor] = providers.run("experts_backward", *data, activation, activation_args, gating, up_first, weight_on_input)
    return out


def _backward_fake(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    h: Tensor,
    order: Tensor,
    offsets: Tensor,
    w_in: Lists,
    w_up: Lists,
    w_out: Lists,
    b_in: Lists,
    b_up: Lists,
    b_out: Lists,
    needs: Sequence[bool],
    *,
    activation: str,
    activation_args: Sequence[float],
    gating: str,
    up_first: bool,
    weight_on_input: bool,
) -> list[Tensor]:
    out: list[Tensor] = [t.new_empty(t.shape) for t, need in ((x, needs[0]), (weights, needs[1])) if need]
    for tensors, need in zip((w_in, w_up, w_out, b_in, b_up, b_out), needs[2:], strict=True):
        out += [torch.empty_like(t) for t in tensors] if need else []
    return out


implement("experts", kernel=_kernel, fake=_fake, autograd=autograd.experts)
implement("experts_infer", kernel=_infer_kernel, fake=_infer_fake, autograd=None)
implement("experts_general", kernel=_general_kernel, fake=_infer_fake, autograd=None)
implement("experts_forward", kernel=_forward_kernel, fake=_forward_fake, autograd=autograd.not_differentiable("experts_forward"))
implement("experts_backward", kernel=_backward_kernel, fake=_backward_fake, autograd=autograd.once("experts_backward", "experts"))
