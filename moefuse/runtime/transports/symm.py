"""Rows through memory that GPUs of one host write for each other: two kernels and a barrier a way, nothing waits for the host.

For static numbers of tokens (``max_tokens``), so that buffers are sized before: they belong to a mesh and a device, come into being at
the first call outside of a CUDA graph, on all ranks alike, and stay where they are, since graphs know their addresses. A row goes to a
rank that has one of its experts, once; others' rows are zeros with ids -1. What the graph gets is a copy: no tensor of a program is in a
buffer.

The handle is ``took`` [P * M] and ``to`` [T] of ``moefuse/kernels/triton/device/symm.py``, which has the protocol. After
torch.distributed._symmetric_memory; the kernels of meta-pytorch/kraken and torchtitan's MinimalAsyncEP showed that Triton is fast enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.runtime import lasting, providers
from moefuse.runtime.collectives import is_fake
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.ranks import numbers_dtype
from moefuse.runtime.transports.base import Dispatched, exchanged, known_arrivals, most_tokens, scaled

MOST_RANKS = 63
"""A token's ranks are bits of an int64."""
_ALIGN = 256
"""Bytes."""
_HEAD = 7
"""Times ``_ALIGN`` bytes behind the sets for ``bases``, ``turn`` and ``flags``, which no allocator may give away between CUDA graphs."""
_WAIT = 600.0
"""Seconds, where the process group does not say how long to wait."""
_ELSE = "use 'allgather'"


@dataclass
class Buffers:
    """Two sets of a rank's memory and the addresses of its peers'.

    Attributes:
        bases: [P] int64, of every rank's memory.
        turn: [2] int32, transfers counted on the device.
        flags: [4, 64] int32, what each rank says at a barrier, and in the last row, eight places for each rank, 1 where a piece of what it
            sends beside has come; at the same place in every rank's memory.
        one: [1] int32, the number.
        patience: nanoseconds that a rank waits for the others.
        older: buffers that older graphs know.
        peers: every rank's memory as a tensor of this one's device, where it has a use of its own.
    """

    memory: Tensor
    bases: Tensor
    turn: Tensor
    flags: Tensor
    set_bytes: int
    patience: int = 0
    older: Buffers | None = None
    peers: Sequence[Tensor] = ()
    one: Tensor | None = None

    @property
    def at_flags(self) -> int:
        """Bytes from the beginning of a rank's memory."""
        return 2 * self.set_bytes + 3 * _ALIGN


_buffers: dict[tuple[str, torch.device, str], Buffers] = {}


def buffers(group: Group, device: torch.device, needed: int, use: str = "") -> Buffers:
    """Those of a mesh for a use, with sets of at least ``needed`` bytes; the same number on all ranks.

    Raises:
        ParallelError: they would have to grow while a CUDA graph is recorded, or there is no such memory.
    """
    known = _buffers.get((group.name, device, use))
    if known is not None and known.set_bytes >= needed:
        return known
    if torch.cuda.is_current_stream_capturing():
        raise ParallelError(f"transport='symm' has no buffers of {needed} bytes yet: run the model once before its CUDA graph is recorded")
    size = 1 << (needed - 1).bit_length()
    torch.cuda.synchronize(device)
    failed, memory = "", None
    try:
        memory = lasting.apart(device, lambda: _torch_private.symmetric_memory(2 * size + _ALIGN * _HEAD, device))
    except (RuntimeError, AttributeError, ImportError) as error:
        failed = str(error)
    # Who has no memory would leave the others waiting for it.
    lacking = [rank for rank, has in enumerate(exchanged(group.host, group.size, int(memory is not None))) if not has]
    if memory is None or lacking:
        raise ParallelError(f"transport='symm' found no memory for GPUs to share on rank {lacking[0]} ({failed or 'see there'}): {_ELSE}")
    try:
        # torch keeps two tables of addresses, in memory of the pool that it finds
        addresses = lasting.apart(device, lambda: _torch_private.symmetric_peers(memory, group.process_group))
        peers = _torch_private.symmetric_views(memory, group.process_group) if use else ()
    except (RuntimeError, AttributeError, ImportError) as error:
        raise ParallelError(f"transport='symm' needs GPUs that can write each other's memory, and has none ({error}): {_ELSE}") from error
    head = memory[2 * size :].zero_()
    bases = head.view(torch.int64)[: group.size].copy_(torch.tensor(addresses))
    turn, flags = head[2 * _ALIGN : 3 * _ALIGN].view(torch.int32), head[3 * _ALIGN :].view(torch.int32).view(4, -1)
    one = turn[2:3].fill_(1)
    wait = _torch_private.timeout_of(group.process_group)
    patience = int(1e9 * (_WAIT if wait is None else wait.total_seconds()))
    torch.cuda.synchronize(device)
    exchanged(group.host, group.size, 1)  # nobody raises a flag that its owner has yet to lower
    providers.forget_records()  # of calls that use the older ones, which other ranks may not have
    _buffers[group.name, device, use] = Buffers(memory, bases, turn[:2], flags, size, patience, known, peers, one)
    return _buffers[group.name, device, use]


def available(group: Group, device: torch.device) -> bool:
    """Whether all ranks of a mesh can write each other's memory: the same answer on each. All of them call it, outside of CUDA graphs.

    They agree on every step before the next one, so that none waits for another that cannot take it.
    """
    if device.type != "cuda" or not 1 < group.size <= MOST_RANKS or group.spans > 1 or is_fake(group.process_group):
        return False
    if not all(exchanged(group.host, group.size, int(importlib.util.find_spec("triton") is not None))):
        return False
    failed = False
    try:
        buffers(group, device, _ALIGN)
    except ParallelError:
        failed = True
    if any(exchanged(group.host, group.size, int(failed))):
        _buffers.pop((group.name, device, ""), None)
        return False
    return True


class _Symm:
    def arrivals(self, terms: Terms, tokens: int) -> int:
        return known_arrivals(terms, tokens)

    def handle(self, terms: Terms, ids: Tensor) -> list[Tensor]:
        arrivals = self.arrivals(terms, ids.shape[0])
        return [ids.new_empty((arrivals,), dtype=torch.int32), ids.new_empty((ids.shape[0],), dtype=torch.int64)]

    def dispatch(self, terms: Terms, rows: Sequence[Tensor], ids: Tensor, place: Tensor | None, slots: int) -> Dispatched:
        from moefuse.kernels.triton.provide import symm

        most, group = most_tokens(terms, ids.shape[0]), terms.group
        if not most:
            empty = ids.to(numbers_dtype(ids.dtype), copy=True)
            return Dispatched([r.clone() for r in rows], empty, [t.zero_() for t in self.handle(terms, ids)], local=True)
        spans = regions(rows, group.size * most)
        at, how = transfer(group, ids.device, most, spans, group.size * most * ids.shape[1] * 4)
        own = tuple([r.contiguous() for r in rows])
        every, local, took, to = symm.dispatch(own, ids.contiguous(), place, slots, at, how)
        return Dispatched(list(every), local, [took, to], local=True)

    def refuse(self, terms: Terms, ids: Tensor) -> None:
        return

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int, scale: float = 1.0) -> list[Tensor]:
        from moefuse.kernels.triton.provide import symm

        group, (took, to) = terms.group, handle
        if not arrivals:
            return [r.clone() for r in rows]
        if _is_wide(rows):
            rows, scale = scaled(rows, scale), 1.0
        at, how = transfer(group, took.device, arrivals // group.size, regions(rows, arrivals))
        return list(symm.send(tuple([r.contiguous() for r in rows]), took, to, at, how, scale))

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int, scale: float = 1.0) -> list[Tensor]:
        from moefuse.kernels.triton.provide import symm

        group, (took, to) = terms.group, handle
        if not took.shape[0]:
            return [r.clone() for r in rows]
        at, how = transfer(group, took.device, took.shape[0] // group.size, regions(rows, took.shape[0]))
        inside = 1.0 if _is_wide(rows) else scale
        out = symm.give_back(tuple([r.contiguous() for r in rows]), took, to, at, how, inside)
        return list(scaled(out, scale / inside))


def _is_wide(rows: Sequence[Tensor]) -> bool:
    """Whether a kernel's scale, which is a float32, would not do."""
    return rows[0].dtype == torch.float64


def transfer(group: Group, device: torch.device, most: int, spans: tuple[int, ...], behind: int = 0) -> tuple[Any, Any]:
    """For the launches: the memory that they share, and where rows are in it; ``behind`` the rows so many bytes of ids."""
    from moefuse.kernels.triton.provide import symm

    held = buffers(group, device, spans[-1] + behind)
    how = symm.Transfer.of(group.size, group.rank, held.set_bytes, held.at_flags, most, spans, held.patience)
    return symm.Shared.lasting(held.bases, held.turn, held.flags), how


def regions(rows: Sequence[Tensor], count: int) -> tuple[int, ...]:
    """Where ``count`` rows of each begin in a set, in bytes; and the end."""
    at = [0]
    for one in rows:
        at.append(-(-(at[-1] + count * one.shape[1] * one.element_size()) // _ALIGN) * _ALIGN)
    return tuple(at)


TRANSPORT = _Symm()
