"""Low-rank terms as ``moefuse::experts_extended`` takes them: one A, one B and one scale for each projection.

Several terms of a projection are one of their ranks beside each other. Numbers that only the run knows are multiplied into A, which is
small; so are scales that differ from term to term.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake
from moefuse.passes.ir.expr import Leaf, SharedVector
from moefuse.passes.ir.expr_algebra import LowRank, Number, Projection
from moefuse.passes.lower.operands import Operands

if TYPE_CHECKING:
    from moefuse.passes.match.templates import Body


def terms(low: Operands, body: Body) -> tuple[list[list[Node]], list[float]]:
    """A and B of each projection as the op takes them, and their scales; nothing where no projection has a term."""
    found = [p.terms if p is not None else () for p in body.projections]
    if not any(found):
        return [], []
    made = [_one(low, several) if several else ([], [], 0.0) for several in found]
    return [part for a, b, _ in made for part in (a, b)], [scale for *_, scale in made]


def bias(low: Operands, projection: Projection) -> list[Node]:
    """[[E, n]] or E times [n]: the bias of a projection, with those of its terms in the dtype of its weight."""
    found = low.vectors(projection.bias)
    if not projection.added:
        return found
    parts = [_all(low, found)] if found else []
    for added in projection.added:
        part = _all(low, low.vectors(added.vector))
        numbers = () if added.scale == 1 else (added.scale,)
        for number in (*numbers, *(_number(low, n, part) for n in added.by)):
            part = low.emit(torch.mul, part, number)
        parts.append(part)
    out = parts[0]
    for part in parts[1:]:
        out = low.emit(torch.add, out, part)
    dtype = fake(projection.weight.source).dtype
    return [out if fake(out).dtype == dtype else low.emit(torch.Tensor.to, out, dtype)]


def _all(low: Operands, vectors: list[Node]) -> Node:
    """[E, n] of all experts' vectors."""
    return low.emit(torch.stack, vectors) if fake(vectors[0]).dim() == 1 else vectors[0]


def _one(low: Operands, several: Sequence[LowRank]) -> tuple[list[Node], list[Node], float]:
    """A, B and scale of the terms of one projection."""
    scales = {t.scale for t in several}
    scale = scales.pop() if len(scales) == 1 else 1.0
    firsts = [_scaled(low, t, () if t.scale == scale else (t.scale,)) for t in several]
    lasts = [_factor(low, t.b) for t in several]
    if len(several) == 1:
        return firsts[0], lasts[0], scale
    return _joined(low, firsts, 1), _joined(low, lasts, 2), scale


def _scaled(low: Operands, term: LowRank, numbers: Sequence[float]) -> list[Node]:
    """A times numbers: a stack of all experts if there are any."""
    found = _factor(low, term.a)
    if not numbers and not term.by:
        return found
    out = _stacked(low, found)
    for number in (*numbers, *(_number(low, n, out) for n in term.by)):
        out = low.emit(torch.mul, out, number)
    return [out]


def _number(low: Operands, number: Number, like: Node) -> Node:
    """A number, or one for each expert as [E, 1, ..] in the dtype of ``like`` and with as many dimensions."""
    if isinstance(number, SharedVector):
        return low.shared(number.source)
    value = fake(like)
    return low.emit(torch.reshape, low.numbers(number.vector, value.dtype, value.device), (-1, *[1] * (value.dim() - 1)))


def _stacked(low: Operands, factors: list[Node]) -> Node:
    """[E, m, n] of all experts' factors."""
    return low.emit(torch.stack, factors) if fake(factors[0]).dim() == 2 else factors[0]


def _joined(low: Operands, factors: Sequence[list[Node]], dim: int) -> list[Node]:
    """Factors of several terms beside each other."""
    return [low.emit(torch.cat, [_stacked(low, f) for f in factors], dim)]


def _factor(low: Operands, leaf: Leaf) -> list[Node]:
    """A or B; one matrix for all experts is copied for each, and its gradient is the sum."""
    found = low.stack(leaf)
    if leaf.zeros or not leaf.parts or len(set(leaf.parts)) > 1 or fake(found[0]).dim() > 2:
        return found
    return [low.emit(torch.Tensor.repeat, low.emit(torch.unsqueeze, found[0], 0), (len(leaf.parts), 1, 1))]
