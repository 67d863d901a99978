"""``moefuse::experts_coded`` with rows of 16 bits, for many rows of each expert: two products with specialised warps that unpack weights."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, packed_specialised, sorted_rows
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.words import form_of
from moefuse.ops.coded import CodedCall

LEAST_ROWS = 16
"""Mean rows of an expert from which on they are taken. Tests set it."""


def rows(mean: float) -> int:
    """Of a tile."""
    return 32 if mean <= 20 else 64 if mean <= 48 else 128 if mean <= 160 else 256


def experts(call: CodedCall, bm: int | None = None) -> Tensor | None:
    """The output [T, N]; None where these kernels do not make it."""
    base, body = call.base, call.base.body
    slots, count = base.ids.numel(), base.w_in.experts
    every = call.codes if body.split else (call.codes[0], call.codes[2])
    if body.on_input or body.gating == "interleaved" or any(c is None for c in every) or slots < LEAST_ROWS * count:
        return None
    held = [coded.held(s.weight, c) for s, c in zip(call.stacks, call.codes, strict=True) if c is not None]
    first, second, last = held[0], held[1] if body.split else held[0], held[-1]
    if body.split and form_of(first) != form_of(second):
        return None
    h = torch.empty((slots, last.inputs), dtype=base.x.dtype, device=base.x.device)
    y = torch.empty((slots, last.features), dtype=base.x.dtype, device=base.x.device)
    if any(packed_specialised.refusal(part, base.x.dtype, out) is not None for part, out in ((first, h), (last, y))):
        return None
    order, offsets = sorted_rows.sort(base.ids, count)
    it = sorted_rows.tiled(Sorted(order, offsets, slots, count, base.top_k), base.x.dtype, bm or rows(slots / count))
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    b_up = b_in if body.gating == "merged" else b_up
    x = packed_specialised.in_order(base.x, first, it, tokens=True)
    packed_specialised.product(h, x, (first, second), it, (b_in, b_up), body, last)
    packed_specialised.product(y, h, (last, last), it, (b_out, None))
    out = torch.empty((base.x.shape[0], last.features), dtype=base.out_dtype, device=base.x.device)
    sorted_rows.sum_slots(out, y, it, base.weights)
    return out
