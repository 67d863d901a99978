"""``moefuse::experts``: kernel entry, fake and registration, and the internal ops that it runs as.

Inference is ``experts_infer``; a call that is differentiated is ``experts_forward``, later ``experts_backward``, or its three parts where
memory is to be free between them (``moefuse/runtime/backward.py``). On the CPU a C++ kernel takes the former over
(``moefuse/runtime/native.py``), on CUDA what plays records (``kernels/triton/launch/player.py``); what they leave comes back as the op of
the same name with ``_general``.

What forward saves for backward has shapes that do not depend on the routing:

* h [S, 2I] (or [S, I] for gating "plain"), dtype of x: pre-activation rows in sorted order, bias included, in the feature order of the
  projection; "separate" is kept as gate | up. Rows past offsets[E] are zeros.
* order [S] int64 and offsets [E + 1] int64 as described in ``moefuse/runtime/routing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.ops import autograd
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.checks import check_experts
from moefuse.ops.meaning.grad_calls import GradCall, InCall, OutCall, RowsCall
from moefuse.ops.schema import implement
from moefuse.runtime import native, providers

Lists = Sequence[Tensor]
Kept = tuple[Tensor, Tensor, Tensor, Tensor]


def kernel(*data: Any, **options: Any) -> Tensor:
    """Where nothing is differentiated."""
    call = ExpertsCall.of(*data, **options)
    check_experts(call)
    out: Tensor = torch.ops.moefuse.experts_infer.default(*call.pack())
    return out


def fake(*data: Any, **options: Any) -> Tensor:
    """A tensor as the op returns it, from its arguments."""
    return result(ExpertsCall.of(*data, **options))


def composite(*data: Any, **options: Any) -> Tensor:
    """The op in torch's operations."""
    call = ExpertsCall.of(*data, **options)
    check_experts(call)
    return call.reference()


def result(call: ExpertsCall) -> Tensor:
    """A tensor as the op returns it."""
    _, _, hidden = check_experts(call)
    return call.x.new_empty((call.x.shape[0], hidden), dtype=call.out_dtype)


def _or_native(name: str, unit: str, general: Callable[..., Any]) -> Callable[..., Any]:
    """Runs on the CPU until the C++ kernel takes the op over there, which may happen in here; and on any other device."""

    def kernel(tensors: Lists, *rest: Any) -> Any:
        if tensors[0].device.type == "cpu" and native.ready(unit):
            return _torch_private.on_cpu(getattr(torch.ops.moefuse, name).default, tensors, *rest)
        return general(tensors, *rest)

    return kernel


def _infer(*packed: Any) -> Tensor:
    return providers.run("experts", ExpertsCall.unpack(*packed))  # type: ignore[no-any-return]


def infer(call: ExpertsCall) -> Tensor:
    """Experts as a part of another op. On CUDA no op of their own, so that a record of that one has their launches."""
    if call.device.type == "cpu":
        return torch.ops.moefuse.experts_infer.default(*call.pack())  # type: ignore[no-any-return]
    return providers.run("experts", call)  # type: ignore[no-any-return]


def forward(call: ExpertsCall) -> Kept:
    """What a differentiated call computes and keeps, as a part of another op; as :func:`infer`."""
    if call.device.type == "cpu":
        return torch.ops.moefuse.experts_forward.default(*call.pack())  # type: ignore[no-any-return]
    return providers.run("experts_forward", call)  # type: ignore[no-any-return]


def _infer_fake(*packed: Any) -> Tensor:
    return result(ExpertsCall.unpack(*packed))


def _forward(*packed: Any) -> Kept:
    return providers.run("experts_forward", ExpertsCall.unpack(*packed))  # type: ignore[no-any-return]


def _forward_fake(*packed: Any) -> Kept:
    return forward_fake(ExpertsCall.unpack(*packed))


def forward_fake(call: ExpertsCall) -> Kept:
    """Tensors as :func:`forward` returns them."""
    experts, width, hidden = check_experts(call)
    x, slots = call.x, call.x.shape[0] * call.top_k
    order, offsets = (x.new_empty((n,), dtype=torch.int64) for n in (slots, experts + 1))
    return x.new_empty((x.shape[0], hidden), dtype=call.out_dtype), x.new_empty((slots, width)), order, offsets


def _like(*groups: tuple[Lists, bool]) -> list[Tensor]:
    """Gradients of the groups that are wanted."""
    return [torch.empty_like(t) for tensors, wanted in groups if wanted for t in tensors]


def _dense(*tensors: tuple[Tensor, bool]) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, wanted in tensors if wanted]


def _backward_fake(*packed: Any) -> list[Tensor]:
    call = GradCall.unpack(*packed)
    need, a, b, c = call.need, call.w_in, call.w_up, call.w_out
    weights = _like((a.weight, need.w_in), (b.weight, need.w_up), (c.weight, need.w_out))
    biases = _like((a.bias, need.b_in), (b.bias, need.b_up), (c.bias, need.b_out))
    return _dense((call.x, need.x), (call.weights, need.weights)) + weights + biases


def rows_fake(*packed: Any) -> list[Tensor]:
    """Tensors as the first part of backward returns them."""
    call = RowsCall.unpack(*packed)
    need, h, weights = call.need, call.h, call.weights
    made = ((h.shape, need.h, h), ((h.shape[0], call.w_out.inputs), need.w_out, h), (weights.shape, need.products, weights))
    return [like.new_empty(shape) for shape, wanted, like in made if wanted]


def in_fake(*packed: Any) -> list[Tensor]:
    """Tensors as the second part returns them."""
    call = InCall.unpack(*packed)
    need, a, b = call.need, call.w_in, call.w_up
    lists = _like((a.weight, need.w_in), (b.weight, need.w_up), (a.bias, need.b_in), (b.bias, need.b_up))
    return _dense((call.x, need.x), (call.weights, need.weights and need.on_input)) + lists


def _out_fake(*packed: Any) -> list[Tensor]:
    call = OutCall.unpack(*packed)
    return _like((call.w_out.weight, call.need.w_out), (call.w_out.bias, call.need.b_out))


def _grads(name: str, kind: Any) -> Callable[..., list[Tensor]]:
    """Backward, or a part of it."""

    def kernel(*packed: Any) -> list[Tensor]:
        return providers.run(name, kind.unpack(*packed))  # type: ignore[no-any-return]

    return kernel


def _again(*packed: Any) -> list[Tensor]:
    return GradCall.unpack(*packed).reference()


implement("experts", kernel=kernel, fake=fake, autograd=autograd.experts, composite=composite)
for _name, _general, _general_fake, _unit, _entry, _rules in (
    ("experts_infer", _infer, _infer_fake, "infer", None, None),
    ("experts_forward", _forward, _forward_fake, "train", autograd.not_differentiable("experts_forward"), None),
    ("experts_backward", _grads("experts_backward", GradCall), _backward_fake, "train", autograd.once("experts_backward", _again), _again),
):
    _kernel = _or_native(_name, _unit, _general)
    implement(_name, kernel=_kernel, fake=_general_fake, autograd=_entry, composite=_rules, general=_general)
for _name, _kind, _general_fake in (
    ("experts_backward_rows", RowsCall, rows_fake),
    ("experts_backward_in", InCall, in_fake),
    ("experts_backward_out", OutCall, _out_fake),
):
    implement(_name, kernel=_grads(_name, _kind), fake=_general_fake, autograd=autograd.part(_name, "experts"))
