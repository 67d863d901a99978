"""Experts of many tokens on several ranks, whose rows travel beside what needs none of them (``moefuse/runtime/transports/beside.py``).

P ranks, M the most tokens of any. Two ways are under way at once, each with barriers of its own: ids and routing weights as in ``symm.py``,
and rows through memory whose places the host knows. A rank whose kernels do not take tokens in parts does all in order, over the same ways.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
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


Kind = tuple[int, torch.dtype]


class Wire(NamedTuple):
    """Where rows travel.

    Attributes:
        come, back: rows to the ranks that have their experts, and sums to those that the tokens are from.
        rows: [P * M, H] of each rank: of the rows that come to it.
        sums: [P * M, N] of each rank, for one or several kinds of sums that come back to it.
        came: [64] of each rank: which pieces of the others' rows have come, of each as many as ``symm.PIECES``.
        one: what tells it.
    """

    at: Shared
    come: Transfer
    back: Transfer
    rows: tuple[Tensor, ...]
    sums: tuple[tuple[Tensor, ...], ...]
    came: tuple[Tensor, ...]
    one: Tensor

    @staticmethod
    def lasting(group: Any, held: Any, most: int, come: Kind | None, *back: Kind, starts: tuple[int, ...] = (0, 0)) -> Wire:
        """Through memory that stays (``symm.Buffers``).

        Args:
            come, back: features and dtype of rows that come, and of the sums that go back.
            starts: where each of these begins in its set, in bytes, and the end.
        """
        at_sums = tuple([held.set_bytes + start for start in starts])

        def made(_: Any) -> tuple[Any, ...]:
            rows = tuple([_shown(memory, group.size * most, *come) for memory in held.peers if come is not None])
            sums = [tuple([_shown(m[n:], group.size * most, *kind) for m in held.peers]) for n, kind in zip(at_sums, back, strict=False)]
            came = tuple([_shown(memory[held.at_flags + symm.AT_CAME :], 1, 64, torch.int32)[0] for memory in held.peers])
            return Shared(held.bases, held.turn, held.flags), rows, tuple(sums), came, held.one

        at, rows, sums, came, one = as_value(made, ())
        there, back_again = (
            Transfer.of(group.size, group.rank, 0, held.at_flags, most, spans, held.patience) for spans in ((0, 0), at_sums)
        )
        return Wire(at, there, back_again, rows, sums, came, one)

    @property
    def others(self) -> list[int]:
        """All other ranks, the next one first: no two begin with the same."""
        return [(self.come.rank + i) % self.come.size for i in range(1, self.come.size)]

    def block(self, rows: Tensor, rank: int) -> Tensor:
        """A rank's [M, N] of all."""
        return rows[rank * self.come.most : (rank + 1) * self.come.most]

    def pieces(self, waited: bool) -> list[slice]:
        """Of a rank's M rows, what copy engines send at a time. Where they are ``waited`` for, most of them come first between two ranks,
        and are worked on meanwhile; a piece more is 10 us more on the wire."""
        cuts = [0, self.come.most * 3 // 4, self.come.most] if waited and self.come.size == 2 else [0, self.come.most]
        return [slice(*cut) for cut in pairwise(cuts)]

    def coming(self, copies: bool, waited: bool = False) -> Iterator[slice]:
        """Rows of others, as they come."""
        for piece, part in enumerate(self.pieces(waited and copies)):
            for r in reversed(self.others):  # who sends to this rank first
                symm.wait_for(self.at, self.come, r, piece)
                yield slice(r * self.come.most + part.start, r * self.come.most + part.stop)


def _shown(memory: Tensor, rows: int, features: int, dtype: torch.dtype) -> Tensor:
    return memory[: rows * features * dtype.itemsize].view(dtype).view(rows, features)


@recorded
def experts(call: ExpertsCall, place: Tensor | None, slots: int, small: tuple[Shared, Transfer], wire: Wire) -> Tensor:
    """The layer [T, N] of this rank's tokens, with its experts for those of all ranks.

    Args:
        small: of ids and routing weights.
    """
    beside, copies = Beside(call.device), place is None or copied(wire.come.size, call.top_k)
    (weights,), local, _, to = sent(call, place, slots, small, wire, beside, copies)
    every = call._replace(x=wire.rows[wire.come.rank], ids=local, weights=weights)
    plan = kernels.plan_of(every) if call.held == call.dtype else None
    if isinstance(plan, Plan) and arriving.takes(plan):
        own = _in_parts(plan, call, every, wire, beside, copies)
    else:
        own = _in_order(call, every, wire, beside, copies)
    return symm.take_sums((own,), to, wire.at, wire.back, apart=True)[0]


def sent(
    call: ExpertsCall, place: Tensor | None, slots: int, small: tuple[Shared, Transfer], wire: Wire, beside: Beside, copies: bool
) -> symm.Came:
    """Routing weights and ids of all ranks' tokens, as of ``symm.dispatch``, while own rows travel to the others."""
    (at, how), rows = small, (call.weights,)
    came = symm.landing(rows, call.ids, how)
    if copies:
        travel(call.x, wire, beside)
    symm.push_tokens(rows, call.ids, place, slots, at, how, came)
    there = symm.met(FAR, at, how)
    if not copies:
        # In front of the few bytes that all ranks wait for they would take the wire as long as they last.
        beside.fork()
        travel(call.x, wire, beside, came[3])
    symm.take_tokens(*came[:3], at, how, there)
    return came


def copied(ranks: int, top_k: int) -> bool:
    """Whether nearly all tokens have an expert on each rank, where each expert is chosen as often."""
    return 1.0 - (1.0 - 1.0 / ranks) ** top_k >= COPIED


def travel(x: Tensor, wire: Wire, beside: Beside, to: Tensor | None = None, waited: bool = False) -> None:
    """Rows to the ranks in ``to``, or all of them to all ranks by copy engines. So is what tells them: a kernel behind a copy begins 12 us
    after it, in CUDA graphs (measured on an H200)."""
    rank = wire.come.rank
    with beside:
        if to is not None:
            symm.push_beside(x, to, wire.at, wire.come)
            return
        for piece, part in enumerate(wire.pieces(waited)):
            for r in wire.others:
                copy(wire.block(wire.rows[r], rank)[part][: x[part].shape[0]], x[part])
                place = rank * symm.PIECES + piece
                copy(wire.came[r][place : place + 1], wire.one)


def _in_parts(plan: Plan, call: ExpertsCall, every: ExpertsCall, wire: Wire, beside: Beside, copies: bool) -> Tensor:
    """The sums of own tokens, and those of others where they belong."""
    most, rank = wire.come.most, wire.come.rank
    own = call.x.new_empty((call.x.shape[0], call.w_out.features), dtype=call.out_dtype)
    arriving.run(
        plan,
        every,
        Part(slice(rank * most, rank * most + call.x.shape[0]), call.x, own),
        (Part(part, every.x[part]) for part in wire.coming(copies)),
        [Part(slice(r * most, (r + 1) * most), every.x, wire.block(wire.sums[0][r], rank)) for r in wire.others],
        beside,
        back=lambda: symm.passed(wire.at, wire.back),
        programs=symm.PROGRAMS * device_of(call.device).sms,
    )
    return own


def _in_order(call: ExpertsCall, every: ExpertsCall, wire: Wire, beside: Beside, copies: bool) -> Tensor:
    """The same by whatever computes the call."""
    rank = wire.come.rank
    x = torch.empty_like(every.x)
    copy(wire.block(x, rank)[: call.x.shape[0]], call.x)
    for part in wire.coming(copies):
        copy(x[part], every.x[part])
    y = kernels.experts(every._replace(x=x))
    for r in wire.others:
        copy(wire.block(wire.sums[0][r], rank), wire.block(y, r))
    symm.passed(wire.at, wire.back)
    beside.meet()
    return wire.block(y, rank)
