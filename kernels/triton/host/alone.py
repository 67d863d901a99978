"""One token, or two, with weights in few bits: how their products are cut, and the launch (``words/alone.py``)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from moefuse.kernels.triton.device.structs import Rows
from moefuse.kernels.triton.host import words
from moefuse.kernels.triton.host.coded import ELEMENTS, Held
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.linear import Weight
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.problem import power_of_two
from moefuse.ops.call import Body

SLOTS = 8
"""Of a token: each has warps of its own in the last projection."""


class Cut(NamedTuple):
    """How a product is cut: SLOTS of a token in a program, each in pieces; STEPS of 64 bytes at once, AHEAD times so many on their way,
    every STRIDE steps, TURNS in all; EVEN: these are whole."""

    SLOTS: int
    STEPS: int
    STRIDE: int
    AHEAD: int
    TURNS: int
    EVEN: bool
    PDL: bool


class Extent(NamedTuple):
    """Where an array of an expert is: elements from expert to expert, its bytes, and those that are one program's share."""

    stride_e: int
    size: int
    share: int


class Asked(NamedTuple):
    """What the next projection reads: element types of its storage and scales, and whether lists of these are addresses."""

    OF: Any
    SCALES: Any
    APART: bool


class Part(NamedTuple):
    """Sizes that are chosen: warps of a program, or more where there are more slots; steps at once, and so many times these ahead."""

    warps: int
    steps: int
    ahead: int


def product(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, experts: int, body: Body | None, parts: tuple[Held, Held],
    bias: tuple[Weight | None, Weight | None], part: Part, following: Held | None = None,
) -> None:  # fmt: skip
    """out [S, N], by slots: x [T, K] times first projections and their activation; without ``body`` out [T, N], the sums over slots of x
    [S, K] times the last projection, weighted. ``following``: the projection that reads out, whose weights are asked for."""
    n, k, per = out.shape[1], parts[0].inputs, words.per_word(parts[0].codes.encoding)
    tokens, top_k = ids.shape
    arrays, numbers = words.described(x, ids, experts, body, parts, bias, n)
    slots = 1 if body is not None else power_of_two(top_k)
    warps, steps = max(part.warps, slots), 2 if numbers["coding"].GROUP else part.steps
    stride = steps * warps // slots
    turns = -(-k // (16 * per * stride))
    hopper, blocks = device_of(x.device).hopper, -(-n // words.features_each(numbers["form"]))
    nothing = Extent(0, 0, 0), Extent(0, 0, 0), None, arrays["w_a"], arrays["s_a"]
    w_more, s_more, asked, w_next, s_next = (_asked(following, blocks) if hopper and following is not None else None) or nothing
    from moefuse.kernels.triton.words import alone  # Gluon is there only in some versions of Triton

    launch(
        alone.lone_rows,
        (blocks, 1 if body is None else top_k, tokens),
        arrays | {"weights": weights, "out": out, "w_next": w_next, "s_next": s_next},
        warps=warps,
        pdl=hopper,
        at_weights=Rows(*weights.stride()),
        w_more=w_more,
        s_more=s_more,
        asked=asked,
        cut=Cut(slots, steps, stride, -(-turns // -(-turns // part.ahead)), turns, k % (16 * per * stride) == 0, hopper),
        **numbers,
    )


def _asked(held: Held, programs: int) -> tuple[Extent, Extent, Asked, Tensor, Tensor] | None:
    """What so many programs ask for of a projection whose experts are whole arrays."""
    extents = [_extent(w, programs) for w in (held.storage, held.scale)]
    w, s = extents
    if w is None or s is None:
        return None
    of, scales = (ELEMENTS[h.tensors[0].dtype] for h in (held.storage, held.scale))
    return w, s, Asked(of, scales, held.storage.operand.table), held.storage.pointer, held.scale.pointer


def _extent(weight: Weight, programs: int) -> Extent | None:
    one = weight.tensors[0]
    one = one if weight.operand.table else one[0]
    size = one.numel() * one.element_size()
    return Extent(weight.strides[0], size, -(-size // (16 * programs)) * 16) if one.is_contiguous() else None


__all__ = ["SLOTS", "Part", "product"]
