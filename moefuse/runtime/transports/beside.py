"""A spread layer whose transfers run beside what needs none of them, where nothing is differentiated and ranks share memory.

Many tokens: ids and routing weights are sent first, for they are few. While the rows travel, the slots of all ranks are sorted and own rows
are copied into sorted order; those of others are read where they have arrived. On the way back the kernel that adds up a token's slots
writes to the rank that the token is from, while own slots are added up on the second stream (``kernels/triton/host/arriving.py``).
Products are not cut: two calls of them read the weights twice, and cost more than they hide.

Rows have memory of their own, the first set for those that come and the second one for sums that come back, at places that the host knows.
A rank may write to a set again, for the other set's barrier has come between, and its reader was done before that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moefuse.ops.meaning.call import ExpertsCall
from moefuse.runtime.groups import Terms
from moefuse.runtime.transports import symm
from moefuse.runtime.transports.base import most_tokens

LEAST = 8 << 20
"""Bytes of a rank's tokens from which on it pays, as measured on two H200 (``benchmarks/beside.py``, H = 2048): 0.89 to 0.95 of the time
with 8 MiB; with 4 MiB as long in CUDA graphs and up to 1.3 times as long launched. Tests set it."""
MOST_RANKS = 8
"""There is a launch for each rank."""
USE = "beside"
DTYPES = (torch.bfloat16, torch.float16)


def layer(terms: Terms, call: ExpertsCall, place: Tensor | None, slots: int) -> Tensor | None:
    """The layer [T, N]; None: it is to run in order. Only what is alike on all ranks is looked at, for they have to agree."""
    group, top_k = terms.group, call.top_k
    if terms.transport != "symm" or call.dtype not in DTYPES or group.size > MOST_RANKS:
        return None
    most = most_tokens(terms, call.x.shape[0])
    if most * call.x.shape[1] * call.dtype.itemsize < LEAST:
        return None
    from moefuse.kernels.triton.provide import spread

    count, hidden, features = group.size * most, call.x.shape[1], call.w_out.features
    weights, ids = call.weights.contiguous(), call.ids.contiguous()
    small = symm.transfer(group, call.device, most, symm.regions([weights], count), count * top_k * 4)
    held = symm.buffers(group, call.device, count * max(hidden * call.dtype.itemsize, features * call.out_dtype.itemsize), USE)
    wire = spread.Wire.lasting(group, held, most, (hidden, call.dtype), (features, call.out_dtype))
    own = call._replace(x=call.x.contiguous(), ids=ids, weights=weights)
    return spread.experts(own, place, slots, small, wire)  # type: ignore[no-any-return]
