"""Whether the product of a class's own is one with unpacked weights and nothing else, and its backward pass the gradient of that.

What it does is followed operation by operation (``followed.py``), for few rows and many; what a gradient is multiplied by is seen on unit
vectors, as forward shows the weight. Numbers as large and as small as a dtype has, infinite ones and none are tried besides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moefuse.passes.encodings.followed import BIAS, CODES, GRADIENT, ROWS, SCALES, Followed, following
from moefuse.passes.encodings.inner import inner
from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.encodings.tried import multiplied, rows_of
from moefuse.passes.encodings.weighed import Weighed

_ROWS = (8, 1, 128)
"""How many are tried at once: a class may have one kernel for a single row, and another for many."""
_SOME = 48
_ABOVE_TINY = 1 << 20
"""So many times the smallest number that a device need not flush to zero are small numbers."""


def wants_gradient(weighed: Weighed) -> bool:
    """Whether the program's product has rows that get a gradient."""
    return bool(weighed.ctx.mode[weighed.product.reader].grad and rows_of(weighed.ctx, weighed.product)[0].requires_grad)


def refuse_more(weighed: Weighed, value: Any) -> None:
    """Raises where the product of a weight does more with rows, or with their gradients, than to multiply them by what is unpacked."""
    trained = wants_gradient(weighed)
    bias = rows_of(weighed.ctx, weighed.product)[1]
    size = _inputs(weighed, value)
    for count in _ROWS:
        rows = torch.ones(count, size, dtype=weighed.dtype, device=weighed.device).requires_grad_(trained)
        added = None if bias is None else torch.ones(bias.shape, dtype=bias.dtype, device=weighed.device)
        if added is not None and trained:
            added.requires_grad_(bias.requires_grad)
        _refuse_more(weighed, value, rows, added)


def _inputs(weighed: Weighed, value: Any) -> int:
    return int(value.shape[weighed.order[-1]])


def _refuse_more(weighed: Weighed, value: Any, rows: Tensor, bias: Tensor | None) -> None:
    node, ctx = weighed.node, weighed.ctx
    followed = Followed(rows.dtype, weighed.dtype)
    with following(followed) as start, torch.set_grad_enabled(rows.requires_grad):
        start(rows, ROWS)
        if bias is not None:
            start(bias, BIAS)
        for one in inner(value):
            start(one.value, CODES if one.value.dtype.itemsize == 1 or not one.value.dtype.is_floating_point else SCALES)
        found = multiplied(ctx, weighed.product, weighed.source, value, rows, 0, bias=bias, grad=rows.requires_grad)
        made = followed.made(found)
        if made.odd or followed.asked or ROWS not in made.of:
            raise UnreadError(node, f"their own product is more than one with unpacked weights: {_named(made.odd, followed)}")
        if not rows.requires_grad:
            return
        if not found.requires_grad:
            raise UnreadError(node, "their own product gives rows no gradient")
        given = torch.ones_like(found)
        start(given, GRADIENT)
        (got,) = torch.autograd.grad(found, rows, given, allow_unused=True)
        made = None if got is None else followed.made(got)
    if made is None:
        raise UnreadError(node, "their own product gives rows no gradient")
    if made.odd or followed.asked or GRADIENT not in made.of or ROWS in made.of:
        raise UnreadError(node, f"the backward pass of their own product is more than a product: {_named(made.odd, followed)}")


def _named(odd: str, followed: Followed) -> str:
    return odd or (f"it asks for numbers: {followed.asked}" if followed.asked else "it gives what it does not compute")


def refuse_another_gradient(weighed: Weighed, value: Any, weight: Tensor) -> None:
    """Raises where gradients of rows are not products with the weight [N, K] of the first expert."""
    if not wants_gradient(weighed):
        return
    features = torch.linspace(0, len(weight) - 1, min(len(weight), _SOME), device="cpu").round().long().unique().to(weight.device)
    rows = torch.zeros(len(features), weight.shape[1], dtype=weighed.dtype, device=weighed.device).requires_grad_()
    with torch.enable_grad():
        found = multiplied(weighed.ctx, weighed.product, weighed.source, value, rows, 0, grad=True)
        given = torch.zeros_like(found)
        given[range(len(features)), features] = 1
        (got,) = torch.autograd.grad(found, rows, given)
    wanted = weight[features].double()
    off = (got.double() - wanted).abs()
    if not bool((off <= torch.finfo(weighed.dtype).eps * wanted.abs()).all()):
        apart = float((off / (wanted.abs() + 1e-30)).max())
        why = "multiplies by other numbers than its forward pass"
        raise UnreadError(weighed.node, f"the backward pass of their own product {why} (apart by {apart:.1e})")


def refuse_limited(weighed: Weighed, value: Any, weight: Tensor, size: float) -> None:
    """Raises where rows of numbers as large and small as there are, of infinite ones and of none, give something else than their products.

    Args:
        weight: [N, K], what the first expert has.
        size: of its codes, which the class may multiply by before it scales.
    """
    info = torch.finfo(weighed.dtype)
    base = torch.linspace(-1, 1, weight.shape[1], device=weighed.device)
    most = max(float(weight.double().abs().max()), size, 1.0) * weight.shape[1]
    large, small = 0.25 * info.max / most, info.tiny * _ABOVE_TINY
    rows = torch.stack([base.double() * large, base.double() * small, base.double(), base.double(), base.double()])
    rows[2, 0], rows[3, -1], rows[4, 0] = torch.inf, -torch.inf, torch.nan
    rows = rows.to(weighed.dtype)
    found = multiplied(weighed.ctx, weighed.product, weighed.source, value, rows, 0)
    wanted = rows.double() @ weight.double().T
    for got, right in zip(found.double(), wanted, strict=True):
        if right.isfinite().all():
            bound = max(2.0**-6, 16 * torch.finfo(found.dtype).eps) * right.square().mean().sqrt() + weight.shape[1] * info.tiny
            alike = bool(((got - right).abs() <= bound).all())
        else:
            alike = bool((got.isfinite() == right.isfinite()).all())
        if not alike:
            raise UnreadError(weighed.node, "their own product does something else with numbers that are very large or small, or none")


__all__ = ["refuse_another_gradient", "refuse_limited", "refuse_more", "wants_gradient"]
