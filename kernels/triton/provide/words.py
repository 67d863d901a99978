"""``moefuse::experts_coded`` for few rows of each expert: weights go to the tensor cores as words, nothing is kept for backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.hopper.available import known
from moefuse.kernels.triton.host import alone, coded, linear, sorted_rows, token_codes, words
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.words import Part
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.ops.coded import CodedCall

LONE, LONE_BYTES, LARGE = 8, 4, 1 << 24
"""Tokens up to which a call is made by ``host/alone.py``: in general, and where weights of 8 bits are unpacked; none where a projection of
an expert has more weights than LARGE."""
ASK = True
"""Whether its first kernel asks for what the last one reads."""
ALONE = 8
"""Slots up to which each is a tile of its own."""
ROWS, NIBBLES, ROUNDED = 40, 24, 5
"""Mean rows of an expert up to which these kernels are quicker than whole tiles: in general, of four bits that count on, and of rows that
are rounded. All sizes here were measured on an H200 (benchmarks/results/coded-h200.json)."""


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


def most(call: CodedCall) -> int:
    """Mean rows of an expert up to which a call is made so."""
    encodings = [codes.encoding for codes in call.codes if codes is not None]
    if any(encoding.activation is not None for encoding in encodings):
        return ROUNDED
    return NIBBLES if any(coded.kind_of(encoding)[0] == "range" for encoding in encodings) else ROWS


def refusal(call: CodedCall) -> str | None:
    """None, or why a call is not made so."""
    base, device = call.base, device_of(call.x.device)
    slots = base.ids.numel()
    if INTERPRETED or not known() or torch.version.hip is not None:
        return "no Gluon"
    if not 0 < slots <= most(call) * base.w_in.experts or base.x.stride(1) != 1 or not (base.w_out.features and base.w_out.inputs):
        return "too many rows"
    if base.body.on_input or any(codes is None for codes in call.codes[:: 1 if base.body.split else 2]):
        return "a projection is in floating point, or routing weights go on the tokens"
    held = _held(call)
    if base.body.split and form_of(held[0]) != form_of(held[1]):
        return "gate and up are held in two ways"
    return next((reason for reason in (words.refusal(h, base.x.dtype, device) for h in held) if reason is not None), None)


def _held(call: CodedCall) -> list[Held]:
    return [coded.held(s.weight, c) for s, c in zip(call.stacks, call.codes, strict=True) if c is not None]


def form_of(held: Held) -> tuple[Any, ...]:
    """What two projections must have in common that one kernel reads together."""
    parts = (held.storage, held.scale, *((held.zero,) if held.zero else ()))
    return held.codes.encoding, held.features, *((p.operand, p.tensors[0].dtype) for p in parts)


def experts(call: CodedCall) -> Tensor:
    """The output [T, N]."""
    tokens, top_k = call.base.ids.shape
    return lone(call) if tokens <= most_alone(_held(call)) and top_k <= alone.SLOTS else tiled(call)


def most_alone(held: list[Held]) -> int:
    """Tokens up to which a call is made in two launches."""
    if any(h.features * h.inputs > LARGE for h in held):
        return 0
    return LONE_BYTES if any(_bytes(h) for h in held) else LONE


def _bytes(held: Held) -> bool:
    """Whether a projection has codes of 8 bits that are unpacked."""
    encoding = held.codes.encoding
    return encoding.activation is None and words.per_word(encoding) == 4


def lone_choice(held: tuple[Held, Held], tokens: int) -> tuple[alone.Part, alone.Part]:
    """Sizes of the first products and of the last one, for few tokens."""
    first, last = (h.codes.encoding for h in held)
    if last.activation is not None:
        return alone.Part(8, 2, 2), alone.Part(8, 2, 3)
    if tokens > 1:
        return alone.Part(4, 1, 8 if words.per_word(first) == 4 else 4), alone.Part(8, 1, 6)
    return alone.Part(4, 2, 4) if words.per_word(first) == 4 else alone.Part(8, 1, 4), alone.Part(8, 1, 12)


def lone(call: CodedCall, sizes: tuple[alone.Part, alone.Part] | None = None) -> Tensor:
    """The same for few tokens, in two launches."""
    base, body, ids, count = call.base, call.base.body, call.base.ids, call.base.w_in.experts
    held = _held(call)
    first, second, last = held[0], held[1] if body.split else held[0], held[-1]
    up, down = sizes or lone_choice((first, last), len(ids))
    out = torch.empty((base.x.shape[0], last.features), dtype=base.out_dtype, device=base.x.device)
    h = torch.empty((ids.numel(), last.inputs), dtype=base.x.dtype, device=base.x.device)
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    alone.product(h, base.x, ids, base.weights, count, body, (first, second), (b_in, b_up), up, last if ASK else None)
    alone.product(out, h, ids, base.weights, count, None, (last, last), (b_out, None), down)
    return out


def tiled(call: CodedCall, sizes: Choice | None = None) -> Tensor:
    """The same for more."""
    base, body, ids = call.base, call.base.body, call.base.ids
    held, slots, count = _held(call), call.base.ids.numel(), call.base.w_in.experts
    first, second, last = held[0], held[1] if body.split else held[0], held[-1]
    cols, up, down = sizes or choice(first, slots, count)
    it = None
    if slots > ALONE:
        order, offsets = sorted_rows.sort(ids, count)
        it = sorted_rows.tiled(sorted_rows.Sorted(order, offsets, slots, count, base.top_k), base.x.dtype, cols)
    out = torch.empty((base.x.shape[0], last.features), dtype=base.out_dtype, device=base.x.device)
    h = torch.empty((slots, last.inputs), dtype=base.x.dtype, device=base.x.device)
    y = torch.empty((slots, last.features), dtype=base.x.dtype, device=base.x.device)
    b_in, b_up, b_out = (linear.weight(s.bias, 1) if s.bias else None for s in call.stacks)
    x, scales = _rows(base.x, first)
    words.product(h, x, ids, it, count, body, (first, second), (b_in, b_up), up, cols, scales)
    a, scales = _rows(h, last)
    words.product(y, a, ids, it, count, None, (last, last), (b_out, None), down, cols, scales)
    sorted_rows.sum_given(out, y, ids, base.weights, count)
    return out


def _rows(x: Tensor, held: Held) -> tuple[Tensor, Tensor | None]:
    """Rows as they are multiplied: codes with scales, where the projection rounds them."""
    encoding = held.codes.encoding
    if encoding.activation is None:
        return x, None
    rounded = token_codes.round_rows(x, None, encoding)
    return rounded.codes, rounded.scales
