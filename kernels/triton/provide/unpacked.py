"""Products of many rows with weights in few bits: some experts at a time are unpacked, and multiplied by the kernels for 16 bits.

An expert with many rows is multiplied for longer than it takes to unpack it once, while ``coded_tiles`` unpacks it again for every tile of
rows, and cannot feed the tensor cores as fast. Only the weights of a few experts exist at a time: at most a sixteenth of a projection's, or
LEAST bytes, and no more than MOST, but one expert.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moefuse.kernels.triton.host import coded
from moefuse.kernels.triton.host.coded import Held
from moefuse.kernels.triton.host.sorted_rows import Sorted
from moefuse.kernels.triton.provide.products import Own

LEAST, MOST = 1 << 27, 1 << 28
DTYPES = (torch.bfloat16, torch.float16)
"""Of rows."""


def experts_at_once(held: Held, experts: int, item: int) -> int:
    """How many are unpacked at a time."""
    each = held.features * held.inputs * item
    budget = min(max(each * experts // 16, LEAST), MOST)
    return min(max(budget // max(each, 1), 1), experts)


def product(out: Tensor, x: Tensor, held: Held, it: Sorted, bias: Sequence[Tensor], *, back: bool, add: bool) -> None:
    """out [S, N] = sorted rows x [S, K] times w[e]^T (+ bias[e]), or with ``back`` times w[e]; ``add``: to what out holds."""
    at_once = experts_at_once(held, it.experts, x.element_size())
    for first in range(0, it.experts, at_once):
        count = min(at_once, it.experts - first)
        dense = coded.unpack(held, first, count, x.dtype)
        some = Sorted(it.order, it.offsets[first : first + count + 1], it.slots, count, it.top_k)
        biases = [b[first : first + count] for b in bias] if len(bias) == 1 else bias[first : first + count]
        Own(some, x.dtype).linear(x, [dense], biases, back=back, out=out, add=add)
