"""A spread layer whose transfers run beside what needs none of them, where ranks share memory.

Many tokens: ids and routing weights are sent first, for they are few. While the rows travel, the slots of all ranks are sorted and own rows
are copied into sorted order; those of others are read where they have arrived. On the way back the kernel that adds up a token's slots
writes to the rank that the token is from, while own slots are added up on the second stream (``kernels/triton/host/arriving.py``).
Products are not cut: two calls of them read the weights twice, and cost more than they hide.

Rows have memory of their own, the first set for those that come and the second one for sums that come back, at places that the host knows.
A rank may write to a set again, for the other set's barrier has come between, and its reader was done before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.ops.meaning.grad_calls import InCall, RowsCall
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import symm
from moefuse.runtime.transports.base import most_tokens

LEAST = 8 << 20
"""Bytes of a rank's tokens from which on it pays, as measured on two H200 (``benchmarks/beside.py``, H = 2048): 0.89 to 0.95 of the time
with 8 MiB; with 4 MiB as long in CUDA graphs and up to 1.3 times as long launched. Tests set it."""
TRAINED = 2
"""Times as many in training: so measured, for what each launch more costs the host."""
MOST_RANKS = 8
"""There is a launch for each rank."""
USE = "beside"
DTYPES = (torch.bfloat16, torch.float16)


def layer(terms: Terms, call: ExpertsCall, place: Tensor | None, slots: int) -> Tensor | None:
    """The layer [T, N]; None: it is to run in order. Only what is alike on all ranks is looked at, for they have to agree."""
    if (given := _given(terms, call)) is None:
        return None
    from moefuse.kernels.triton.provide import spread

    own, small, wire = given
    return spread.experts(own, place, slots, small, wire)  # type: ignore[no-any-return]


def forward(terms: Terms, call: ExpertsCall, place: Tensor | None, slots: int, result: bool) -> list[Tensor] | None:
    """What ``moefuse::ep_experts_forward`` returns; None as of :func:`layer`."""
    if call.held != call.dtype or (given := _given(terms, call, TRAINED)) is None:
        return None
    from moefuse.kernels.triton.provide import spread_training

    own, small, wire = given
    return spread_training.forward(own, place, slots, small, wire, result)  # type: ignore[no-any-return]


def backward_rows(terms: Terms, call: RowsCall, handle: Sequence[Tensor]) -> list[Tensor] | None:
    """What ``moefuse::ep_backward_rows`` returns; None as of :func:`layer`."""
    grad = call.grad
    # Routing weights take the scale of gradients: biases and weights on the input would miss it.
    if grad.dtype != call.h.dtype or call.body.on_input or call.w_out.bias or call.w_out.weight[0].dtype != call.h.dtype:
        return None
    if not _travels(terms, grad.dtype):
        return None
    took, to = handle
    most = took.shape[0] // terms.group.size
    if not _pays(grad, most, TRAINED):
        return None
    from moefuse.kernels.triton.provide import spread, spread_training

    held = symm.buffers(terms.group, grad.device, took.shape[0] * grad.shape[1] * grad.element_size(), USE)
    wire = spread.Wire.lasting(terms.group, held, most, (grad.shape[1], grad.dtype))
    return spread_training.backward_rows(call, to, wire, terms.scale())  # type: ignore[no-any-return]


def backward_in(terms: Terms, call: InCall, rows: Sequence[Tensor], handle: Sequence[Tensor], tokens: int) -> list[Tensor] | None:
    """What ``moefuse::ep_backward_in`` returns; None as of :func:`layer`. Which lists' gradients are wanted may differ between ranks."""
    if not _travels(terms, rows[0].dtype):
        return None
    to, count = handle[1], rows[0].shape[0]
    most = count // terms.group.size
    if not _pays(rows[0], most, TRAINED):
        return None
    from moefuse.kernels.triton.provide import spread, spread_training

    spans = symm.regions(rows, count)
    held = symm.buffers(terms.group, to.device, spans[-1], USE)
    kinds = [(r.shape[1], r.dtype) for r in rows]
    wire = spread.Wire.lasting(terms.group, held, most, None, *kinds, starts=spans)
    return spread_training.backward_in(call, tuple([r.contiguous() for r in rows]), to, wire, 1 / terms.scale())  # type: ignore[no-any-return]


def _given(terms: Terms, call: ExpertsCall, times: int = 1) -> tuple[ExpertsCall, Any, Any] | None:
    """The call, how its ids and routing weights travel, and how its rows do."""
    group, top_k, hidden, features = terms.group, call.top_k, call.x.shape[1], call.w_out.features
    if not _travels(terms, call.dtype) or not _pays(call.x, most := most_tokens(terms, call.x.shape[0]), times):
        return None
    from moefuse.kernels.triton.provide import spread

    weights, ids, count = call.weights.contiguous(), call.ids.contiguous(), group.size * most
    small = symm.transfer(group, call.device, most, symm.regions([weights], count), count * top_k * 4)
    held = symm.buffers(group, call.device, count * max(hidden * call.dtype.itemsize, features * call.out_dtype.itemsize), USE)
    wire = spread.Wire.lasting(group, held, most, (hidden, call.dtype), (features, call.out_dtype))
    return call._replace(x=call.x.contiguous(), ids=ids, weights=weights), small, wire


def _travels(terms: Terms, dtype: torch.dtype) -> bool:
    return terms.transport == "symm" and dtype in DTYPES and terms.group.size <= MOST_RANKS


def _pays(rows: Tensor, most: int, times: int) -> bool:
    return most * rows.shape[1] * rows.element_size() >= LEAST * times
