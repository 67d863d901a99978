"""Experts in few bits for few rows of each expert: weights go to the tensor cores as words, nothing is kept for backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.host import alone, coded, sorted_rows, token_codes, words
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.words import Part
from moefuse.kernels.triton.launch import gluon
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.provide import projections
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.tuning.problem import power_of_two

LONE = 8
"""Tokens up to which a call is made by ``host/alone.py``, where few of its slots have an expert in common (``few_shared``)."""
ALONE = 8
"""Slots up to which each is a tile of its own."""
LARGE = 1 << 24
"""Weights of an expert's first projection from which on whole tiles read float8 by channels quicker, but for very few slots. All sizes here
were measured on an H200 (benchmarks/results/coded-h200.json)."""


class Choice(NamedTuple):
    """Rows of a tile, and sizes of the first products and of the last one."""

    cols: int
    up: Part
    down: Part


def choice(held: Held, slots: int, experts: int) -> Choice:
    """Sizes for so many rows."""
    few, rows = words.per_word(held.codes.encoding) == 8, slots / experts
    if slots <= ALONE:
        return Choice(8, Part(2, 4), Part(4, 2))
    if rows <= 1:
        return Choice(8, Part(4, 4), Part(4, 2))
    if rows <= 5:
        return Choice(8, Part(4, 2), Part(4, 2))
    if rows <= 12:
        part = Part(4, 1, 2) if few else Part(4, 2)
        return Choice(16, part, part)
    return Choice(32, Part(4, 2, 2), Part(4, 2, 2))


def refusal(call: ExpertsCall) -> str | None:
    """None, or why a call is not made so."""
    device = device_of(call.x.device)
    slots = call.ids.numel()
    if INTERPRETED or torch.version.hip is not None:
        return "no Gluon"
    if (why := gluon.unusable()) is not None:
        return f"no Gluon ({why})"
    if not slots or call.x.stride(1) != 1 or not (call.w_out.features and call.w_out.inputs):
        return "there are no rows, or they are not contiguous"
    if call.body.on_input:
        return "routing weights go on the tokens"
    it = projections.of_call(call)
    if it is None:
        return projections.MIXED
    rounding = it.first.codes.encoding.activation
    if rounding is not None and not rounding.group and slots > ALONE and it.first.features * it.first.inputs >= LARGE:
        return "experts are large"
    reasons = (words.refusal(h, call.dtype, device) for h in (it.first, it.second, it.last))
    return next((reason for reason in reasons if reason is not None), None)


def experts(call: ExpertsCall) -> Tensor:
    """The output [T, N]."""
    tokens, top_k = call.ids.shape
    few = tokens <= LONE and top_k <= alone.SLOTS and few_shared(call)
    return lone(call) if few and not call.came else tiled(call)


def few_shared(call: ExpertsCall) -> bool:
    """Whether tiles would save little by reading an expert once for its slots: few, or half as many as experts; of bytes a quarter."""
    slots = call.ids.numel()
    bytewise = any(stack.codes is not None and words.per_word(stack.codes.encoding) == 4 for stack in call.stacks)
    return slots <= ALONE or (4 if bytewise else 2) * slots <= call.w_in.experts


def lone_choice(held: tuple[Held, Held], tokens: int, top_k: int) -> tuple[alone.Part, alone.Part]:
    """Sizes of the first products and of the last one, for few tokens."""
    return _first_part(held[0], tokens), _last_part(held[1], tokens, power_of_two(top_k))


def _first_part(held: Held, tokens: int) -> alone.Part:
    """Eight warps that have all of a sum on their way, up to three turns of them; of longer sums less, so that more programs fit."""
    few, steps = words.per_word(held.codes.encoding) == 8, _steps(held)
    each = 1 if few else 2
    turns = -(-steps // (8 * each))
    if turns > 3:
        return alone.Part(4, each, 4 // each)
    if few and tokens > 1 and turns <= 2:
        return alone.Part(4, 2, turns)
    return alone.Part(8, each, turns)


def _last_part(held: Held, tokens: int, slots: int) -> alone.Part:
    """A warp for a slot, with 4 to 6 steps on their way; the whole of a short sum where one token waits for it."""
    encoding, steps = held.codes.encoding, _steps(held)
    short = steps <= 12
    if encoding.activation is not None:
        return alone.Part(8, 2, 3 if short and tokens == 1 else 2)
    if words.per_word(encoding) == 8:
        return alone.Part(4, 2, _least_idle(-(-steps * slots // (2 * max(4, slots))), 3, 2))
    if not short:
        return alone.Part(8, 1, _least_idle(-(-steps * slots // max(8, slots)), 6, 4))
    if tokens == 1:
        return alone.Part(8, 1, 12)
    return alone.Part(16, 1, 6) if coded.kind_of(encoding)[0] == "e4m3" else alone.Part(8, 2, 3)


def _steps(held: Held) -> int:
    """Of 64 bytes, in a row."""
    return -(-held.inputs // (16 * words.per_word(held.codes.encoding)))


def _least_idle(turns: int, *ahead: int) -> int:
    """The first of numbers of turns ahead with which the fewest turns have nothing to do."""
    return min(ahead, key=lambda many: -turns % many)


def lone(call: ExpertsCall, sizes: tuple[alone.Part, alone.Part] | None = None) -> Tensor:
    """The same for few tokens, in two launches."""
    body, ids, count = call.body, call.ids, call.w_in.experts
    first, second, last, biases = projections.known(call)
    up, down = sizes or lone_choice((first, last), *ids.shape)
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    h = torch.empty((ids.numel(), last.inputs), dtype=call.x.dtype, device=call.x.device)
    alone.product(h, call.x, ids, call.weights, count, body, (first, second), biases[:2], up)
    alone.product(out, h, ids, call.weights, count, None, (last, last), (biases[2], None), down)
    return out


def tiled(call: ExpertsCall, sizes: Choice | None = None) -> Tensor:
    """The same for more."""
    body, ids = call.body, call.ids
    slots, count = call.ids.numel(), call.w_in.experts
    first, second, last, biases = projections.known(call)
    cols, up, down = sizes or choice(first, slots, count)
    it = sorted_rows.sort_with_tiles(ids, count, cols)[0] if slots > ALONE else None
    out = torch.empty((call.x.shape[0], last.features), dtype=call.out_dtype, device=call.x.device)
    h = torch.empty((slots, last.inputs), dtype=call.dtype, device=call.x.device)
    y = torch.empty((slots, last.features), dtype=call.dtype, device=call.x.device)
    x, scales = _rows(call.x, first)
    words.product(h, x, ids, it, count, body, (first, second), biases[:2], up, cols, scales)
    a, scales = _rows(h, last)
    words.product(y, a, ids, it, count, None, (last, last), (biases[2], None), down, cols, scales)
    sorted_rows.sum_given(out, y, ids, call.weights, count)
    return out


def _rows(x: Tensor, held: Held) -> tuple[Tensor, Tensor | None]:
    """Rows as they are multiplied: codes with scales, where the projection rounds them."""
    encoding = held.codes.encoding
    if encoding.activation is None:
        return x, None
    rounded = token_codes.round_rows(x, None, encoding)
    return rounded.codes, rounded.scales
