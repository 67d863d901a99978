"""Many rows of 16 bits times weights in few bits: products with specialised warps that unpack weights (``hopper/packed.py``).

Experts in inference are two of them; in training, and of grouped products, they make what is multiplied forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, packed_specialised, sorted_rows
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide import projections
from moefuse.ops.meaning.call import ExpertsCall

LEAST_ROWS, E2M1_ROWS = 4, 7
"""Mean rows of an expert from which on they are taken; of e2m1, which takes more instructions than others. Tests set the first."""


def rows(mean: float) -> int:
    """Of a tile, for so many rows of an expert."""
    return next((height for height in (16, 32, 64, 128) if mean <= MOST[height]), 256)


MOST = {16: 10, 32: 20, 64: 48, 128: 160}
"""Mean rows of an expert up to which tiles are so high (benchmarks/results/coded-h200.json)."""


def experts(call: ExpertsCall, bm: int | None = None) -> Tensor | None:
    """The output [T, N]; None where these kernels do not make it."""
    body = call.body
    slots, count = call.ids.numel(), call.w_in.experts
    if body.on_input or not slots or slots < LEAST_ROWS * count or call.x.stride(1) != 1:
        return None
    of = projections.of_call(call)
    if of is None or (any(_e2m1(held) for held in of[:3]) and slots < E2M1_ROWS * count):
        return None
    first, second, last, biases = of
    h = torch.empty((slots, last.inputs), dtype=call.x.dtype, device=call.x.device)
    y = torch.empty((slots, last.features), dtype=call.x.dtype, device=call.x.device)
    if any(packed_specialised.refusal(part, call.x.dtype, out) is not None for part, out in ((first, h), (last, y))):
        return None
    it, position = sorted_rows.sort_with_tiles(call.ids, count, bm or rows(slots / count))
    x = packed_specialised.in_order(call.x, first, it, tokens=True)
    packed_specialised.product(h, x, (first, second), it, biases[:2], body, last)
    packed_specialised.product(y, h, (last, last), it, (biases[2], None))
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    sorted_rows.sum_slots(out, y, it, call.weights, position)
    return out


def _e2m1(held: Held) -> bool:
    return coded.kind_of(held.codes.encoding)[0] == "e2m1"


def takes(out: Tensor, x: Tensor, held: Held, it: Sorted) -> bool:
    """Whether one product is made so; ``x``: rows, or tokens."""
    few = it.mean_rows < max(E2M1_ROWS if LEAST_ROWS and _e2m1(held) else LEAST_ROWS, 1)
    return not few and x.stride(1) == 1 and packed_specialised.refusal(held, x.dtype, out) is None


def product(out: Tensor, x: Tensor, held: Held, it: Sorted, bias: Sequence[Tensor], *, tokens: bool = False) -> None:
    """out [S, N] = sorted rows x [S, K], or those of tokens x [T, K], times w[e]^T (+ bias[e]); dead rows are not written."""
    by = sorted_rows.tiled(it, x.dtype, rows(it.mean_rows))
    in_order = packed_specialised.in_order(x, held, by, tokens=tokens)
    packed_specialised.product(out, in_order, (held, held), by, (linear.weight(bias, 1) if bias else None, None))
