"""``moefuse::shared_start`` and ``moefuse::shared_join``: a shared expert that runs while the router and the routed experts do.

    s = shared_start(x [T, H], ...)      in front of the router
    out = shared_join(routed [.., N], s [T, N], weight [T, 1] or None, scale, inputs, overlap)    == routed + scale * weight * s

The last line is computed in the accumulation dtype and rounded once, to the dtype of ``routed``.

``shared_start`` is ``moefuse::experts`` with one expert that every token takes. While a CUDA graph is recorded and there are at most
``overlap`` tokens, it runs on a side stream (``moefuse/runtime/overlap.py``) and ``shared_join`` waits for it; otherwise in order. Without
a graph the host gives the pace, and a second stream would only cost it time.

Between the two nobody reads ``s``. ``inputs`` are the tensors that the side stream reads: as arguments of ``shared_join`` they stay alive,
and nothing is written over them, until the two streams have met. Inference only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moefuse.ops import autograd
from moefuse.ops.meaning.call import Body, ExpertsCall, Stack, cut, stacks
from moefuse.ops.meaning.reference import accumulation_dtype
from moefuse.ops.schema import implement
from moefuse.runtime import dense, overlap as streams, providers
from moefuse.runtime.lasting import kept

Lists = Sequence[Tensor]
Stacks = tuple[Stack, Stack, Stack]

FEW = 2
"""Tokens up to which the weights are read as vectors, in two launches; library products need three and are not quicker."""

_EVERY: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
"""The one expert's number and its weight, for each device and dtype."""


def _beside(x: Tensor, rows: int, overlap: int) -> bool:
    return x.is_cuda and 0 < rows <= overlap and torch.cuda.is_current_stream_capturing() and streams.enabled()


def _every(x: Tensor) -> tuple[Tensor, Tensor]:
    """ids [T, 1] and weights [T, 1] with which every token takes expert 0 as it is."""
    ids, weights = kept(_EVERY, (x.device, x.dtype), x.device, lambda: (x.new_zeros((1, 1), dtype=torch.int32), x.new_ones((1, 1))))
    return ids.expand(x.shape[0], 1), weights.expand(x.shape[0], 1)


def _run(tensors: Lists, counts: Sequence[int], *how: Any) -> Tensor:
    """[T, N]: the one expert."""
    x, *weights = tensors
    if x.is_cuda and x.shape[0] > FEW:
        *body, out_dtype = how
        return _dense(x, stacks(cut(weights, counts)), Body.decode(*body)).to(out_dtype)
    out: Tensor = torch.ops.moefuse.experts_infer.default([x, *_every(x), *weights], counts, *how)
    return out


def _dense(x: Tensor, weights: Stacks, body: Body) -> Tensor:
    """Library products for all tokens: an expert that every token takes leaves nothing to group."""

    def act(gate: Tensor, up: Tensor | None, body: Body) -> Tensor:
        kernels = providers.triton_module("provide.activate") if gate.is_cuda else ""
        quick = not isinstance(kernels, str) and kernels.supports(gate)
        return (kernels if quick else dense).activate(gate, up, body)  # type: ignore[no-any-return, union-attr]

    return dense.one_expert(x, weights, body, 0, act)


def _start(tensors: Lists, counts: Sequence[int], *rest: Any) -> Tensor:
    *how, overlap = rest
    x = tensors[0]
    if not _beside(x, x.shape[0], overlap):
        return _run(tensors, counts, *how)
    return streams.fork(x.device, lambda: _run(tensors, counts, *how))


def _start_fake(tensors: Lists, counts: Sequence[int], *rest: Any) -> Tensor:
    x, *weights = tensors
    *body, _ = rest
    given = [x, x.new_zeros((x.shape[0], 1), dtype=torch.int32), x.new_ones((x.shape[0], 1)), *weights]
    out: Tensor = torch.ops.moefuse.experts_infer.default(given, counts, *body)
    return out


def _join(routed: Tensor, shared: Tensor, weight: Tensor | None, scale: float, inputs: Lists, overlap: int) -> Tensor:
    if _beside(shared, shared.shape[0], overlap):
        streams.meet(shared.device)
    shared = shared.view(routed.shape)
    out = torch.empty(routed.shape, dtype=routed.dtype, device=routed.device)
    factor = None if weight is None else weight.reshape(*routed.shape[:-1], 1)
    if factor is None and shared.dtype == routed.dtype:
        return torch.add(routed, shared, alpha=scale, out=out)
    if factor is not None and shared.dtype == factor.dtype == routed.dtype:
        return torch.addcmul(routed, factor, shared, value=scale, out=out)
    wide = torch.promote_types(accumulation_dtype(routed.dtype), shared.dtype)
    scaled = shared.to(wide) if factor is None else shared.to(wide) * factor.to(wide)
    return out.copy_(routed.to(wide) + scale * scaled)


def _join_fake(routed: Tensor, shared: Tensor, weight: Tensor | None, scale: float, inputs: Lists, overlap: int) -> Tensor:
    if shared.shape[-1] != routed.shape[-1]:
        raise ValueError(f"moefuse::shared_join: {tuple(routed.shape)} and {tuple(shared.shape)} have different features")
    return torch.empty(routed.shape, dtype=routed.dtype, device=routed.device)


def _start_composite(tensors: Lists, counts: Sequence[int], *rest: Any) -> Tensor:
    *how, _ = rest
    x, *weights = tensors
    every = x.new_zeros((x.shape[0], 1), dtype=torch.int64), x.new_ones((x.shape[0], 1))
    return ExpertsCall.unpack([x, *every, *weights], counts, *how).reference()


def _join_composite(routed: Tensor, shared: Tensor, weight: Tensor | None, scale: float, inputs: Lists, overlap: int) -> Tensor:
    wide = torch.promote_types(accumulation_dtype(routed.dtype), shared.dtype)
    scaled = shared.view(routed.shape).to(wide)
    scaled = scaled if weight is None else scaled * weight.reshape(*routed.shape[:-1], 1).to(wide)
    return (routed.to(wide) + scale * scaled).to(routed.dtype)


for _name, _kernel, _fake, _rules in (
    ("shared_start", _start, _start_fake, _start_composite),
    ("shared_join", _join, _join_fake, _join_composite),
):
    implement(_name, kernel=_kernel, fake=_fake, autograd=autograd.not_differentiable(_name), composite=_rules)
