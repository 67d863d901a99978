"""``moefuse::bounded_experts``: experts on several ranks that keep for backward the rows which came, and not those that might have come.

P ranks' tokens arrive, R = P * M rows with K slots each, of which this rank has about the P-th part. What training keeps of
``moefuse::experts``, h [R * K, 2I], is for the worst case. Here that is cut to its first rows, which are all there are (h is sorted), right
behind the experts, and put back before their gradients: one layer at a time has the worst case, all others what is said by ``bound``.

A number: so many times an even share of the slots. If more came, gradients of this rank's experts and of their tokens are NaN, and the next
dispatch over the mesh raises (``runtime/overflow.py``). ``"exact"``: as many as came, for which the host waits once a layer; ``room(ids)``
[n] says so, a tensor of n bytes, since a compiler has to see in the graph where a size that depends on data is from.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from moefuse.ops.autograd import below_autograd, experts_by, gradients, not_differentiable, ops
from moefuse.ops.experts import composite, fake, kernel
from moefuse.ops.schema import implement
from moefuse.runtime import overflow
from moefuse.runtime.groups import Terms

_PARTS = 1024
"""A share is counted in such parts, so that a number of rows that only the run knows stays an expression of integers."""


def rows_kept(slots: Any, terms: Terms) -> Any:
    """How many of ``slots`` rows are kept: so many times the even share of a rank as ``bound`` says."""
    share = min(math.ceil(float(terms.bound) * _PARTS / terms.group.size), _PARTS)
    return (slots * share + _PARTS - 1) // _PARTS


def _room(ids: Tensor) -> Tensor:
    return ids.new_empty((int((ids >= 0).sum()),), dtype=torch.uint8)


def _room_fake(ids: Tensor) -> Tensor:
    count: Any = torch.library.get_ctx().new_dynamic_size(min=0)
    return ids.new_empty((count,), dtype=torch.uint8)


def _keep(h: Tensor, offsets: Tensor, room: Tensor | None, terms: str, layer: str) -> Tensor:
    if room is not None:
        return h[: room.shape[0]].clone()
    known, needed = Terms.parse(terms), offsets[-1]
    count = rows_kept(h.shape[0], known)
    overflow.watch(known, layer, needed, count)
    return torch.where(needed > count, h.new_full((), float("nan")), h[:count])


def _keep_fake(h: Tensor, offsets: Tensor, room: Tensor | None, terms: str, layer: str) -> Tensor:
    count = rows_kept(h.shape[0], Terms.parse(terms)) if room is None else room.shape[0]
    return h.new_empty((count, *h.shape[1:]))


def _restore(kept: Tensor, order: Tensor) -> Tensor:
    """[S, 2I]: behind the rows that were kept nothing is read, but on the CPU all are computed with."""
    made = kept.new_empty if kept.is_cuda else kept.new_zeros
    h: Tensor = made((order.shape[0], *kept.shape[1:]))
    h[: len(kept)] = kept
    return h


def _restore_fake(kept: Tensor, order: Tensor) -> Tensor:
    return kept.new_empty((order.shape[0], *kept.shape[1:]))


def _kernel(*data: Any, terms: str, layer: str, room: Tensor | None = None, **options: Any) -> Tensor:
    return kernel(*data, **options)


def _fake(*data: Any, terms: str, layer: str, room: Tensor | None = None, **options: Any) -> Tensor:
    return fake(*data, **options)


class _Bounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, how: tuple[Tensor | None, str, str], counts: list[int], body: tuple[Any, ...], out_dtype: torch.dtype, *tensors: Tensor
    ) -> Tensor:
        with below_autograd():
            out, h, order, offsets = ops.experts_forward.default(tensors, counts, *body, out_dtype)
            kept = ops.keep_rows.default(h, offsets, *how)
        x, _, weights, *flat = tensors
        ctx.counts, ctx.body = counts, body
        ctx.save_for_backward(x, weights, kept, order, offsets, *flat)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weights, kept, order, *rest = ctx.saved_tensors
        saved = (x, weights, ops.restore_rows.default(kept, order), order, *rest)
        return None, None, None, None, *gradients(grad, saved, ctx.counts, ctx.body, ctx.needs_input_grad[4:])


def bounded_experts(*data: Any, terms: str, layer: str, room: Tensor | None = None, **options: Any) -> Tensor:
    """Autograd entry of ``moefuse::bounded_experts``."""
    return experts_by(_Bounded, ((room, terms, layer),), *data, **options)


def _composite(*data: Any, terms: str, layer: str, room: Tensor | None = None, **options: Any) -> Tensor:
    return composite(*data, **options)


implement("bounded_experts", kernel=_kernel, fake=_fake, autograd=bounded_experts, composite=_composite)
implement("room", kernel=_room, fake=_room_fake, autograd=None)
implement("keep_rows", kernel=_keep, fake=_keep_fake, autograd=not_differentiable("keep_rows"))
implement("restore_rows", kernel=_restore, fake=_restore_fake, autograd=not_differentiable("restore_rows"))
