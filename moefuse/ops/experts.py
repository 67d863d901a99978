"""``moefuse::experts``: kernel entry, fake and registration, and the internal ops that it runs as.

Inference is ``experts_infer``; a call that is differentiated is ``experts_forward``, later ``experts_backward``, or its three parts where
memory is to be free between them (``moefuse/runtime/backward.py``). On the CPU a C++ kernel takes the former over
(``moefuse/runtime/native.py``), and what it leaves comes back as the op of the same name with ``_general``.

What forward saves for backward has shapes that do not depend on the routing:

* h [S, 2I] (or [S, I] for gating "plain"), dtype of x: pre-activation rows in sorted order, bias included, in the feature order of the
  projection; "separate" is kept as gate | up. Rows past offsets[E] are zeros.
* order [S] int64 and offsets [E + 1] int64 as described in ``moefuse/runtime/routing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.ops import autograd
from moefuse.ops.body import Needs, decode, decode_needs, pack, unpack
from moefuse.ops.checks import check_experts
from moefuse.ops.schema import implement
from moefuse.runtime import native, providers

Lists = Sequence[Tensor]
Kept = tuple[Tensor, Tensor, Tensor, Tensor]


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
    args = pack(data, activation, activation_args, gating, up_first, weight_on_input, out_dtype)
    out: Tensor = torch.ops.moefuse.experts_infer.default(*args)
    return out


def _fake(*data: Any, activation: str = "silu", activation_args: Sequence[float] = (), gating: str = "merged", up_first: bool = False,
          weight_on_input: bool = False, out_dtype: torch.dtype | None = None) -> Tensor:  # fmt: skip
    options: dict[str, Any] = {
        "activation": activation,
        "activation_args": activation_args,
        "gating": gating,
        "up_first": up_first,
        "out_dtype": out_dtype,
    }
    _, _, hidden = check_experts("experts", *data, **options)
    return data[0].new_empty((data[0].shape[0], hidden), dtype=out_dtype or data[0].dtype)  # type: ignore[no-any-return]


def _or_native(name: str, unit: str, general: Callable[..., Any]) -> Callable[..., Any]:
    """Runs on the CPU until the C++ kernel takes the op over there, which may happen in here; and on any other device."""

    def kernel(tensors: Lists, *rest: Any) -> Any:
        if tensors[0].device.type == "cpu" and native.ready(unit):
            return _torch_private.on_cpu(getattr(torch.ops.moefuse, name).default, tensors, *rest)
        return general(tensors, *rest)

    return kernel


def _infer(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    if tensors[0].device.type == "cuda" and not isinstance(kernels := providers.triton_kernels(), str):
        return kernels.infer(tensors, counts, body, arg0, arg1, out_dtype)  # type: ignore[no-any-return]
    out: Tensor = providers.run("experts", *unpack(tensors, counts), *decode(body, arg0, arg1).values(), out_dtype)
    return out


def _infer_fake(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    return _fake(*unpack(tensors, counts), **decode(body, arg0, arg1), out_dtype=out_dtype)


def _forward(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Kept:
    out: Kept = providers.run("experts_forward", *unpack(tensors, counts), *decode(body, arg0, arg1).values(), out_dtype)
    return out


def _forward_fake(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Kept:
    data, options = unpack(tensors, counts), {**decode(body, arg0, arg1), "out_dtype": out_dtype}
    del options["weight_on_input"]
    x, ids = data[:2]
    experts, width, hidden = check_experts("experts", *data, **options)
    slots = x.shape[0] * ids.shape[1]
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    return x.new_empty((x.shape[0], hidden), dtype=out_dtype), x.new_empty((slots, width)), order, offsets


def _like(groups: Iterable[tuple[Lists, bool]]) -> list[Tensor]:
    """Gradients of the groups that are wanted."""
    return [torch.empty_like(t) for tensors, wanted in groups if wanted for t in tensors]


def _backward_fake(tensors: Lists, counts: Sequence[int], needs: int, body: int, arg0: float, arg1: float) -> list[Tensor]:
    _, x, weights, _, _, _, *lists = unpack(tensors, counts)
    wanted = decode_needs(needs)
    dense = [t.new_empty(t.shape) for t, need in ((x, wanted[0]), (weights, wanted[1])) if need]
    return dense + _like(zip(lists, wanted[2:], strict=True))


def _part(name: str) -> Callable[..., list[Tensor]]:
    """A part of backward: everything but the needs and the options is in ``tensors``."""

    def kernel(tensors: Lists, counts: Sequence[int], needs: int, body: int, arg0: float, arg1: float) -> list[Tensor]:
        data = unpack(tensors, counts)
        out: list[Tensor] = providers.run(name, *data, decode_needs(needs), *decode(body, arg0, arg1).values())
        return out

    return kernel


def _need(needs: int, body: int) -> Needs:
    return Needs.of(decode_needs(needs), decode(body, 0.0, 0.0)["weight_on_input"])


def _rows_fake(tensors: Lists, counts: Sequence[int], needs: int, body: int, arg0: float, arg1: float) -> list[Tensor]:
    need, (_, weights, h, _, _, w_out, _) = _need(needs, body), unpack(tensors, counts)
    made = ((h.shape, need.h, h), ((h.shape[0], w_out[0].shape[-1]), need.w_out, h), (weights.shape, need.products, weights))
    return [like.new_empty(shape) for shape, wanted, like in made if wanted]


def _in_fake(tensors: Lists, counts: Sequence[int], needs: int, body: int, arg0: float, arg1: float) -> list[Tensor]:
    need, (x, weights, _, _, _, *lists) = _need(needs, body), unpack(tensors, counts)
    dense = [t.new_empty(t.shape) for t, wanted in ((x, need.x), (weights, need.weights and need.on_input)) if wanted]
    return dense + _like(zip(lists, (need.w_in, need.w_up, need.b_in, need.b_up), strict=True))


def _out_fake(tensors: Lists, counts: Sequence[int], needs: int, body: int, arg0: float, arg1: float) -> list[Tensor]:
    need, (*_, w_out, b_out) = _need(needs, body), unpack(tensors, counts)
    return _like(((w_out, need.w_out), (b_out, need.b_out)))


implement("experts", kernel=_kernel, fake=_fake, autograd=autograd.experts)
for _name, _general, _general_fake, _unit, _entry in (
    ("experts_infer", _infer, _infer_fake, "infer", None),
    ("experts_forward", _forward, _forward_fake, "train", autograd.not_differentiable("experts_forward")),
    ("experts_backward", _part("experts_backward"), _backward_fake, "train", autograd.once("experts_backward", "experts")),
):
    implement(_name, kernel=_or_native(_name, _unit, _general), fake=_general_fake, autograd=_entry)
    implement(f"{_name}_general", kernel=_general, fake=_general_fake, autograd=None)
for _name, _general_fake in (("experts_backward_rows", _rows_fake), ("experts_backward_in", _in_fake), ("experts_backward_out", _out_fake)):
    implement(_name, kernel=_part(_name), fake=_general_fake, autograd=autograd.once(_name, "experts"))
