"""Experts in few bits with rows that are rounded, for many rows of each expert: two products with specialised warps."""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.kernels.triton.host import rounded_specialised, sorted_rows, token_codes
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.rounded_specialised import ROWS
from moefuse.kernels.triton.provide import projections
from moefuse.ops.meaning.call import ExpertsCall


def refusal(call: ExpertsCall) -> str | None:
    """Why a call in inference is not made so."""
    if call.body.on_input or not call.ids.numel():
        return "there are no rows, or routing weights go on the tokens"
    of, device = projections.of_call(call), device_of(call.x.device)
    if of is None or any(held.codes.encoding.activation is None for held in of[:3]):
        return "a projection does not round its rows" if of is not None else projections.MIXED
    parts = ((of.first, of.last.inputs, 2 if call.body.gating in ("merged", "separate") else 1), (of.last, of.last.features, 1))
    reasons = (rounded_specialised.refusal(held, call.dtype, features, n, device) for held, features, n in parts)
    return next((reason for reason in reasons if reason is not None), None)


def experts(call: ExpertsCall) -> Tensor:
    """The output [T, N] of a call that :func:`refusal` lets through."""
    slots = call.ids.numel()
    first, second, last, biases = projections.known(call)
    h = torch.empty((slots, last.inputs), dtype=call.dtype, device=call.x.device)
    y = torch.empty((slots, last.features), dtype=call.dtype, device=call.x.device)
    it, position = sorted_rows.sort_with_tiles(call.ids, call.w_in.experts, ROWS)
    x = token_codes.round_tokens(call.x, it, first.codes.encoding)
    rounded_specialised.product(h, x, (first, second), it, biases[:2], call.body)
    a = token_codes.round_rows(h, it, last.codes.encoding)
    rounded_specialised.product(y, a, (last, last), it, (biases[2], None))
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    sorted_rows.sum_slots(out, y, it, call.weights, position)
    return out
