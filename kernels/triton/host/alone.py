"""Few tokens with quantised weights: how their products are cut, and the launch (``words/alone.py``)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moefuse.kernels.triton.device.structs import Rows
from moefuse.kernels.triton.host import words
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.launch.calls import launch
from moefuse.ops.meaning.call import Body
from moefuse.tuning.problem import power_of_two

SLOTS = 8
"""The most slots of a token: in the last projection each slot has warps of its own."""


class Cut(NamedTuple):
    """How a product is cut: SLOTS of a token in a program, each in pieces; STEPS of 64 bytes at once, AHEAD times so many on their way,
    every STRIDE steps, TURNS in all; EVEN: these are whole. TOPS: times 256 inputs of a row."""

    SLOTS: int
    STEPS: int
    STRIDE: int
    AHEAD: int
    TURNS: int
    EVEN: bool
    PDL: bool
    TOPS: int


class Part(NamedTuple):
    """Sizes that are chosen: warps of a program, or more where there are more slots; steps at once, and so many times these ahead."""

    warps: int
    steps: int
    ahead: int


def product(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: int, body: Body | None, parts: tuple[Held, Held],
    bias: tuple[Weight | None, Weight | None], part: Part,
) -> None:  # fmt: skip
    """out [S, N], by slots: x [T, K] times first projections and their activation; without ``body`` out [T, N], the sums over slots of x
    [S, K] times the last projection, weighted."""
    n, k, per = out.shape[1], parts[0].inputs, words.per_word(parts[0].codes.encoding)
    tokens, top_k = ids.shape
    arrays, numbers = words.described(x, ids, experts, body, parts, bias, n)
    slots = 1 if body is not None else power_of_two(top_k)
    warps, steps = max(part.warps, slots), 2 if numbers["coding"].GROUP else part.steps
    stride = steps * warps // slots
    turns = -(-k // (16 * per * stride))
    hopper = device_of(x.device).hopper
    from moefuse.kernels.triton.words import alone  # Gluon is there only in some versions of Triton

    launch(
        alone.lone_rows,
        (-(-n // words.features_each(numbers["form"])), 1 if body is None else top_k, tokens),
        arrays | {"weights": weights, "out": out},
        warps=warps,
        pdl=hopper,
        at_weights=Rows(*weights.stride()),
        cut=Cut(slots, steps, stride, -(-turns // -(-turns // part.ahead)), turns, k % (16 * per * stride) == 0, hopper, -(-k // 256)),
        **numbers,
    )


__all__ = ["SLOTS", "Part", "product"]
