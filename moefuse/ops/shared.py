"""``moefuse::experts_and_shared``: routed experts and the expert that every token takes, added.

    experts(x [T, H], ids [T, K], weights [T, K], ...) + weight [T, 1] * shared(x [T, Hs])

The second term is ``moefuse::experts`` too, with one expert that every token chooses. Both are rounded before they are added, as in the
program that this replaces. Inference only. On CUDA, up to ``overlap`` tokens, few tokens take all of their experts in the same launches
(``moefuse/kernels/triton/joined.py``, which rounds the sum once), more of them two streams (``moefuse/runtime/overlap.py``).

``shared`` holds the shared expert's tokens [T, Hs] and seven lists: its weight per token (none, or one tensor [T, 1]) and the six lists of
``experts`` with one tensor of two dimensions each, ``shared_counts`` their lengths; see ``moefuse/ops/body.py`` for the other numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.body import unpack
from moefuse.ops.schema import implement
from moefuse.runtime import overlap as streams
from moefuse.runtime import providers

Lists = Sequence[Tensor]


def shared_part(shared: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    """[T, H]: one expert that every token chooses, times its weight."""
    x, weights, *lists = unpack(shared, counts)
    tokens = x.shape[0]
    ids = x.new_zeros((tokens, 1), dtype=torch.int64)
    scale = weights[0] if weights else x.new_ones((tokens, 1))
    tensors = [x, ids, scale, *(t for part in lists for t in part)]
    out: Tensor = torch.ops.moefuse.experts_infer.default(tensors, counts[1:], body, arg0, arg1, out_dtype)
    return out


def in_one(*args: Any) -> Tensor | None:
    """The call in the same launches, if Triton is there and has kernels for it."""
    kernels = providers.triton_module("joined_plan")
    return None if isinstance(kernels, str) else kernels.run(*args)


def routed_part(tensors: Lists, counts: Sequence[int], body: int, arg0: float, arg1: float, out_dtype: torch.dtype) -> Tensor:
    """[T, N]: the routed experts."""
    out: Tensor = torch.ops.moefuse.experts_infer.default(tensors, counts, body, arg0, arg1, out_dtype)
    return out


def _parts(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the routed experts, and of the shared one: both with the result's dtype."""
    return args[:6], (*args[6:11], args[5])


def _kernel(*args: Any) -> Tensor:
    routed, shared = _parts(args)
    x, overlap = args[0][0], args[11]
    if x.device.type != "cuda" or x.shape[0] > overlap or not streams.enabled():
        return routed_part(*routed).add_(shared_part(*shared))
    joined = in_one(*args[:11])
    if joined is not None:
        return joined
    first, second = streams.both(x.device, lambda: routed_part(*routed), lambda: shared_part(*shared))
    return first.add_(second)


def _fake(*args: Any) -> Tensor:
    routed, shared = _parts(args)
    first, second = routed_part(*routed), shared_part(*shared)
    if second.shape != first.shape:
        raise ValueError(f"moefuse::experts_and_shared: the experts give {tuple(first.shape)}, the shared one {tuple(second.shape)}")
    return first


implement("experts_and_shared", kernel=_kernel, fake=_fake, autograd=autograd.not_differentiable("experts_and_shared"))
