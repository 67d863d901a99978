"""Gradients of a region and of its replacement, on one probe of a region that may be trained: equal values do not mean equal derivatives.

Of what the experts are given: tokens, routing weights, what the sum is added to. Weights get none here, which would take as much memory as
the model; what stands between two products has the gradient of the tokens behind it. Some rows of tokens are zeros, as padding is: there
functions have their kinks.

One number beside a kink may be on the other side of it by a rounding that two right programs do not share. So most rows have to be as near
as sums are, and each has to be no other one altogether.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.graph.applied import Functions
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Gate, SlotWeight, Token, held_leaves, walk
from moefuse.passes.ir.lowrank import in_front
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.surroundings import far, rms, rounding

_EVERY = 4
"""Every how many rows of tokens one is zeros."""
_OTHER = 0.4
"""So far from its size is a row that is another one."""
_FINE = 1e-4
"""Rounding that moves next to no number across a kink."""
_SOME = 0.1
"""The share of rows that coarser rounding may move across a kink."""


class Graded:
    """A probe whose gradients are compared.

    Args:
        leaves: values of the probe by node. ``leaves`` are theirs with rows of zeros, by which gradients are asked for.
    """

    def __init__(self, region: Region, leaves: Mapping[Node, Any]) -> None:
        self.region = region
        self.wanted = {node: leaves[node] for node in _differentiated(region) if isinstance(leaves.get(node), Tensor)}
        own = {id(value): _with_zeros(region, node, value).requires_grad_() for node, value in self.wanted.items()}
        self.leaves = {node: own.get(id(value), value) for node, value in leaves.items()}

    def differ(self, original: Tensor, fused: Tensor, generator: torch.Generator) -> str:
        """Which gradient is another one, or an empty text."""
        if not self.wanted or not original.requires_grad:
            return ""
        given = [self.leaves[node] for node in self.wanted]
        grad = torch.randn(original.shape, generator=generator).to(original)
        with torch.autocast(original.device.type, enabled=False):  # as programs run backward: outside of the autocast around their model
            theirs = torch.autograd.grad(original, given, grad, allow_unused=True)
            ours: tuple[Tensor | None, ...] = (None,) * len(given)
            if fused.requires_grad:
                ours = torch.autograd.grad(fused, given, grad.reshape(fused.shape).to(fused), allow_unused=True)
        eps = rounding(self.region, original)
        for node, *pair in zip(self.wanted, theirs, ours, strict=True):
            rows = self._rows(node, self.leaves[node].detach()).double()
            a, b = (torch.zeros_like(rows) if g is None else self._chosen(node, rows, g.reshape(rows.shape).double()) for g in pair)
            scale = math.sqrt(original.shape[-1]) if rows.shape[-1] == 1 else 1.0
            usual = scale * rms(grad.double()) * rms(original.detach().double()) / (rms(rows) + 1e-30)
            if problem := _unlike(a, b, eps, usual):
                return f"the gradient of `{node.name}` is another one: {problem}"
        return ""

    def _chosen(self, node: Node, rows: Tensor, grad: Tensor) -> Tensor:
        """Of a routing table the gradients of experts that are chosen: what the others have ends in the constant that fills it."""
        table = any(isinstance(e, Gate) and e.source is node and not e.slots for e in walk(self.region.expr))
        return torch.where(rows > 0, grad, 0.0) if table else grad

    def _rows(self, node: Node, value: Tensor) -> Tensor:
        width = next((e.width for e in walk(self.region.expr) if isinstance(e, Token) and e.source is node), None)
        if width is None:
            width = value.shape[-1] if node is self.region.base and value.dim() else 1
        return value.reshape(-1, width)


def comparable(ctx: Context, region: Region) -> bool:
    """Whether the gradients of a region may be asked for, and are those of its operations.

    Where activations are rounded to codes they are none, and functions with a backward pass of their own are proved in ``backward.py``.
    """
    expr = region.expr
    own = any(not region.nodes.isdisjoint(f.nodes) for f in ctx.scratch(Functions).found)
    return region.trained and not own and not in_front(expr) and not held_leaves(expr)


def _differentiated(region: Region) -> list[Node]:
    """What the experts are given that may have a gradient."""
    given = [e.source for e in walk(region.expr) if isinstance(e, Token | SlotWeight) or (isinstance(e, Gate) and not e.ones)]
    given += [] if region.base is None else [region.base]
    return [n for n in dict.fromkeys(given) if (v := tensor(n)) is not None and v.requires_grad and v.is_floating_point()]


def _with_zeros(region: Region, node: Node, value: Tensor) -> Tensor:
    """A copy, of tokens with some rows of zeros."""
    copy = value.detach().clone()
    width = next((e.width for e in walk(region.expr) if isinstance(e, Token) and e.source is node), None)
    if width is not None and copy.is_contiguous():
        copy.view(-1, width)[_EVERY - 1 :: _EVERY] = 0
    return copy


def _unlike(theirs: Tensor, ours: Tensor, eps: float, usual: float) -> str:
    """How far rows of gradients are apart, where that is too far. ``usual``: their size but for what cancels, and is rounding alone."""
    known = torch.isfinite(theirs).all(-1, keepdim=True)
    a, b = (torch.where(known, of, 0.0) for of in (theirs, ours))
    size = a.square().mean(-1).sqrt().clamp(min=0.1 * max(rms(a), usual)) + 1e-30
    part = (a - b).square().mean(-1).sqrt() / size
    if not part.numel():
        return ""
    if not float(part.median()) <= 2 * far(eps):
        return f"rows differ by {float(part.median()):.2e} of their size"
    others = part > _OTHER
    allowed = 0 if eps < _FINE else int(_SOME * len(part))
    zeros = others[_EVERY - 1 :: _EVERY] if a.shape[-1] > 1 else others[:0]
    if int(others.sum()) > allowed or bool(zeros.any()):
        return f"{int(others.sum())} of {len(part)} rows differ by up to {float(part.max()):.2e} of their size"
    return ""
