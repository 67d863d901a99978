"""A router as operations with one meaning, ``moefuse::topk``, ``route`` and ``router_logits``: fakes, registration, gradient.

``torch.topk`` leaves open which of two equal scores comes first, and the order under ``sorted=False``; the op does not, so that its kernels
agree with each other and from run to run. It is defined by ``moefuse/ops/meaning/reference.py``.

``route`` is all that a router does with its logits (``ops/meaning/recipe.py``), and ``router_logits`` the product in front of it, for
which factors of 16 bits need no copies in float32. Both are for inference.

In a graph for Inductor the call of a Triton kernel takes the op's place, so that it is launched by Inductor's code, not through Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse._torch_private import when_functionalized
from moefuse.ops.autograd import below_autograd, not_differentiable, ops, wants_grad
from moefuse.ops.meaning.checks import check_route, check_router_logits, check_topk
from moefuse.ops.meaning.recipe import Recipe, route_reference
from moefuse.ops.meaning.reference import router_logits_reference, topk_reference
from moefuse.ops.schema import LIBRARY, implement
from moefuse.runtime import providers

_INFERENCE = "has no gradient; it is for inference"


def _topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_topk(scores, k)
    out: tuple[Tensor, Tensor] = providers.run("topk", scores, k)
    return out


def _topk_fake(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    check_topk(scores, k)
    shape = (*scores.shape[:-1], k)
    return scores.new_empty(shape), scores.new_empty(shape, dtype=torch.int64)


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
        with below_autograd():
            values, ids = ops.topk.default(scores, k)
        ctx.mark_non_differentiable(ids)
        ctx.shape = scores.shape
        ctx.save_for_backward(ids)
        return values, ids

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        # Positions are distinct in a row, so nothing is added up and the result is exact.
        return grad.new_zeros(ctx.shape).scatter(-1, ids, grad), None


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Autograd entry of ``moefuse::topk``: scores [..., E] to values and ids [..., k]."""
    if wants_grad((scores,)):
        return _TopK.apply(scores, k)  # type: ignore[no-any-return,no-untyped-call]
    with below_autograd():
        return ops.topk.default(scores, k)  # type: ignore[no-any-return]


def _route(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, out_dtype = rest
    recipe = Recipe(*fields)
    check_route(logits, bias, recipe, out_dtype)
    out: tuple[Tensor, Tensor] = providers.run("route", logits, bias, recipe, out_dtype)
    return out


def _route_fake(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, out_dtype = rest
    recipe = Recipe(*fields)
    check_route(logits, bias, recipe, out_dtype)
    shape = (*logits.shape[:-1], recipe.k)
    return logits.new_empty(shape, dtype=out_dtype), logits.new_empty(shape, dtype=torch.int64)


def _route_traced(logits: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    *fields, out_dtype = rest
    traced = providers.select("route", logits, bias, Recipe(*fields), out_dtype).traced
    return None if traced is None else lambda logits, bias, *rest: traced(logits, bias, Recipe(*fields), out_dtype)


def _logits(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    check_router_logits(x, w, bias, out_dtype)
    out: Tensor = providers.run("router_logits", x, w, bias, out_dtype)
    return out


def _logits_fake(x: Tensor, w: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    check_router_logits(x, w, bias, out_dtype)
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=out_dtype)


def _route_composite(logits: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    *fields, out_dtype = rest
    return route_reference(logits, bias, Recipe(*fields), out_dtype)


implement(
    "router_logits",
    kernel=_logits,
    fake=_logits_fake,
    autograd=not_differentiable("router_logits", _INFERENCE),
    composite=router_logits_reference,
)
when_functionalized("moefuse::router_logits", LIBRARY, lambda *args: providers.select("router_logits", *args).traced)
implement("route", kernel=_route, fake=_route_fake, autograd=not_differentiable("route", _INFERENCE), composite=_route_composite)
when_functionalized("moefuse::route", LIBRARY, _route_traced)
implement("topk", kernel=_topk, fake=_topk_fake, autograd=topk, composite=topk_reference)
when_functionalized("moefuse::topk", LIBRARY, lambda *args: providers.select("topk", *args).traced)
