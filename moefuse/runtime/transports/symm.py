"""Rows through memory that GPUs of one host read from each other: two kernels and a barrier a way, nothing waits for the host.

For static numbers of tokens (``max_tokens``), so that buffers are sized before: they belong to a mesh and a device, come into being at
the first call outside of a CUDA graph, on all ranks alike, and stay where they are, since graphs know their addresses. A row goes to a
rank that has one of its experts, once; others' rows are zeros with ids -1, written without a look at them. What the graph gets is a copy:
no tensor of a program is in a buffer.

The handle is ``took`` [P * M] and ``to`` [T] of ``moefuse/kernels/triton/device/symm.py``, which has the protocol. After
torch.distributed._symmetric_memory; the kernels of meta-pytorch/kraken and torchtitan's MinimalAsyncEP showed that Triton is fast enough.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse import _torch_private
from moefuse.errors import ParallelError
from moefuse.runtime.collectives import is_fake
from moefuse.runtime.groups import Group, Terms
from moefuse.runtime.transports.base import Dispatched, exchanged, known_arrivals, most_tokens

MOST_RANKS = 63
"""A token's ranks are bits of an int64."""
_ALIGN = 256
"""Bytes."""
_HEAD = 4
"""Times ``_ALIGN`` bytes behind the sets for ``bases`` and ``turn``, which no allocator may give to somebody else between CUDA graphs."""
_ELSE = "use 'allgather'"


@dataclass
class Buffers:
    """Two sets of a rank's memory and the addresses of its peers'.

    Attributes:
        bases: [P] int64, of every rank's memory.
        turn: [2] int32, transfers counted on the device.
        barrier: of all ranks, on the current stream.
        older: buffers that older graphs know.
    """

    memory: Tensor
    bases: Tensor
    turn: Tensor
    set_bytes: int
    barrier: Callable[[], None]
    older: Buffers | None = None


_buffers: dict[tuple[str, torch.device], Buffers] = {}


def buffers(group: Group, device: torch.device, needed: int) -> Buffers:
    """Those of a mesh, with sets of at least ``needed`` bytes; the same number on all ranks.

    Raises:
        ParallelError: they would have to grow while a CUDA graph is recorded, or there is no such memory.
    """
    known = _buffers.get((group.name, device))
    if known is not None and known.set_bytes >= needed:
        return known
    if torch.cuda.is_current_stream_capturing():
        raise ParallelError(f"transport='symm' has no buffers of {needed} bytes yet: run the model once before its CUDA graph is recorded")
    size = 1 << (needed - 1).bit_length()
    torch.cuda.synchronize(device)
    failed, memory = "", None
    try:
        memory = _torch_private.symmetric_memory(2 * size + _ALIGN * _HEAD, device)
    except (RuntimeError, AttributeError, ImportError) as error:
        failed = str(error)
    # Who has no memory would leave the others waiting for it.
    lacking = [rank for rank, has in enumerate(exchanged(group.host, group.size, int(memory is not None))) if not has]
    if memory is None or lacking:
        raise ParallelError(f"transport='symm' found no memory for GPUs to share on rank {lacking[0]} ({failed or 'see there'}): {_ELSE}")
    try:
        addresses, barrier = _torch_private.symmetric_peers(memory, group.process_group)
    except (RuntimeError, AttributeError, ImportError) as error:
        raise ParallelError(f"transport='symm' needs GPUs that can read each other's memory, and has none ({error}): {_ELSE}") from error
    head = memory[2 * size :].view(torch.int64)
    bases, turn = head[: group.size].copy_(torch.tensor(addresses)), head[MOST_RANKS + 1 :].view(torch.int32)[:2].zero_()
    _buffers[group.name, device] = Buffers(memory, bases, turn, size, barrier, known)
    return _buffers[group.name, device]


def available(group: Group, device: torch.device) -> bool:
    """Whether all ranks of a mesh can read each other's memory: the same answer on each. All of them call it, outside of CUDA graphs.

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
        _buffers.pop((group.name, device), None)
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
            empty = torch.promote_types(ids.dtype, torch.int32)
            return Dispatched([r.clone() for r in rows], ids.to(empty, copy=True), [t.zero_() for t in self.handle(terms, ids)], local=True)
        spans = regions(rows, most)
        held = buffers(group, ids.device, spans[-1] + most * ids.shape[1] * 8)
        rows, ids = [r.contiguous() for r in rows], ids.contiguous()
        to = symm.put_tokens(held, rows, ids, place, slots, spans, most, group.size)
        held.barrier()
        every, local, took = symm.pull_tokens(held, rows, ids, place, slots, spans, most, group)
        return Dispatched(every, local, [took, to], local=True)

    def send(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], arrivals: int) -> list[Tensor]:
        from moefuse.kernels.triton.provide import symm

        group, took = terms.group, handle[0]
        if not arrivals:
            return [r.clone() for r in rows]
        most = arrivals // group.size
        spans = regions(rows, most)
        held = buffers(group, took.device, spans[-1])
        rows = [r.contiguous() for r in rows]
        for mine, at in zip(rows, spans, strict=False):
            symm.put_rows(held, mine, None, at, most, group.rank)
        held.barrier()
        return [symm.pull_rows(held, mine, took, at, most, group) for mine, at in zip(rows, spans, strict=False)]

    def give_back(self, terms: Terms, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int) -> list[Tensor]:
        from moefuse.kernels.triton.provide import symm

        group, (took, to) = terms.group, handle
        if not took.shape[0]:
            return [r.clone() for r in rows]
        spans = regions(rows, took.shape[0])
        held = buffers(group, took.device, spans[-1])
        rows, most = [r.contiguous() for r in rows], took.shape[0] // group.size
        for part, at in zip(rows, spans, strict=False):
            symm.put_rows(held, part, took, at, most, group.rank)
        held.barrier()
        return [symm.pull_sums(held, part, to, at, most, group) for part, at in zip(rows, spans, strict=False)]


def regions(rows: Sequence[Tensor], count: int) -> list[int]:
    """Where ``count`` rows of each begin in a set, in bytes; and the end."""
    at = [0]
    for one in rows:
        at.append(-(-(at[-1] + count * one.shape[1] * one.element_size()) // _ALIGN) * _ALIGN)
    return at


TRANSPORT = _Symm()
