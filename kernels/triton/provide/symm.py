"""Launches of the kernels that move rows through symmetric memory: one program for each row and rank.

P ranks, M the most rows of any. A transfer pushes, comes to a barrier, and takes; the three parts have names of their own for tests in
which ranks share one process.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from moefuse.kernels.triton.device import symm
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.launch.calls import launch
from moefuse.kernels.triton.launch.launch import INTERPRETED
from moefuse.kernels.triton.launch.record import as_value
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.runtime.ranks import numbers_dtype
from moefuse.tuning.problem import power_of_two

_BLOCK = 2048
"""Elements that a program has in flight."""
_SUMS = 1024
"""As many of every rank."""
AT_CAME = 3 * 64 * 4
"""Bytes behind the flags, of their last row."""
PIECES = 8
"""Of what a rank sends beside, at most: each has a place in that row."""
PROGRAMS = 4
"""On each multiprocessor, of what sends beside other work: enough for the link, and most of the room is left."""


@dataclass(frozen=True, eq=False)
class Transfer:
    """One kind of transfer: P ranks of which this is one, and where rows are in its sets. One object for each kind (:meth:`of`).

    Attributes:
        set_bytes: of a set; behind two of them come other things, the flags at ``at_flags``.
        most: M, the most rows of any rank.
        spans: where each of the rows begins in a set, in bytes, and the end.
        patience: nanoseconds that a rank waits for the others.
    """

    size: int
    rank: int
    set_bytes: int
    at_flags: int
    most: int
    spans: tuple[int, ...]
    patience: int

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(size: int, rank: int, set_bytes: int, at_flags: int, most: int, spans: tuple[int, ...], patience: int) -> Transfer:
        """The one that was made for an earlier call, if there is one: records of calls are looked up by it."""
        return Transfer(size, rank, set_bytes, at_flags, most, spans, patience)

    @property
    def others(self) -> int:
        """Rows of the other ranks."""
        return (self.size - 1) * self.most


class Shared(NamedTuple):
    """What a rank's kernels know of memory that ranks share: see ``moefuse/kernels/triton/device/symm.py``."""

    bases: Tensor
    turn: Tensor
    flags: Tensor

    @staticmethod
    def lasting(bases: Tensor, turn: Tensor, flags: Tensor) -> Shared:
        """Of memory that stays: records of calls know it, until they are forgotten."""
        found: Shared = as_value(lambda _: Shared(bases, turn, flags), ())
        return found


Came = tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]
"""What :func:`dispatch` returns."""


@recorded
def dispatch(rows: tuple[Tensor, ...], ids: Tensor, place: Tensor | None, slots: int, at: Shared, how: Transfer) -> Came:
    """Own rows [T, F] and the numbers of their experts to the ranks that have one of these, and what comes from the others.

    Returns:
        Rows [P * M, F] each, ids [P * M, K] of local experts, [P * M] which rows this rank needs; and [T] the ranks that have an expert of
        each token.
    """
    came = push_tokens(rows, ids, place, slots, at, how)
    take_tokens(*came[:3], at, how, met(how.others, at, how))
    return came


@recorded
def send(rows: tuple[Tensor, ...], took: Tensor, to: Tensor, at: Shared, how: Transfer, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Own rows [T, F] each, times ``scale``, to the ranks in ``to`` [T]; [P * M, F] each of what came, zeros where ``took`` [P * M] is not
    set."""
    every = push_rows(rows, to, at, how, scale)
    take_rows(every, took, at, how, met(how.others, at, how))
    return every


@recorded
def give_back(rows: tuple[Tensor, ...], took: Tensor, to: Tensor, at: Shared, how: Transfer, scale: float = 1.0) -> tuple[Tensor, ...]:
    """Rows [P * M, F] each that this rank has for those that it ``took``, to their ranks; [T, F] each, summed over ranks in their order,
    times ``scale``."""
    push_back(rows, took, at, how)
    return take_sums(rows, to, at, how, scale, met(to.shape[0], at, how))


def landing(rows: tuple[Tensor, ...], ids: Tensor, how: Transfer) -> Came:
    """Where a dispatch puts what comes."""
    count = how.size * how.most
    every = tuple([one.new_empty((count, *one.shape[1:])) for one in rows])
    local = torch.empty((count, ids.shape[1]), dtype=numbers_dtype(ids.dtype), device=ids.device)
    took = torch.empty(count, dtype=torch.int32, device=ids.device)
    return every, local, took, torch.empty(ids.shape[0], dtype=torch.int64, device=ids.device)


def push_tokens(
    rows: tuple[Tensor, ...], ids: Tensor, place: Tensor | None, slots: int, at: Shared, how: Transfer, into: Came | None = None
) -> Came:
    """The first part of :func:`dispatch`: its results, with this rank's own rows in them; ``into`` what :func:`landing` gave."""
    count = how.size * how.most
    every, local, took, to = into or landing(rows, ids, how)
    (x, w), (out_x, out_w) = _pair(rows), _pair(every)
    arrays = {"x": x, "w": w, "ids": ids, "place": ids if place is None else place, "bases": at.bases, "turn": at.turn}
    launch(
        symm.push_tokens, (count,), {**arrays, "out_x": out_x, "out_w": out_w, "local": local, "took": took, "to": to},
        T=ids.shape[0], M=how.most, E=0 if place is None else place.shape[0], slots=max(slots, 1), rank=how.rank, K=ids.shape[1],
        TABLE=place is not None, WORLD=how.size, **_two(x, w, rows, how), **_blocks(x, w, ids),
    )  # fmt: skip
    for own, out, start in zip(rows[2:], every[2:], how.spans[2:], strict=False):
        _push(own, to, out, start, at, how, 1.0)
    return every, local, took, to


def take_tokens(every: tuple[Tensor, ...], local: Tensor, took: Tensor, at: Shared, how: Transfer, after: bool = True) -> None:
    """The last part of :func:`dispatch`, into its results; ``after`` the barrier, or with it."""
    if not how.others:
        return
    x, w = _pair(every)
    launch(
        symm.take_tokens, _programs(how.others), {**at._asdict(), "x": x, "w": w, "local": local, "took": took},
        N=how.others, K=local.shape[1], **_two(x, w, every, how), **_blocks(x, w, local), **_meeting(how, after),
    )  # fmt: skip
    for out, start in zip(every[2:], how.spans[2:], strict=False):
        _take(out, took, start, at, how, True)


def push_rows(rows: tuple[Tensor, ...], to: Tensor, at: Shared, how: Transfer, scale: float = 1.0) -> tuple[Tensor, ...]:
    """The first part of :func:`send`: its results, with this rank's own rows in them."""
    every = tuple([one.new_empty((how.size * how.most, *one.shape[1:])) for one in rows])
    for own, out, start in zip(rows, every, how.spans, strict=False):
        _push(own, to, out, start, at, how, scale)
    return every


def push_beside(rows: Tensor, to: Tensor, at: Shared, how: Transfer) -> None:
    """Rows [T, F] to the other ranks in ``to`` [T], by few programs."""
    count = rows.shape[0] * (how.size - 1)
    if count:
        launch(
            symm.push_beside, (min(count, PROGRAMS * device_of(rows.device).sms),), {"rows": rows, "bases": at.bases, "to": to},
            T=rows.shape[0], N=count, first=how.rank * how.most, rank=how.rank, at=how.spans[0], F=rows.shape[1], B=_block(rows),
        )  # fmt: skip
    if how.others:
        launch(
            symm.tell, (1,), {"bases": at.bases}, warps=1,
            rank=how.rank, at_came=how.at_flags + AT_CAME, EACH=PIECES, WORLD=how.size, BW=power_of_two(how.size),
        )  # fmt: skip


def wait_for(at: Shared, how: Transfer, rank: int, piece: int) -> None:
    """A piece of what another rank sends beside has come."""
    place = rank * PIECES + piece
    launch(symm.wait_for, (1,), {"came": at.flags[3, place : place + 1]}, warps=1, patience=how.patience, TIMED=_TIMED)


def take_rows(every: tuple[Tensor, ...], took: Tensor, at: Shared, how: Transfer, after: bool = True) -> None:
    """The last part of :func:`send`, into its results."""
    for i, (out, start) in enumerate(zip(every, how.spans, strict=False)):
        _take(out, took, start, at, how, after or i > 0)


def push_back(rows: tuple[Tensor, ...], took: Tensor, at: Shared, how: Transfer) -> None:
    """The first part of :func:`give_back`."""
    for part, start in zip(rows if how.others else (), how.spans, strict=False):
        flat = _bits(part)
        launch(
            symm.push_back, (how.others,), {"rows": flat, "bases": at.bases, "took": took, "turn": at.turn},
            M=how.most, rank=how.rank, set_bytes=how.set_bytes, at=start, F=flat.shape[1], B=_block(flat),
        )  # fmt: skip


def take_sums(
    own: tuple[Tensor, ...], to: Tensor, at: Shared, how: Transfer, scale: float = 1.0, after: bool = True, apart: bool = False,
    outs: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """The last part of :func:`give_back`, into ``outs`` if there are any; ``apart``: ``own`` are [T, F], of this rank's rows alone."""
    outs = outs or sums_of(own, to)
    for i, (part, out, start) in enumerate(zip(own, outs, how.spans, strict=False)):
        wide: Any = tl.float64 if accumulation_dtype(part.dtype) == torch.float64 else tl.float32
        launch(
            symm.take_sums, _programs(to.shape[0]), {**at._asdict(), "own": part, "to": to, "out": out},
            T=to.shape[0], scale=scale, set_bytes=how.set_bytes, at=start, WIDE=wide, F=out.shape[1], B=min(_block(out), _SUMS),
            APART=apart, **_meeting(how, after or i > 0),
        )  # fmt: skip
    return tuple(outs)


def sums_of(own: tuple[Tensor, ...], to: Tensor) -> list[Tensor]:
    """What :func:`take_sums` writes to."""
    return [part.new_empty((to.shape[0], *part.shape[1:])) for part in own]


def met(rows: int, at: Shared, how: Transfer) -> bool:
    """No rank goes on before all have pushed: True if there is a barrier now; False if whoever takes so few rows is to come to it."""
    if not how.others:
        return True
    if rows <= _FEW:
        return False
    _barrier(symm.barrier, at, how)
    return True


def passed(at: Shared, how: Transfer) -> None:
    """No rank goes on before all have come here: a transfer that neither kernels of a push nor of a take have counted."""
    if how.others:
        _barrier(symm.barrier_of_its_own, at, how)


def _barrier(kernel: Any, at: Shared, how: Transfer) -> None:
    meeting = _meeting(how, False)
    launch(kernel, (1,), at._asdict(), warps=1, BW=meeting.pop("BP"), **{n: meeting[n] for n in meeting if n != "WAITS"})


def _meeting(how: Transfer, after: bool) -> dict[str, Any]:
    """What a kernel has to know that may come to the barrier."""
    ranks = {"M": how.most, "rank": how.rank, "WORLD": how.size, "BP": power_of_two(how.size)}
    return {**ranks, "at_flags": how.at_flags, "patience": how.patience, "WAITS": not after, "TIMED": _TIMED}


_FEW = 1024
_WAITING = 256
"""Rows that are taken by at most so many programs, which leave room on the device for what other ranks may be waiting for."""


def _programs(rows: int) -> tuple[int]:
    return (min(max(rows, 1), _WAITING) if rows <= _FEW else rows,)


_TIMED = torch.version.hip is None and not INTERPRETED
"""AMD's devices have no such clock in Triton."""


def _push(own: Tensor, to: Tensor, out: Tensor, start: int, at: Shared, how: Transfer, scale: float) -> None:
    flat = _bits(own)
    launch(
        symm.push_rows, (how.size * how.most,), {"rows": flat, "bases": at.bases, "to": to, "turn": at.turn, "out": _bits(out)},
        T=own.shape[0], M=how.most, rank=how.rank, scale=scale, set_bytes=how.set_bytes, at=start, F=flat.shape[1], B=_block(flat),
        WORLD=how.size, SCALED=scale != 1,
    )  # fmt: skip


def _take(out: Tensor, took: Tensor, start: int, at: Shared, how: Transfer, after: bool) -> None:
    if not how.others:
        return
    flat = _bits(out)
    launch(
        symm.take_rows, _programs(how.others), {**at._asdict(), "took": took, "out": flat},
        N=how.others, set_bytes=how.set_bytes, at=start, F=flat.shape[1], B=_block(flat), **_meeting(how, after),
    )  # fmt: skip


def _pair(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    x = _bits(rows[0])
    return x, _bits(rows[1]) if len(rows) > 1 else x


def _two(x: Tensor, w: Tensor, rows: Sequence[Tensor], how: Transfer) -> dict[str, Any]:
    two = len(rows) > 1
    at = {"set_bytes": how.set_bytes, "at_w": how.spans[1] if two else 0, "at_ids": how.spans[-1]}
    return {**at, "WEIGHTS": two, "FX": x.shape[1], "FW": w.shape[1]}


def _blocks(x: Tensor, w: Tensor, ids: Tensor) -> dict[str, Any]:
    return {"BX": _block(x), "BW": _block(w), "BK": power_of_two(ids.shape[1])}


def _bits(rows: Tensor) -> Tensor:
    """What is moved: eight-bit floats as bytes."""
    return rows.view(torch.uint8) if rows.element_size() == 1 else rows


def _block(rows: Tensor) -> int:
    return min(power_of_two(rows.shape[1]), _BLOCK)
