"""Experts with weights in few bits and their gradients on CUDA: weights are made in registers, between the kernels of training.

No weight is unpacked in memory, in forward or backward: the gradient of a projection's rows reads the same storage again. Nothing waits
for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, pointwise, rounded_specialised, sorted_rows, token_codes, wgrad
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.rounded_specialised import ROWS
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.host.token_codes import Rounded
from moefuse.kernels.triton.launch.record import recorded
from moefuse.kernels.triton.provide import library, packed, rounded, unpacked, words
from moefuse.kernels.triton.provide.products import Own
from moefuse.ops.meaning.call import ExpertsCall, Stack, Stacks
from moefuse.ops.meaning.coded_weights import Codes
from moefuse.ops.meaning.encoding import Encoding
from moefuse.ops.meaning.grad_calls import GradCall
from moefuse.ops.meaning.reference import accumulation_dtype

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(call: ExpertsCall | GradCall) -> str | None:
    """None, or why these kernels cannot run a call."""
    if call.x.dtype not in DTYPES:
        return f"no kernel for {call.x.dtype}"
    given = [(stack.codes, stack) for stack in call.stacks if stack.codes is not None]
    refused = [coded.refusal(codes, stack.weight[0]) for codes, stack in given]
    refused += [token_codes.refusal(codes) for codes, stack in given if stack.rounding is not None]
    return next((reason for reason in refused if reason is not None), None)


def _bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """float8 as bytes: kernels make numbers of these by themselves, on devices without it as well."""
    return [t.view(torch.uint8) if t.dtype not in coded.ELEMENTS else t for t in tensors]


def _as_bytes(call: Any) -> Any:
    def as_bytes(stack: Stack) -> Stack:
        if stack.codes is None:
            return stack
        encoding, scale, zero = stack.codes
        return stack._replace(weight=_bytes(stack.weight), codes=Codes(encoding, _bytes(scale), _bytes(zero)))

    w_in, w_up, w_out = map(as_bytes, call.stacks)
    return call.with_stacks((w_in, w_up, w_out))


def experts(call: ExpertsCall) -> Tensor:
    """The output [T, Hout]."""
    return _inference(_as_bytes(call))  # type: ignore[no-any-return]


def experts_forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output and (h, order, offsets, u) for backward; dead rows of h are zeros, and there is nothing in u."""
    return _forward(_as_bytes(call))  # type: ignore[no-any-return]


def experts_hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h of :func:`experts_forward`, once more, for the slots in the order that it sorted them into."""
    return _hidden(_as_bytes(call), order, offsets)  # type: ignore[no-any-return]


def experts_backward(call: GradCall) -> list[Tensor]:
    """The gradients that ``call.need`` asks for, flattened."""
    return _backward(_as_bytes(call))  # type: ignore[no-any-return]


class _Products:
    """The products of a call over its sorted rows, each by the kernel that its weights need."""

    def __init__(self, it: Sorted, dtype: torch.dtype, stacks: Stacks) -> None:
        self.own = Own(it, dtype)
        self.stacks = stacks
        self.held: list[Held | None] = [None if s.codes is None else coded.held(s.weight, s.codes) for s in stacks]
        self.last: tuple[Tensor, Rounded] | None = None

    def sizes(self, which: int) -> tuple[int, int]:
        """(features, inputs) of a projection."""
        held = self.held[which]
        features, inputs = (held.features, held.inputs) if held is not None else self.stacks[which].weight[0].shape[-2:]
        return features, inputs

    def linear(self, which: int, x: Tensor, out: Tensor, *, back: bool = False, add: bool = False, **how: Any) -> Tensor:
        """Rows of x times the weights of a projection, plus its biases; ``back``: times their transpose."""
        held, bias = self.held[which], () if back else self.stacks[which].bias
        if held is None:
            return self.own.linear(x, self.stacks[which].weight, bias, back=back, out=out, add=add, **how)
        if out.numel():
            found = linear.weight(bias, 1) if bias else None
            encoding = held.codes.encoding
            if encoding.activation is not None and not back:
                rows, it = self.rounded(x, encoding, **how), self.own.tiled
                if it.bm == ROWS and rounded_specialised.refusal(held, it.experts, it.slots, out, 1) is None:
                    rounded_specialised.product(out, rows, (held, held), it, (found, None))
                else:
                    token_codes.product(out, rows, held, it, found)
                return out
            if not back and not add and how.get("scale") is None and packed.takes(out, x, held, self.own.it):
                packed.product(out, x, held, self.own.it, bias, tokens=how.get("tokens", False))
            elif unpacked.takes(x, self.own.it):
                in_order = self.own.rows(x, how.get("tokens", False), how.get("scale"))
                unpacked.product(out, in_order, held, self.own.it, bias, back=back, add=add)
            else:
                coded.product(out, x, held, self.own.tiled, bias=found, back=back, add=add, **how)
        return out

    def hidden(self, call: ExpertsCall, h: Tensor) -> None:
        """h [S, width] = the first projection, or both of them side by side; rows that are nobody's are not written."""
        scale, features = call.weights if call.body.on_input else None, self.sizes(0)[0]
        for which, target in enumerate((h[:, :features], h[:, features:]) if call.body.split else (h,)):
            self.linear(which, call.x, target, tokens=True, scale=scale)

    def rounds(self, which: int) -> bool:
        """Whether a projection rounds its rows."""
        return self.stacks[which].rounding is not None

    def weight_grads(self, h: Tensor, d_a: Tensor, how: Activation, d_weights: Tensor, grad: Tensor, bias: Weight | None) -> None:
        """The gradient of routing weights on the output, where the second projection rounds: from the activation as it was multiplied."""
        held, a = self.held[2], torch.empty_like(d_a)
        assert held is not None
        if a.numel():
            pointwise.activate(a, h, self.own.it, how)
        rows = token_codes.round_rows(a, self.own.it, held.codes.encoding)
        token_codes.weight_grads(d_a, rows, self.own.it, held, d_weights, grad, bias)

    def rounded(self, x: Tensor, encoding: Encoding, tokens: bool = False, scale: Tensor | None = None) -> Rounded:
        """The rows as they are multiplied; once for the two first projections."""
        if self.last is None or self.last[0] is not x or self.last[1].rounding != encoding.activation:
            rows = library.gathered(x, self.own.it, scale) if scale is not None else x
            self.last = x, token_codes.round_rows(rows, self.own.it, encoding, tokens=tokens and scale is None)
        return self.last[1]


@recorded
def _inference(call: ExpertsCall) -> Tensor:
    found = packed.experts(call)
    if found is None and words.refusal(call) is None:
        return words.experts(call)
    found = rounded.experts(call) if found is None else found
    return _layer(call)[0] if found is None else found


@recorded
def _forward(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return *_layer(call), torch.empty((call.ids.numel(), 0), dtype=accumulation_dtype(call.dtype), device=call.device)


@recorded
def _hidden(call: ExpertsCall, order: Tensor, offsets: Tensor) -> Tensor:
    slots = order.shape[0]
    it = Sorted(order, offsets, slots, call.w_in.experts, call.top_k)
    h = torch.empty((slots, call.width), dtype=call.dtype, device=call.device)
    if slots:
        _Products(it, call.dtype, call.stacks).hidden(call, h)
        sorted_rows.clear_dead(h, it)
    return h


def _layer(call: ExpertsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, body, slots, experts = call.x, call.body, call.ids.numel(), call.w_in.experts
    order, offsets = sorted_rows.sort(call.ids, experts)
    it = Sorted(order, offsets, slots, experts, call.top_k)
    by = _Products(it, x.dtype, call.stacks)
    (hidden, inter), width = by.sizes(2), (2 if body.split else 1) * by.sizes(0)[0]
    out = torch.empty((x.shape[0], hidden), dtype=call.out_dtype, device=x.device)
    h = torch.empty((slots, width), dtype=x.dtype, device=x.device)
    if not slots:
        return out.zero_(), h, order, offsets
    by.hidden(call, h)
    a = torch.empty((slots, inter), dtype=x.dtype, device=x.device)
    if inter:
        sorted_rows.clear_dead(h, it)
        pointwise.activate(a, h, it, Activation(body, inter))
    y = by.linear(2, a, torch.empty((slots, hidden), dtype=x.dtype, device=x.device))
    if hidden:
        sorted_rows.sum_slots(out, y, it, None if body.on_input else call.weights)
    return out, h, order, offsets


@recorded
def _backward(call: GradCall) -> list[Tensor]:
    body, need, x, weights, h = call.body, call.need, call.x, call.weights, call.h.contiguous()
    slots = call.order.shape[0]
    it = Sorted(call.order.contiguous(), call.offsets.contiguous(), slots, call.offsets.shape[0] - 1, weights.shape[1])
    by = _Products(it, x.dtype, call.stacks)
    (_, inter), (features, hidden) = by.sizes(2), by.sizes(0)
    d_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=x.device) if need.weights else None
    d_x = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if need.x else None
    d_out, d_h = call.grad.to(h.dtype), torch.empty_like(h)
    bias = call.stacks[2].bias
    if slots:
        last = linear.weight(bias, 1) if bias else None
        d_a = by.linear(2, d_out, torch.empty((slots, inter), dtype=h.dtype, device=h.device), back=True, tokens=True)
        rounds = need.products and by.rounds(2)
        if rounds and d_weights is not None:
            by.weight_grads(h, d_a, Activation(body, inter), d_weights, d_out, last)
        pointwise.activate_grads(
            it, h, d_a, Activation(body, inter), scale=None if body.on_input else weights, d_h=d_h, a=None,
            d_weights=d_weights if need.products and not rounds else None, grad=d_out, bias=last,
        )  # fmt: skip
    parts = [d_h[:, :features], d_h[:, features:]] if body.split else [d_h]
    if need.tokens and slots and hidden:
        d_rows = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
        for which, part in enumerate(parts):
            by.linear(which, part, d_rows, back=True, add=which > 0)
        if body.on_input:
            pointwise.pair(it, x, d_rows, weights, out=d_rows if need.x else None, d_weights=d_weights, from_rows=True)
        if d_x is not None:
            sorted_rows.sum_slots(d_x, d_rows, it, None)
    found = [t for t in (d_x, d_weights) if t is not None]
    for part, stack, wanted in zip(parts, call.stacks, (need.b_in, need.b_up), strict=False):
        found += wgrad.vector_grads(stack.bias, part, it) if wanted else []
    scale = None if body.on_input else weights
    return [*found, *(wgrad.vector_grads(bias, d_out, it, tokens=True, scale=scale) if need.b_out else [])]
