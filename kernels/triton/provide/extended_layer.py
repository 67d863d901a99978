"""Experts with codes or terms by a product for each projection: forward, and the pre-activation once more."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import pointwise, sorted_rows
from moefuse.kernels.triton.host.pointwise import Activation
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.extended_products import Products
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.reference import accumulation_dtype


def forward(call: ExpertsCall, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output [T, Hout] and (h, order, offsets, u) for backward; ``keep``: whether these are read, so that dead rows count."""
    x, dtype, body, slots, experts = call.x, call.dtype, call.body, call.ids.numel(), call.w_in.experts
    hidden, inter = call.w_out.features, call.w_out.inputs
    order, offsets = sorted_rows.sort(call.ids, experts)
    out = torch.empty((x.shape[0], hidden), dtype=call.out_dtype, device=x.device)
    u = torch.empty((slots, call.ranks), dtype=accumulation_dtype(dtype), device=x.device)
    h = torch.empty((slots, call.width), dtype=dtype, device=x.device)
    if not slots:
        return out.zero_(), h, order, offsets, u
    it = Sorted(order, offsets, slots, experts, call.top_k)
    by = Products(it, dtype, call.stacks, u)
    by.hidden(call, h)
    a = torch.empty((slots, inter), dtype=dtype, device=x.device)
    if inter:
        pointwise.activate(a, h, it, Activation(body, inter))
    y = by.forward(2, a, torch.empty((slots, hidden), dtype=dtype, device=x.device))
    for kept in (h, u) if keep else ():
        if kept.numel():
            sorted_rows.clear_dead(kept, it)
    if hidden:
        sorted_rows.sum_slots(out, y, it, None if body.on_input else call.weights)
    return out, h, order, offsets, u


def hidden(call: ExpertsCall, order: Tensor, offsets: Tensor, u: Tensor) -> Tensor:
    """h of :func:`forward` once more, for the slots in the order that it sorted them into; u is what it made of them."""
    slots = order.shape[0]
    h = torch.empty((slots, call.width), dtype=call.dtype, device=call.device)
    if h.numel():
        it = Sorted(order, offsets, slots, call.w_in.experts, call.top_k)
        Products(it, call.dtype, call.stacks, u).hidden(call, h, made=True)
        sorted_rows.clear_dead(h, it)
    return h
