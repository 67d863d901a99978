"""Launches of the kernels that move rows through symmetric memory: one program for each row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device import symm
from moefuse.kernels.triton.problem import power_of_two
from moefuse.ops.reference import accumulation_dtype

if TYPE_CHECKING:
    from moefuse.runtime.groups import Group
    from moefuse.runtime.transports.symm import Buffers

_BLOCK = 2048
"""Elements that a program has in flight."""


def put_tokens(
    held: Buffers, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int, spans: Sequence[int], most: int, world: int
) -> Tensor:
    """Own rows [T, F] and ids [T, K] into the buffer; returns the ranks that have an expert of each token, [T]."""
    x, w = _pair(rows)
    to = torch.empty(ids.shape[0], dtype=torch.int64, device=ids.device)
    symm.put_tokens[(most,)](
        x, w, ids, _table(place, ids), held.memory, held.turn, to, ids.shape[0], most, _experts(place), max(slots, 1),
        held.set_bytes, spans[1] if len(rows) > 1 else 0, spans[-1], ids.shape[1],
        TABLE=place is not None, WEIGHTS=len(rows) > 1, **_blocks(x, w, ids), WORLD=world, num_warps=4,
    )  # fmt: skip
    for i in range(2, len(rows)):
        put_rows(held, rows[i], None, spans[i], most, 0)
    return to


def pull_tokens(
    held: Buffers, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int, spans: Sequence[int], most: int, group: Group
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows [P * M, F] of all ranks that this one needs, their ids of local experts [P * M, K], and which they are, [P * M]."""
    x, w = _pair(rows)
    count = group.size * most
    every = [one.new_empty((count, *one.shape[1:])) for one in rows]
    local = torch.empty((count, ids.shape[1]), dtype=torch.promote_types(ids.dtype, torch.int32), device=ids.device)
    took = torch.empty(count, dtype=torch.int32, device=ids.device)
    symm.pull_tokens[(count,)](
        x, w, ids, held.bases, _table(place, ids), held.turn, _bits(every[0]), _bits(every[min(1, len(rows) - 1)]), local, took,
        ids.shape[0], most, _experts(place), max(slots, 1), group.rank, held.set_bytes, spans[1] if len(rows) > 1 else 0, spans[-1],
        ids.shape[1], TABLE=place is not None, WEIGHTS=len(rows) > 1, **_blocks(x, w, ids), num_warps=4,
    )  # fmt: skip
    for i in range(2, len(rows)):
        every[i] = pull_rows(held, rows[i], took, spans[i], most, group)
    return every, local, took


def put_rows(held: Buffers, rows: Tensor, took: Tensor | None, at: int, most: int, rank: int) -> None:
    """Rows [N, F] into the buffer; with ``took`` [P * M] those of N = P * M that others want."""
    flat = _bits(rows)
    symm.put_rows[(max(flat.shape[0], 1),)](
        flat, held.turn if took is None else took, held.memory, held.turn, flat.shape[0], most, rank, held.set_bytes, at,
        SOME=took is not None, F=flat.shape[1], B=_block(flat), num_warps=4,
    )  # fmt: skip


def pull_rows(held: Buffers, own: Tensor, took: Tensor, at: int, most: int, group: Group) -> Tensor:
    """[P * M, F] of all ranks, zeros where ``took`` [P * M] is not set."""
    out = own.new_empty((group.size * most, *own.shape[1:]))
    symm.pull_rows[(out.shape[0],)](
        _bits(own), held.bases, took, held.turn, _bits(out), own.shape[0], most, group.rank, held.set_bytes, at,
        F=out.shape[1], B=_block(out), num_warps=4,
    )  # fmt: skip
    return out


def pull_sums(held: Buffers, own: Tensor, to: Tensor, at: int, most: int, group: Group) -> Tensor:
    """[T, F]: the sum of what the ranks in ``to`` [T] have for each token, in their order; this one's is in ``own`` [P * M, F]."""
    out = own.new_empty((to.shape[0], *own.shape[1:]))
    wide: Any = tl.float64 if accumulation_dtype(own.dtype) == torch.float64 else tl.float32
    symm.pull_sums[(max(to.shape[0], 1),)](
        own, held.bases, to, held.turn, out, most, group.rank, to.shape[0], held.set_bytes, at,
        WORLD=group.size, WIDE=wide, F=out.shape[1], B=_block(out), num_warps=4,
    )  # fmt: skip
    return out


def _pair(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x = _bits(rows[0])
    return x, _bits(rows[1]) if len(rows) > 1 else x


def _table(place: Tensor | None, ids: Tensor) -> Tensor:
    return ids if place is None else place


def _experts(place: Tensor | None) -> int:
    return 0 if place is None else place.shape[0]


def _blocks(x: Tensor, w: Tensor, ids: Tensor) -> dict[str, int]:
    return {"FX": x.shape[1], "FW": w.shape[1], "BX": _block(x), "BW": _block(w), "BK": power_of_two(ids.shape[1])}


def _bits(rows: Tensor) -> Tensor:
    """What is moved: eight-bit floats as bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _block(rows: Tensor) -> int:
    return min(power_of_two(rows.shape[1]), _BLOCK)
