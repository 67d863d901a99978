"""Sorted rows of the grouped tier and of training: the sort, its tiles, and kernels that only move rows; tensors in, nothing returned.

Grids and buffers follow from shapes alone, as in ``plan.py``. There are no plans: what is kept are launches (``launch/calls.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.config import within
from moefuse.kernels.triton.device import combine, routing, rows as moving
from moefuse.kernels.triton.device.structs import Rows
from moefuse.kernels.triton.host.layout import CHUNK, SORT_AT_ONCE, TILE_FIELDS, UNROLLED, Device, device_of, starts_early
from moefuse.kernels.triton.launch.calls import launch
from moefuse.tuning.problem import Tiles, power_of_two

Lists = Sequence[Tensor]

COPIED = 256
"""Bytes of a row that a program copies, of 16 rows or more: 1.3 times as quick as whole rows at 16384 tokens, 1.00 to 1.07 at fewer."""
_ONE_TILE = 1 << 30
"""Rows of a tile where the tiles of the sort are not used."""


def tile_rows(slots: int, experts: int, dtype: torch.dtype, device: Device) -> int:
    """Rows of a tile: somewhat more than an expert gets on average, so that most experts need one tile fewer."""
    if dtype == torch.float64:
        return 16
    hit = max(experts * (1.0 - (1.0 - 1.0 / experts) ** slots), 1.0)
    most = 64 if dtype == torch.float32 and not device.hopper else 128
    return min(max(power_of_two(1.3 * slots / hit), 16), most)


def fit(t: Tiles, bm: int, item: int, device: Device, held: int = 0) -> Tiles:
    """The tiles reduced until they are within the device's shared memory; ``held`` as of ``config.tile_bytes``."""
    return within(t, bm, 1, item, device.shared, held)


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


class Sorted(NamedTuple):
    """The sorted rows of one call, with the list of tiles that its products share.

    Attributes:
        order: [S] int64; a tensor that is not read where no row is gathered.
        offsets: [E + 1] int64.
        tiles: [TILE_FIELDS, max_tiles] int32; num_tiles: [3] int32 (``device/routing.py``).
    """

    order: Tensor
    offsets: Tensor
    slots: int
    experts: int
    top_k: int
    bm: int = 0
    tiles: Tensor | None = None
    num_tiles: Tensor | None = None
    max_tiles: int = 0

    @property
    def mean_rows(self) -> float:
        return self.slots / self.experts


def sort(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(order [S], offsets [E + 1]), int64."""
    slots = ids.numel()
    order = torch.empty(slots, dtype=torch.int64, device=ids.device)
    if not slots:
        return order, torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    it = _listed(order, slots, experts, ids.shape[1], _ONE_TILE)
    _sort(ids, it, order)
    return order, it.offsets


def sort_with_tiles(ids: Tensor, experts: int, rows: int) -> tuple[Sorted, Tensor]:
    """The rows with tiles of so many, and the row [S] of each slot, int32; there are slots."""
    order, position = (torch.empty(ids.numel(), dtype=kind, device=ids.device) for kind in (torch.int64, torch.int32))
    it = _listed(order, ids.numel(), experts, ids.shape[1], rows)
    _sort(ids, it, position)
    return it, position


def _listed(order: Tensor, slots: int, experts: int, top_k: int, rows: int) -> Sorted:
    """Rows whose offsets and tiles are to be written."""
    max_tiles = min(slots, slots // rows + min(experts, slots))
    offsets = torch.empty(experts + 1, dtype=torch.int64, device=order.device)
    tiles, number = (torch.empty(n, dtype=torch.int32, device=order.device) for n in (TILE_FIELDS * max_tiles, 3))
    return Sorted(order, offsets, slots, experts, top_k, rows, tiles, number, max_tiles)


def _sort(ids: Tensor, it: Sorted, position: Tensor) -> None:
    """Write order, offsets and tiles, and the rows of slots where these have a tensor of their own."""
    assert it.tiles is not None
    assert it.num_tiles is not None
    slots, experts, device = it.slots, it.experts, ids.device
    be, flat = max(power_of_two(experts + 1), 32), ids.stride() == (ids.shape[1], 1)
    by: dict[str, Any] = {
        "at_ids": Rows(*ids.stride()),
        "S": slots,
        "E": experts,
        "top_k": ids.shape[1],
        "FLAT": flat,
        "BE": be,
        "PDL": False,
    }
    lists: dict[str, Any] = {"max_tiles": it.max_tiles, "INVERSE": position is not it.order, "BM": it.bm}
    arrays = {
        "ids": ids, "order": it.order, "position": position, "offsets": it.offsets, "tiles": it.tiles, "num_tiles": it.num_tiles,
    }  # fmt: skip
    if slots <= SORT_AT_ONCE:
        warps, bs = 4 if slots <= 1024 else 8, max(power_of_two(slots), 128)
        launch(routing.sort_once, (experts + 1,), arrays, warps=warps, BS=bs, **by, **lists)
        return
    chunks, cols = -(-slots // CHUNK), 8
    sums = {name: torch.empty(n, dtype=torch.int32, device=device) for name, n in (("counts", chunks * be), ("totals", be))}
    launch(routing.count_chunks, (chunks,), {"ids": ids, "counts": sums["counts"]}, BS=CHUNK, **by)
    launch(routing.scan_chunks, (be // cols,), sums, C=chunks, BC=128, BE=be, COLS=cols, PDL=False)
    launch(routing.place_chunks, (chunks,), arrays | sums, BS=CHUNK, **by, **lists)


def given(offsets: Tensor, slots: int, order: Tensor | None = None, top_k: int = 1) -> Sorted:
    """``slots`` rows that a caller has cut by offsets [E + 1] into those of each expert, and perhaps sorted: order [S]."""
    offsets = offsets.contiguous()
    return Sorted(offsets if order is None else order.contiguous(), offsets, slots, offsets.shape[0] - 1, top_k)


def tiled(it: Sorted, dtype: torch.dtype, rows: int | None = None) -> Sorted:
    """The same rows with their tiles for products in ``dtype``; ``rows``: of a tile."""
    bm = rows or tile_rows(it.slots, it.experts, dtype, device_of(it.offsets.device))
    max_tiles = min(it.slots, it.slots // bm + min(it.experts, it.slots))
    tiles, number = (torch.empty(n, dtype=torch.int32, device=it.offsets.device) for n in (TILE_FIELDS * max_tiles, 3))
    arrays = {"offsets": it.offsets, "tiles": tiles, "num_tiles": number}
    launch(moving.list_tiles, (it.experts,), arrays, max_tiles=max_tiles, E=it.experts, BE=bins(it.experts), BM=bm)
    return it._replace(bm=bm, tiles=tiles, num_tiles=number, max_tiles=max_tiles)


def inverse(it: Sorted) -> Tensor:
    """position [S] int32: the row of each slot."""
    position = torch.empty(it.slots, dtype=torch.int32, device=it.order.device)
    launch(moving.invert, (-(-it.slots // 1024),), {"order": it.order, "position": position}, S=it.slots, BR=1024)
    return position


def gather(out: Tensor, x: Tensor, it: Sorted, live: bool = False) -> None:
    """out [S, N] = the token of each row. All rows of some columns come one after the other: so much of the tokens stays in the L2.

    ``live``: dead rows are not written. Where tokens of P ranks have come, all but the P-th part are.
    """
    n = out.shape[1]
    bn = min(max(power_of_two(n), 16), COPIED // out.element_size())
    br = min(16 * COPIED // (bn * out.element_size()), 32)
    grid = (-(-it.slots // br), -(-n // bn))
    arrays = {"x": x, "order": it.order, "offsets": it.offsets, "out": out}
    numbers: dict[str, Any] = {"S": it.slots, "E": it.experts, "top_k": it.top_k, "N": n, "at_x": Rows(*x.stride())}
    launch(moving.gather_rows, grid, arrays, **numbers, LIVE=live, BR=br, BN=bn)


def spread(out: Tensor, x: Tensor, position: Tensor, it: Sorted, scale: Tensor | None = None) -> None:
    """The rows of out [S, N] that are those of some tokens x [T, N]: ``position`` [T * K] of their slots, or past the last live one.
    ``scale`` [T, K]: each token times its routing weight."""
    n, wide = x.shape[1], x.numel() >= 1 << 31
    block = min(power_of_two(n), 1024)
    if x.shape[0]:
        launch(
            routing.spread_rows, (x.shape[0], -(-n // block)),
            {"x": x, "weights": x if scale is None else scale, "position": position, "offsets": it.offsets, "xs": out},
            E=it.experts, H=n, top_k=it.top_k, at_x=Rows(*x.stride()), at_weights=rows_of(scale),
            SCALE=scale is not None, WIDE=wide, EVEN=n % block == 0, BLOCK=block, PDL=False,
        )  # fmt: skip


def clear_dead(out: Tensor, it: Sorted) -> None:
    """Zeros in the dead rows of out. Few programs: mostly there is nothing to do."""
    s, n = out.shape
    arrays, bn = {"out": out, "offsets": it.offsets}, min(max(power_of_two(n), 16), 64)
    launch(moving.clear_dead, (-(-s // 64),), arrays, S=s, E=it.experts, N=n, stride_or=out.stride(0), BR=64, BN=bn)


def rows_of(t: Tensor | None) -> Rows:
    """Strides of a matrix, of none zeros."""
    return Rows(0, 0) if t is None else Rows(*t.stride())


def sum_slots(out: Tensor, y: Tensor, it: Sorted, weights: Tensor | None, position: Tensor | None = None) -> None:
    """out [T, N] = the (weighted) sum over the slots of each token of its rows in y; ``position``: those rows, where they are known."""
    n = out.shape[1]
    bn = min(power_of_two(n), 1024)
    launch(
        moving.sum_rows,
        (out.shape[0], -(-n // bn)),
        {
            "y": y,
            "position": inverse(it) if position is None else position,
            "offsets": it.offsets,
            "weights": y if weights is None else weights,
            "out": out,
        },
        top_k=it.top_k,
        E=it.experts,
        N=n,
        at_y=Rows(*y.stride()),
        at_weights=rows_of(weights),
        SCALE=weights is not None,
        BN=bn,
        KNOWN=it.top_k if it.top_k <= UNROLLED else 0,
    )


def scaled(values: Tensor, scale: float) -> Tensor:
    """Contiguous values times a number that is none of the program's."""
    if scale == 1:
        return values
    out, n = torch.empty_like(values), values.numel()
    if n:
        launch(moving.scaled, (-(-n // 1024),), {"values": values, "out": out}, N=n, scale=scale, B=1024)
    return out


def send_slots(
    out: Tensor, y: Tensor, ids: Tensor, position: Tensor, weights: Tensor | None, it: Sorted, programs: int
) -> None:  # fmt: skip
    """:func:`sum_slots` of some tokens, to an ``out`` [T, N] that is far, by so many programs; nothing for a token without an expert.

    Args:
        ids: [T, K].
    """
    _combine(combine.send_sums, min(out.shape[0], programs), out, y, ids, position, weights, it, {"T": out.shape[0]})


def sum_beside(out: Tensor, y: Tensor, ids: Tensor, position: Tensor, weights: Tensor | None, it: Sorted) -> None:
    """:func:`sum_slots` of some tokens, as soon as all programs of :func:`send_slots` run."""
    pdl = starts_early(device_of(out.device))
    _combine(combine.combine_slots, out.shape[0], out, y, ids, position, weights, it, {"SORTED": True, "BESIDE": True}, pdl=pdl)


def _combine(
    kernel: Any, rows: int, out: Tensor, y: Tensor, ids: Tensor, position: Tensor, weights: Tensor | None, it: Sorted,
    numbers: dict[str, Any], pdl: bool = False,
) -> None:  # fmt: skip
    n, early = out.shape[1], starts_early(device_of(out.device))
    bn = min(power_of_two(n), 1024)
    if rows:
        launch(
            kernel, (rows, -(-n // bn)),
            {"y": y, "ids": ids, "weights": y if weights is None else weights, "position": position, "out": out},
            pdl=pdl, top_k=it.top_k, E=it.experts, N=n, at_ids=Rows(*ids.stride()), at_weights=rows_of(weights), SCALE=weights is not None,
            EVEN_N=n % bn == 0, BN=bn, KNOWN=it.top_k if it.top_k <= UNROLLED else 0, PDL=early, **numbers,
        )  # fmt: skip


def sum_given(out: Tensor, y: Tensor, ids: Tensor, weights: Tensor, experts: int) -> None:
    """out [T, N] = the weighted sum over the slots of each token of y [S, N], whose rows are in the order of slots."""
    n, top_k, pdl = out.shape[1], ids.shape[1], device_of(out.device).hopper
    bn = min(power_of_two(n), 1024)
    launch(
        combine.combine_slots,
        (out.shape[0], -(-n // bn)),
        {"y": y, "ids": ids, "weights": weights, "position": ids, "out": out},
        pdl=pdl,
        top_k=top_k,
        E=experts,
        N=n,
        at_ids=Rows(*ids.stride()),
        at_weights=Rows(*weights.stride()),
        SCALE=True,
        SORTED=False,
        BESIDE=False,
        EVEN_N=n % bn == 0,
        BN=bn,
        KNOWN=top_k if top_k <= UNROLLED else 0,
        PDL=pdl,
    )
