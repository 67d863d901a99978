"""Block sizes and launches of the kernels of the grouped tier and of training: one function per kernel, tensors in, nothing returned.

Grids and buffers follow from shapes alone, as in ``plan.py``. There are no plans: what is kept are launches (``launch/calls.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.config import within
from moefuse.kernels.triton.device import backward, grouped, routing, rows
from moefuse.kernels.triton.device.structs import Halves, Rows, Stored, Tiling, Wanted
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.launch import Described
from moefuse.kernels.triton.layout import CHUNK, SORT_AT_ONCE, UNROLLED, Device, device_of, precision_of, rows_descriptor
from moefuse.kernels.triton.operands import Operand, address_table, describe, is_apart, steps_table
from moefuse.kernels.triton.problem import Tiles, power_of_two
from moefuse.ops.call import Body

Lists = Sequence[Tensor]

_ONE_TILE = 1 << 30
"""Rows of a tile where the tiles of the sort are not used."""


# Sizes --------------------------------------------------------------------------------------------------------------------------------


def tile_rows(slots: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: somewhat more than an expert gets on average, so that most experts need one tile fewer."""
    if dtype == torch.float64:
        return 16
    hit = max(experts * (1.0 - (1.0 - 1.0 / experts) ** slots), 1.0)
    return min(max(power_of_two(1.3 * slots / hit), 16), 32 if dtype == torch.float32 else 128)


@functools.cache
def linear_sizes(bm: int, aligned: bool, dtype: torch.dtype, device: Device) -> Tiles:
    """Tiles of ``grouped.linear_tiles``. Rows that are not whole 16 bytes (not ``aligned``) take registers for many addresses."""
    if dtype == torch.float64:
        return Tiles(16, 16, 8, 1)
    if dtype == torch.float32:
        return fit(Tiles(64, 32, 4, 3), bm, 4, device)
    if not aligned:
        return fit(Tiles(64, 32, 8, 3, 4), bm, 2, device)
    if bm < 128:
        return fit(Tiles(64 if bm < 64 else 128, 64, 4, 3, 4), bm, 2, device)
    if not device.hopper:
        return fit(Tiles(128, 64, 8, 3, 8), bm, 2, device)
    return fit(Tiles(256, 64, 8, 3, 8, desc=True, rows_desc=True, persistent=True, flatten=True, store=2), bm, 2, device)


def fit(t: Tiles, bm: int, item: int, device: Device) -> Tiles:
    """The tiles reduced until they are within the device's shared memory."""
    return within(t, bm, 1, item, device.shared)


def blocks(n: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a block of a kernel that only moves rows of n elements."""
    bn = min(max(power_of_two(n), 16), elements, 1024)
    return min(elements // bn, 32), bn


def whole(item: int, *sizes: int) -> bool:
    """Whether rows of these sizes are whole 16 bytes."""
    return math.gcd(*sizes) * item % 16 == 0


def aligned_rows(t: Tensor) -> bool:
    """Whether a descriptor can show the rows of t [S, N]."""
    return t.stride(1) == 1 and t.stride(0) * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0


def bins(experts: int) -> int:
    return max(power_of_two(experts + 1), 16)


# Operands -----------------------------------------------------------------------------------------------------------------------------


class Weight(NamedTuple):
    """One list as a kernel takes it: the stacked tensor or the table of addresses, and the strides (expert, out, in) or (expert, out).

    ``tensors``: the list itself, if the kernel only reads it.
    """

    pointer: Tensor
    operand: Operand
    tensors: Lists = ()

    @property
    def strides(self) -> tuple[int, ...]:
        return self.operand.strides

    def transposed(self) -> Weight:
        """The weight of the product with its transpose: (expert, in, out)."""
        e, n, k = self.operand.strides
        return Weight(self.pointer, self.operand._replace(strides=(e, k, n)), self.tensors)


def weight(tensors: Lists, dims: int = 2) -> Weight:
    """A list of weights (dims 2) or vectors (1). Tensors that differ in their strides are stacked first: no single form reads them."""
    operand = describe(tensors, dims)
    if not operand.uniform:
        tensors = [torch.stack(list(tensors))]
        operand = describe(tensors, dims)
    return Weight(address_table(tensors) if operand.table else tensors[0], operand, tensors)


# Routing ------------------------------------------------------------------------------------------------------------------------------


class Sorted(NamedTuple):
    """The sorted rows of one call, with the list of tiles that its products share.

    Attributes:
        order: [S] int64; a tensor that is not read where no row is gathered.
        offsets: [E + 1] int64.
        tiles: [2, max_tiles] int32, then their number.
    """

    order: Tensor
    offsets: Tensor
    slots: int
    experts: int
    top_k: int
    bm: int = 0
    tiles: Tensor | None = None
    max_tiles: int = 0

    @property
    def mean_rows(self) -> float:
        return self.slots / self.experts


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [S], offsets [E + 1]), int64."""
    slots, device = ids.numel(), ids.device
    order = torch.empty(slots, dtype=torch.int64, device=device)
    if not slots:
        return order, torch.zeros(experts + 1, dtype=torch.int64, device=device)
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=device)
    max_tiles, be, flat = min(slots, experts), max(power_of_two(experts + 1), 32), ids.stride() == (ids.shape[1], 1)
    unused = torch.empty(2 * max_tiles + 1, dtype=torch.int32, device=device)
    by: dict[str, Any] = {
        "at_ids": Rows(*ids.stride()),
        "S": slots,
        "E": experts,
        "top_k": ids.shape[1],
        "FLAT": flat,
        "BE": be,
        "PDL": False,
    }
    lists: dict[str, Any] = {"max_tiles": max_tiles, "INVERSE": False, "BM": _ONE_TILE}
    arrays = {"ids": ids, "order": order, "position": order, "offsets": offsets, "tiles": unused, "num_tiles": unused[2 * max_tiles :]}
    if slots <= SORT_AT_ONCE:
        warps, bs = 4 if slots <= 1024 else 8, max(power_of_two(slots), 128)
        launch(routing.sort_once, (experts + 1,), arrays, warps=warps, BS=bs, **by, **lists)
        return order, offsets
    chunks, cols = -(-slots // CHUNK), 8
    sums = {name: torch.empty(n, dtype=torch.int32, device=device) for name, n in (("counts", chunks * be), ("totals", be))}
    launch(routing.count_chunks, (chunks,), {"ids": ids, "counts": sums["counts"]}, BS=CHUNK, **by)
    launch(routing.scan_chunks, (be // cols,), sums, C=chunks, BC=128, BE=be, COLS=cols, PDL=False)
    launch(routing.place_chunks, (chunks,), arrays | sums, BS=CHUNK, **by, **lists)
    return order, offsets


def tiled(it: Sorted, dtype: torch.dtype) -> Sorted:
    """The same rows with their tiles for products in ``dtype``."""
    bm = tile_rows(it.slots, it.experts, dtype)
    max_tiles = min(it.slots, it.slots // bm + min(it.experts, it.slots))
    tiles = torch.empty(2 * max_tiles + 1, dtype=torch.int32, device=it.offsets.device)
    arrays = {"offsets": it.offsets, "tiles": tiles, "num_tiles": tiles[2 * max_tiles :]}
    launch(rows.list_tiles, (it.experts,), arrays, max_tiles=max_tiles, E=it.experts, BE=bins(it.experts), BM=bm)
    return it._replace(bm=bm, tiles=tiles, max_tiles=max_tiles)


def inverse(it: Sorted) -> Tensor:
    """position [S] int32: the row of each slot."""
    position = torch.empty(it.slots, dtype=torch.int32, device=it.order.device)
    launch(rows.invert, (-(-it.slots // 1024),), {"order": it.order, "position": position}, S=it.slots, BR=1024)
    return position


# Rows ---------------------------------------------------------------------------------------------------------------------------------


def gather(out: Tensor, x: Tensor, it: Sorted) -> None:
    """out [S, N] = the token of each row."""
    br, bn = blocks(out.shape[1])
    grid = (-(-it.slots // br), -(-out.shape[1] // bn))
    arrays = {"x": x, "order": it.order, "out": out}
    launch(rows.gather_rows, grid, arrays, S=it.slots, top_k=it.top_k, N=out.shape[1], at_x=Rows(*x.stride()), BR=br, BN=bn)


def clear_dead(out: Tensor, it: Sorted) -> None:
    """Zeros in the dead rows of out. Few programs: mostly there is nothing to do."""
    s, n = out.shape
    arrays, bn = {"out": out, "offsets": it.offsets}, min(max(power_of_two(n), 16), 64)
    launch(rows.clear_dead, (-(-s // 64),), arrays, S=s, E=it.experts, N=n, stride_or=out.stride(0), BR=64, BN=bn)


def rows_of(t: Tensor | None) -> Rows:
    """Strides of a matrix, of none zeros."""
    return Rows(0, 0) if t is None else Rows(*t.stride())


def sum_slots(out: Tensor, y: Tensor, it: Sorted, weights: Tensor | None) -> None:
    """out [T, N] = the (weighted) sum over the slots of each token of its rows in y."""
    n = out.shape[1]
    bn = min(power_of_two(n), 1024)
    launch(
        rows.sum_rows,
        (out.shape[0], -(-n // bn)),
        {"y": y, "position": inverse(it), "offsets": it.offsets, "weights": y if weights is None else weights, "out": out},
        top_k=it.top_k,
        E=it.experts,
        N=n,
        at_y=Rows(*y.stride()),
        at_weights=rows_of(weights),
        SCALE=weights is not None,
        BN=bn,
        KNOWN=it.top_k if it.top_k <= UNROLLED else 0,
    )


# Products -----------------------------------------------------------------------------------------------------------------------------


def linear(
    out: Tensor,
    x: Tensor,
    w: Weight,
    it: Sorted,
    *,
    bias: Weight | None = None,
    tokens: bool = False,
    scale: Tensor | None = None,
    add: bool = False,
) -> None:
    """out [S, N] = rows [S, K] times w[e]^T (+ bias[e]); out has contiguous rows. ``tokens``: x is [T, K], read through the order.

    ``scale`` [T, K]: each token times its routing weight. ``add``: to what out holds. Dead rows are not written.
    """
    assert it.tiles is not None
    (_, n), k, item = out.shape, x.shape[1], x.element_size()
    device = device_of(x.device)
    part = linear_sizes(it.bm, whole(item, n, k), x.dtype, device)
    form = w.operand.form(item) if part.desc and k else ""
    if form == "in-out" and k % part.bk:
        form = ""  # a block would reach into the next expert
    by_desc = part.rows_desc and not tokens and k > 0 and aligned_rows(x)
    store = part.store if out.is_contiguous() and not add and whole(item, n) and out.data_ptr() % 16 == 0 else 0
    pointer, steps = steps_table(w.tensors) if is_apart(form) else (w.pointer, w.pointer)
    count = it.max_tiles * -(-n // part.bn)
    wide = w.operand.wide or abs(x.stride(1)) * k >= 1 << 31
    table = bias is not None and bias.operand.table
    even, walk = (n % part.bn == 0, k % part.bk == 0), (part.persistent, part.flatten)
    launch(
        grouped.linear_tiles,
        (min(device.sms * part.per_sm, count) if part.persistent else count,),
        {
            "x": x,
            "x_desc": Described(x, (it.slots, k), (x.stride(0), 1), (it.bm, part.bk)) if by_desc else x,
            "w": Described(pointer, *w.operand.matrix(form, it.experts, n, k, part.bn, part.bk, item)) if form else pointer,
            "b": pointer if bias is None else bias.pointer,
            "weights": x if scale is None else scale,
            "order": it.order,
            "out": out,
            "out_desc": Described(out, *rows_descriptor(n, it.bm, part.bn // store)) if store else out,
            "offsets": it.offsets,
            "tiles": it.tiles,
            "num_tiles": it.tiles[2 * it.max_tiles :],
            "steps": steps,
        },
        warps=part.warps,
        stages=part.stages,
        max_tiles=it.max_tiles,
        top_k=it.top_k,
        K=k,
        N=n,
        at_x=Rows(*x.stride()),
        at_weights=rows_of(scale),
        at_w=w.operand.at(None if bias is None else bias.operand, form),
        stride_or=out.stride(0),
        GATHER=tokens,
        SCALE=scale is not None,
        ADD=add,
        stored=Stored(w.operand.table, w.operand.aligned, wide, bias is not None, BIAS_TABLE=table, DESC=form),
        tiling=Tiling(it.bm, part.bn, part.bk, part.group, *even, precision_of(x.dtype), False, by_desc, False, *walk, store),
    )


def pair(
    it: Sorted,
    tokens: Tensor,
    ys: Tensor,
    weights: Tensor | None,
    *,
    out: Tensor | None,
    d_weights: Tensor | None,
    from_rows: bool = False,
    scaled: bool = True,
) -> None:
    """``backward.pair_rows``: what is not None of out [S, N] and d_weights [T, K] is written."""
    n = ys.shape[1]
    br, bn = blocks(n, 1024)
    scale = weights if scaled else None
    launch(
        backward.pair_rows,
        (-(-it.slots // br),),
        {
            "tokens": tokens, "rows": ys, "weights": ys if scale is None else scale, "order": it.order, "offsets": it.offsets,
            "out": ys if out is None else out, "d_weights": ys if d_weights is None else d_weights,
        },
        S=it.slots,
        top_k=it.top_k,
        E=it.experts,
        N=n,
        at_tokens=Rows(*tokens.stride()),
        at_rows=Rows(*ys.stride()),
        at_weights=rows_of(scale),
        FROM_ROWS=from_rows,
        SCALE=scale is not None,
        WANT_OUT=out is not None,
        WANT_WEIGHTS=d_weights is not None,
        BR=br,
        BN=bn,
    )  # fmt: skip


# The activation -----------------------------------------------------------------------------------------------------------------------


class Activation(NamedTuple):
    """The activation of one kind of expert, and where gate and up are in a row of the pre-activation [S, width]."""

    body: Body
    inter: int

    @property
    def halves(self) -> Halves:
        """What the kernels of ``backward.py`` take of it."""
        body = self.body
        second, step = (1, 2) if body.gating == "interleaved" else (self.inter, 1)
        gate, up = (second, 0) if body.up_first else (0, second)
        plain = body.gating == "plain"
        return Halves(gate, 0 if plain else up, step, plain, body.activation, *body.pair)


def activate(a: Tensor, h: Tensor, it: Sorted, how: Activation) -> None:
    """a [S, I] from h [S, width]."""
    br, bn = blocks(how.inter)
    grid = (-(-it.slots // br), -(-how.inter // bn))
    arrays, sizes = {"h": h, "offsets": it.offsets, "a": a}, {"S": it.slots, "E": it.experts, "I": how.inter}
    launch(backward.activate, grid, arrays, **sizes, stride_hr=h.stride(0), halves=how.halves, BR=br, BN=bn)


def activate_grads(
    it: Sorted,
    h: Tensor,
    d_a: Tensor | None,
    how: Activation,
    *,
    scale: Tensor | None,
    d_h: Tensor | None,
    a: Tensor | None,
    d_weights: Tensor | None,
    grad: Tensor,
    bias: Weight | None,
) -> None:
    """``backward.activate_grads``: what is not None of d_h, a and d_weights is written. ``bias``: of the second projection."""
    br, bn = blocks(how.inter, 1024 if whole(h.element_size(), how.inter) else 512)
    launch(
        backward.activate_grads,
        (-(-it.slots // br),),
        {
            "h": h, "d_a": h if d_a is None else d_a, "grad": grad, "b": h if bias is None else bias.pointer,
            "weights": h if scale is None else scale, "order": it.order, "offsets": it.offsets, "d_h": h if d_h is None else d_h,
            "a": h if a is None else a, "d_weights": h if d_weights is None else d_weights,
        },
        S=it.slots,
        top_k=it.top_k,
        E=it.experts,
        I=how.inter,
        N=grad.shape[1],
        stride_hr=h.stride(0),
        at_grad=Rows(*grad.stride()),
        at_b=Rows(*((0, 0) if bias is None else bias.strides)),
        at_weights=rows_of(scale),
        halves=how.halves,
        SCALE=scale is not None,
        want=Wanted(d_h is not None, a is not None, d_weights is not None),
        bias=(bias is not None, bias is not None and bias.operand.table),
        BE=bins(it.experts),
        BR=br,
        BN=bn,
    )  # fmt: skip
