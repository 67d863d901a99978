"""Many rows of 16 bits times weights in few bits: products with specialised warps that unpack weights (``hopper/packed.py``).

``moefuse::experts_coded`` in inference is two of them; in training, and of grouped products, they make what is multiplied forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded, linear, packed_specialised, sorted_rows
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.words import form_of
from moefuse.ops.coded import CodedCall

LEAST_ROWS, E2M1_ROWS = 4, 7
"""Mean rows of an expert from which on they are taken; of e2m1, which takes more instructions than others. Tests set the first."""


def rows(mean: float) -> int:
    """Of a tile, for so many rows of an expert."""
    return next((height for height in (16, 32, 64, 128) if mean <= MOST[height]), 256)


MOST = {16: 10, 32: 20, 64: 48, 128: 160}
"""Mean rows of an expert up to which tiles are so high (benchmarks/results/coded-h200.json)."""


def experts(call: CodedCall, bm: int | None = None) -> Tensor | None:
    """The output [T, N]; None where these kernels do not make it."""
    base, body = call.base, call.base.body
    slots, count = base.ids.numel(), base.w_in.experts
    every = call.codes if body.split else (call.codes[0], call.codes[2])
    if body.on_input or any(c is None for c in every) or not slots or slots < LEAST_ROWS * count or base.x.stride(1) != 1:
        return None
    if any(c is not None and coded.kind_of(c.encoding)[0] == "e2m1" for c in every) and slots < E2M1_ROWS * count:
        return None
    held = [coded.held(s.weight, c) for s, c in zip(call.stacks, call.codes, strict=True) if c is not None]
    first, second, last = held[0], held[1] if body.split else held[0], held[-1]
    if body.split and form_of(first) != form_of(second):
        return None
    h = torch.empty((slots, last.inputs), dtype=base.x.dtype, device=base.x.device)
    y = torch.empty((slots, last.features), dtype=base.x.dtype, device=base.x.device)
    if any(packed_specialised.refusal(part, base.x.dtype, out) is not None for part, out in ((first, h), (last, y))):
        return None
    it, position = sorted_rows.sort_with_tiles(base.ids, count, bm or rows(slots / count))
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    b_up = b_in if body.gating == "merged" else b_up
    x = packed_specialised.in_order(base.x, first, it, tokens=True)
    packed_specialised.product(h, x, (first, second), it, (b_in, b_up), body, last)
    packed_specialised.product(y, h, (last, last), it, (b_out, None))
    out = torch.empty((base.x.shape[0], last.features), dtype=base.out_dtype, device=base.x.device)
    sorted_rows.sum_slots(out, y, it, base.weights, position)
    return out


def takes(out: Tensor, x: Tensor, held: Held, it: Sorted) -> bool:
    """Whether one product is made so; ``x``: rows, or tokens."""
    few = it.mean_rows < max(LEAST_ROWS, 1)
    return not few and x.stride(1) == 1 and packed_specialised.refusal(held, x.dtype, out) is None


def product(out: Tensor, x: Tensor, held: Held, it: Sorted, bias: Sequence[Tensor], *, tokens: bool = False) -> None:
    """out [S, N] = sorted rows x [S, K], or those of tokens x [T, K], times w[e]^T (+ bias[e]); dead rows are not written."""
    by = sorted_rows.tiled(it, x.dtype, rows(it.mean_rows))
    in_order = packed_specialised.in_order(x, held, by, tokens=tokens)
    packed_specialised.product(out, in_order, (held, held), by, (linear.weight(bias, 1) if bias else None, None))
