"""Training of experts on several ranks whose rows travel beside what needs none of them: what the ops of ``moefuse/ops/spread.py`` run as.

P ranks, M the most tokens of any; own tokens are the rows ``rank * M ..`` of all. Own rows are sorted while those of the others come, in
forward and of gradients in backward; gradients of tokens go back by copy engines while those of w_in and w_up are made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moefuse.kernels.triton.host import sorted_rows
from moefuse.kernels.triton.host.layout import device_of
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.launch.beside import Beside
from moefuse.kernels.triton.launch.copying import copy
from moefuse.kernels.triton.launch.recorded import recorded
from moefuse.kernels.triton.provide import symm, training
from moefuse.kernels.triton.provide.spread import Wire, copied, sent, travel
from moefuse.kernels.triton.provide.symm import Shared, Transfer
from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.grad_calls import InCall, RowsCall


@recorded
def forward(
    call: ExpertsCall, place: Tensor | None, slots: int, small: tuple[Shared, Transfer], wire: Wire, result: bool
) -> list[Tensor]:  # fmt: skip
    """The layer [T, N] of this rank's tokens, and what ``ep_experts_forward`` returns behind it.

    Args:
        small: of ids and routing weights.
        result: whether anyone asks for the former.
    """
    beside, copies = Beside(call.device), place is None or copied(wire.come.size, call.top_k)
    (weights,), local, took, to = sent(call, place, slots, small, wire, beside, copies)
    order, offsets = sorted_rows.sort(local, call.w_in.experts)
    it = Sorted(order, offsets, local.numel(), call.w_in.experts, call.top_k)
    position = sorted_rows.inverse(it).view(local.shape)
    rows = _sorted_as_they_come(call.x, position, it, weights if call.body.on_input else None, wire.coming(copies), wire)
    x = _kept(call.x, wire, beside)
    every = call._replace(x=x, ids=local, weights=weights)
    by, h = training.first(every, it, rows)
    del rows
    beside.meet()  # others may send again behind the barrier
    if result:
        out = _summed(every, training.second(every, it, by, h), it, position, to, wire, call.x.shape[0])
    else:
        symm.passed(wire.at, wire.back)
        out = call.x.new_empty((0, call.w_out.features), dtype=call.out_dtype)
    return [out, x, local, weights, h, order, offsets, took, to]


def _summed(call: ExpertsCall, y: Tensor, it: Sorted, position: Tensor, to: Tensor, wire: Wire, tokens: int) -> Tensor:
    """[T, N] of this rank's ``tokens``, from each slot's output y [S, N] of a call of all ranks' tokens."""
    rank, most = wire.come.rank, wire.come.most
    own = call.x.new_empty((tokens, call.w_out.features), dtype=call.out_dtype)
    programs = symm.PROGRAMS * device_of(call.device).sms

    def of(part: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        return call.ids[part], position[part], None if call.body.on_input else call.weights[part]

    for r in wire.others:
        its = of(slice(r * most, (r + 1) * most))
        sorted_rows.send_slots(wire.block(wire.sums[0][r], rank), y, *its, it, programs)
    sorted_rows.sum_beside(own, y, *of(slice(rank * most, rank * most + tokens)), it)
    symm.passed(wire.at, wire.back)
    return symm.take_sums((own,), to, wire.at, wire.back, apart=True)[0]


@recorded
def backward_rows(call: RowsCall, to: Tensor, wire: Wire, scale: float) -> list[Tensor]:
    """What ``ep_backward_rows`` returns, of own gradients [T, N]; those that are summed over rows are times ``scale``.

    It is taken into routing weights, with which all of these are multiplied, and gradients travel as they are.
    """
    beside, copies = Beside(call.h.device), copied(wire.come.size, call.weights.shape[1])
    travel(call.grad, wire, beside, None if copies else to, waited=True)
    call = call._replace(weights=sorted_rows.scaled(call.weights, scale))
    it = training.sorted_of(call, call.w_out)
    position = sorted_rows.inverse(it).view(call.weights.shape)
    rows = _sorted_as_they_come(call.grad, position, it, None, wire.coming(copies, waited=True), wire)
    grad = _kept(call.grad, wire, beside)
    d_a = training.through_last(call, rows, tokens=False)
    del rows
    d_h, *others = training.rows_back(call, grad, d_a)
    if call.need.products:
        others[-1] = sorted_rows.scaled(others[-1], scale)
    beside.meet()
    return [grad, d_h, *others]


@recorded
def backward_in(call: InCall, rows: tuple[Tensor, ...], to: Tensor, wire: Wire, scale: float) -> list[Tensor]:
    """``rows`` [P * M, F] each, summed over ranks where the tokens are, [T, F], times ``scale``; and gradients of lists."""
    beside, outs = Beside(call.x.device), symm.sums_of(rows, to)
    with beside:
        for r in wire.others:
            for part, sums in zip(rows, wire.sums, strict=True):
                copy(wire.block(sums[r], wire.come.rank), wire.block(part, r))
        symm.passed(wire.at, wire.back)
        symm.take_sums(rows, to, wire.at, wire.back, scale, outs=outs)
    lists = training.experts_backward_in(call) if call.need.h else []
    beside.meet()
    return [*outs, *lists]


def _sorted_as_they_come(
    own: Tensor, position: Tensor, it: Sorted, scale: Tensor | None, coming: Iterator[slice], wire: Wire
) -> Tensor:  # fmt: skip
    """Rows [S, F] of all ranks' tokens, of which ``own`` [T, F] are this rank's; ``scale`` [P * M, K]: times their routing weight.
    ``position`` [P * M, K]: the row of each slot."""
    rows = torch.empty((it.slots, own.shape[1]), dtype=own.dtype, device=own.device)
    first = wire.come.rank * wire.come.most

    def add(tokens: Tensor, part: slice) -> None:
        sorted_rows.spread(rows, tokens, position[part], it, None if scale is None else scale[part])

    add(own, slice(first, first + own.shape[0]))
    for part in coming:
        add(wire.rows[wire.come.rank][part], part)
    return rows


def _kept(own: Tensor, wire: Wire, beside: Beside) -> Tensor:
    """[P * M, F]: all ranks' tokens, copied beside what is launched until the streams meet; of tokens that no expert here has, anything."""
    every = own.new_empty((wire.come.size * wire.come.most, own.shape[1]))
    beside.fork()
    with beside:
        copy(wire.block(every, wire.come.rank)[: own.shape[0]], own)
        for r in wire.others:
            copy(wire.block(every, r), wire.block(wire.rows[wire.come.rank], r))
    return every
