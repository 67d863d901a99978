"""Many rows of 16 bits times weights in few bits: products with specialised warps that unpack weights (``hopper/packed.py``).

Experts in inference are two of them; in training, and of grouped products, they make what is multiplied forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, packed_specialised, sorted_rows
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide import projections
from moefuse.ops.meaning.call import ExpertsCall

MOST = {16: 10, 32: 20, 64: 48, 128: 160}
"""Mean rows of an expert up to which tiles are so high (benchmarks/results/coded-h200.json)."""


def rows(mean: float) -> int:
    """Of a tile, for so many rows of an expert."""
    return next((height for height in (16, 32, 64, 128) if mean <= MOST[height]), 256)


def refusal(call: ExpertsCall) -> str | None:
    """Why a call in inference is not made so."""
    if call.body.on_input or not call.ids.numel() or call.x.stride(1) != 1:
        return "there are no rows, or routing weights go on the tokens"
    of, device = projections.of_call(call), device_of(call.x.device)
    if of is None:
        return projections.MIXED
    parts = ((of.first, of.last.inputs), (of.last, of.last.features))
    reasons = (packed_specialised.refusal(held, call.x.dtype, features, device) for held, features in parts)
    return next((reason for reason in reasons if reason is not None), None)


def experts(call: ExpertsCall, bm: int | None = None) -> Tensor:
    """The output [T, N] of a call that :func:`refusal` lets through."""
    body, slots, count = call.body, call.ids.numel(), call.w_in.experts
    first, second, last, biases = projections.known(call)
    h = torch.empty((slots, last.inputs), dtype=call.x.dtype, device=call.x.device)
    y = torch.empty((slots, last.features), dtype=call.x.dtype, device=call.x.device)
    it, position = sorted_rows.sort_with_tiles(call.ids, count, bm or rows(slots / count))
    x = packed_specialised.in_order(call.x, first, it, tokens=True)
    packed_specialised.product(h, x, (first, second), it, biases[:2], body, last)
    packed_specialised.product(y, h, (last, last), it, (biases[2], None))
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    sorted_rows.sum_slots(out, y, it, call.weights, position)
    return out


def is_e2m1(held: Held) -> bool:
    """Whether codes are e2m1, which takes more instructions to unpack than others."""
    return coded.kind_of(held.codes.encoding)[0] == "e2m1"


def product(out: Tensor, x: Tensor, held: Held, it: Sorted, bias: Sequence[Tensor], *, tokens: bool = False) -> None:
    """out [S, N] = sorted rows x [S, K], or those of tokens x [T, K], times w[e]^T (+ bias[e]); dead rows are not written."""
    by = sorted_rows.tiled(it, x.dtype, rows(it.mean_rows))
    in_order = packed_specialised.in_order(x, held, by, tokens=tokens)
    packed_specialised.product(out, in_order, (held, held), by, (linear.weight(bias, 1) if bias else None, None))
