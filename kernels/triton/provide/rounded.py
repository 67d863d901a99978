"""``moefuse::experts_coded`` with rows that are rounded, for many rows of each expert: two products with specialised warps."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, rounded_specialised, sorted_rows, token_codes
from moefuse.kernels.triton.host.rounded_specialised import ROWS
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.words import form_of
from moefuse.ops.coded import CodedCall


def experts(call: CodedCall) -> Tensor | None:
    """The output [T, N]; None where these kernels do not make it."""
    base, body = call.base, call.base.body
    slots, count = base.ids.numel(), base.w_in.experts
    every = call.codes if body.split else (call.codes[0], call.codes[2])
    if body.on_input or any(c is None or c.encoding.activation is None for c in every):
        return None
    if slots < rounded_specialised.LEAST_ROWS * count:
        return None
    held = [coded.held(s.weight, c) for s, c in zip(call.stacks, call.codes, strict=True) if c is not None]
    first, second, last = held[0], held[1] if body.split else held[0], held[-1]
    if body.split and form_of(first) != form_of(second):
        return None
    halves = 2 if body.gating in ("merged", "separate") else 1
    h = torch.empty((slots, last.inputs), dtype=base.x.dtype, device=base.x.device)
    y = torch.empty((slots, last.features), dtype=base.x.dtype, device=base.x.device)
    parts = ((first, h, halves), (last, y, 1))
    if any(rounded_specialised.refusal(part, count, slots, out, n) is not None for part, out, n in parts):
        return None
    order, offsets = sorted_rows.sort(base.ids, count)
    it = sorted_rows.tiled(Sorted(order, offsets, slots, count, base.top_k), base.x.dtype, ROWS)
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    b_up = b_in if body.gating == "merged" else b_up
    x = token_codes.round_tokens(base.x, it, first.codes.encoding)
    rounded_specialised.product(h, x, (first, second), it, (b_in, b_up), body)
    a = token_codes.round_rows(h, it, last.codes.encoding)
    rounded_specialised.product(y, a, (last, last), it, (b_out, None))
    out = torch.empty((base.x.shape[0], last.features), dtype=base.out_dtype, device=base.x.device)
    sorted_rows.sum_slots(out, y, it, base.weights)
    return out
