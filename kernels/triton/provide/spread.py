"""Experts of many tokens on several ranks, whose rows travel beside what needs none of them (``moefuse/runtime/transports/beside.py``).

P ranks, M the most tokens of any. Two ways are under way at once, each with barriers of its own: ids and routing weights as in ``symm.py``,
and rows through memory whose places the host knows. A rank whose kernels do not take tokens in parts does all in order, over the same ways.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moefuse.kernels.triton.host import arriving
from moefuse.kernels.triton.host.arriving import Part
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.plan import Plan
from moefuse.kernels.triton.launch.beside import Beside
from moefuse.kernels.triton.launch.copying import copy
from moefuse.kernels.triton.launch.record import as_value
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide import experts as kernels, symm
from moefuse.kernels.triton.provide.symm import Shared, Transfer
from moefuse.ops.meaning.call import ExpertsCall

FAR = 1 << 30
"""Rows: a barrier of its own, not one of whoever takes them."""
COPIED = 0.85
"""The share of rows that travel from which on copy engines send all of them. Kernels that send leave others no way to memory."""


class Wire(NamedTuple):
    """Where rows travel.

    Attributes:
        come, back: rows to the ranks that have their experts, and sums to those that the tokens are from.
        rows: [P * M, H] of each rank: of the rows that come to it.
        sums: [P * M, N] of each rank: of the sums that come back to it.
        came: [64] of each rank: who has told it that its rows have come.
        one: what tells it.
    """

    at: Shared
    come: Transfer
    back: Transfer
    rows: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    came: tuple[Tensor, ...]
    one: Tensor

    @staticmethod
    def lasting(group: Any, held: Any, most: int, come: tuple[int, torch.dtype], back: tuple[int, torch.dtype]) -> Wire:
        """Through memory that stays (``symm.Buffers``): rows of so many features of a dtype come, and sums go back."""

        def made(_: Any) -> tuple[Any, ...]:
            rows = tuple([_shown(memory, group.size * most, *come) for memory in held.peers])
            sums = tuple([_shown(memory[held.set_bytes :], group.size * most, *back) for memory in held.peers])
            came = tuple([_shown(memory[held.at_flags + symm.AT_CAME :], 1, 64, torch.int32)[0] for memory in held.peers])
            return Shared(held.bases, held.turn, held.flags), rows, sums, came, held.one

        at, rows, sums, came, one = as_value(made, ())
        there, back_again = (
            Transfer.of(group.size, group.rank, 0, held.at_flags, most, (n, n), held.patience) for n in (0, held.set_bytes)
        )
        return Wire(at, there, back_again, rows, sums, came, one)


def _shown(memory: Tensor, rows: int, features: int, dtype: torch.dtype) -> Tensor:
    return memory[: rows * features * dtype.itemsize].view(dtype).view(rows, features)


@recorded
def experts(call: ExpertsCall, place: Tensor | None, slots: int, small: tuple[Shared, Transfer], wire: Wire) -> Tensor:
    """The layer [T, N] of this rank's tokens, with its experts for those of all ranks.

    Args:
        small: of ids and routing weights.
    """
    at, how = small
    rows = (call.weights,)
    came = symm.landing(rows, call.ids, how)
    every, to = call._replace(x=wire.rows[how.rank], ids=came[1], weights=came[0][0]), came[3]
    beside, copies = Beside(call.device), place is None or _share(how.size, call.top_k) >= COPIED
    if copies:
        _travel(call.x, wire, beside, None)
    symm.push_tokens(rows, call.ids, place, slots, at, how, came)
    there = symm.met(FAR, at, how)
    if not copies:
        # In front of the few bytes that all ranks wait for they would take the wire as long as they last.
        beside.fork()
        _travel(call.x, wire, beside, to)
    symm.take_tokens(*came[:3], at, how, there)
    plan = kernels.plan_of(every) if call.held == call.dtype else None
    if isinstance(plan, Plan) and arriving.takes(plan):
        own = _in_parts(plan, call, every, wire, beside)
    else:
        own = _in_order(call, every, wire, beside)
    return symm.take_sums((own,), to, wire.at, wire.back, apart=True)[0]


def _share(ranks: int, top_k: int) -> float:
    """Of tokens that have an expert on some rank, where each expert is chosen as often."""
    return 1.0 - (1.0 - 1.0 / ranks) ** top_k


def _travel(x: Tensor, wire: Wire, beside: Beside, to: Tensor | None) -> None:
    """Rows to the ranks in ``to``, or all of them to all ranks by copy engines. So is what tells them: a kernel behind a copy begins 12 us
    after it, in CUDA graphs (measured on an H200)."""
    rank, most = wire.come.rank, wire.come.most
    with beside:
        if to is not None:
            symm.push_beside(x, to, wire.at, wire.come)
            return
        for r in _others(wire):
            copy(_block(wire.rows[r], rank, most)[: x.shape[0]], x)
            copy(wire.came[r][rank : rank + 1], wire.one)


def _in_parts(plan: Plan, call: ExpertsCall, every: ExpertsCall, wire: Wire, beside: Beside) -> Tensor:
    """The sums of own tokens, and those of others where they belong."""
    most, rank = wire.come.most, wire.come.rank
    own = call.x.new_empty((call.x.shape[0], call.w_out.features), dtype=call.out_dtype)

    def part(first: int, stop: int) -> Part:
        return Part(slice(first, stop), every.x[first:stop])

    arriving.run(
        plan,
        every,
        Part(slice(rank * most, rank * most + call.x.shape[0]), call.x, own),
        [part(0, rank * most), part((rank + 1) * most, every.x.shape[0])],
        [Part(slice(r * most, (r + 1) * most), every.x, _block(wire.sums[r], rank, most)) for r in _others(wire)],
        beside,
        arrived=lambda: symm.wait_for_all(wire.at, wire.come),
        back=lambda: symm.passed(wire.at, wire.back),
        programs=symm.PROGRAMS * device_of(call.device).sms,
    )
    return own


def _in_order(call: ExpertsCall, every: ExpertsCall, wire: Wire, beside: Beside) -> Tensor:
    """The same by whatever computes the call."""
    most, rank = wire.come.most, wire.come.rank
    symm.wait_for_all(wire.at, wire.come)
    x = torch.empty_like(every.x)
    for r in range(wire.come.size):
        rows = call.x if r == rank else _block(every.x, r, most)
        copy(_block(x, r, most)[: rows.shape[0]], rows)
    y = kernels.experts(every._replace(x=x))
    for r in _others(wire):
        copy(_block(wire.sums[r], rank, most), _block(y, r, most))
    symm.passed(wire.at, wire.back)
    beside.meet()
    return _block(y, rank, most)


def _others(wire: Wire) -> list[int]:
    """All other ranks, the next one first: no two begin with the same."""
    return [(wire.come.rank + i) % wire.come.size for i in range(1, wire.come.size)]


def _block(rows: Tensor, rank: int, most: int) -> Tensor:
    """A rank's [M, N] of all."""
    return rows[rank * most : (rank + 1) * most]
