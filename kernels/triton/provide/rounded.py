"""Experts in few bits with rows that are rounded, for many rows of each expert: two products with specialised warps."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import rounded_specialised, sorted_rows, token_codes
from moefuse.kernels.triton.host.rounded_specialised import ROWS
from moefuse.kernels.triton.provide import projections
from moefuse.ops.meaning.call import ExpertsCall


def experts(call: ExpertsCall) -> Tensor | None:
    """The output [T, N]; None where these kernels do not make it."""
    body = call.body
    slots, count = call.ids.numel(), call.w_in.experts
    if body.on_input or any(stack.codes is not None and stack.rounding is None for stack in call.stacks):
        return None
    if not slots or slots < rounded_specialised.LEAST_ROWS * count:
        return None
    of = projections.of_call(call)
    if of is None:
        return None
    first, second, last, biases = of
    halves = 2 if body.gating in ("merged", "separate") else 1
    h = torch.empty((slots, last.inputs), dtype=call.x.dtype, device=call.x.device)
    y = torch.empty((slots, last.features), dtype=call.x.dtype, device=call.x.device)
    parts = ((first, h, halves), (last, y, 1))
    if any(rounded_specialised.refusal(part, count, slots, out, n) is not None for part, out, n in parts):
        return None
    it, position = sorted_rows.sort_with_tiles(call.ids, count, ROWS)
    x = token_codes.round_tokens(call.x, it, first.codes.encoding)
    rounded_specialised.product(h, x, (first, second), it, biases[:2], body)
    a = token_codes.round_rows(h, it, last.codes.encoding)
    rounded_specialised.product(y, a, (last, last), it, (biases[2], None))
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    sorted_rows.sum_slots(out, y, it, call.weights, position)
    return out
