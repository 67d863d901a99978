"""Which known expert an expression is: gated or plain, which activation, which half is the gate, where the weight goes.

A template compares what is computed, where gradients are wanted those too. Casts up to float32 around pointwise code are looked through:
the fused op does that part in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moefuse.passes.graph.calls import tensor
from moefuse.passes.ir.expr import Expr, Slice, Token
from moefuse.passes.ir.expr_algebra import (
    Projection,
    bare,
    one_weight,
    projection,
    same_expr,
    same_projection,
    split_weight,
)
from moefuse.passes.ir.lowrank import thin, with_terms
from moefuse.passes.match.activations import gate_and_up
from moefuse.passes.match.derivatives import same_derivative
from moefuse.spec import Gating

Find = Callable[[Any], Projection | None]


@dataclass(frozen=True, eq=False)
class Body:
    """An expert that the fused op knows."""

    token: Token
    weight: Expr | None
    weight_on_input: bool
    first: Projection
    up: Projection | None
    last: Projection
    gating: Gating
    up_first: bool
    activation: str
    arguments: tuple[float, ...]

    @property
    def projections(self) -> tuple[Projection | None, Projection | None, Projection | None]:
        """The projections by w_in, w_up and w_out."""
        return self.first, self.up, self.last


WITH_TERMS = ("cpu", "cuda")
"""Devices where one op takes terms. Elsewhere its portable provider would wait for the host."""


def one_op(expr: Expr, device: torch.device, trained: bool) -> Body | None:
    """The template of a body that one op of this device takes: in one dtype, with low-rank terms beside a projection that are one."""
    body = match(expr, trained=trained)
    if body is None and device.type in WITH_TERMS:
        body = match(expr, with_terms, trained=trained)
    found = [p for p in body.projections if p is not None] if body is not None else []
    sources = [leaf.source for p in found for leaf in (p.weight, p.bias) if leaf is not None and leaf.held is None]
    one_dtype = bool(found) and len({None if (value := tensor(source)) is None else value.dtype for source in sources}) <= 1
    return body if one_dtype and all(map(_one_term, found)) else None


def _one_term(found: Projection) -> bool:
    """Whether the terms of a projection are one of their ranks together, or none."""
    return not found.terms or (thin([(t.a, t.b) for t in found.terms]) and not any(t.dropout for t in found.terms))


def match(expr: Expr, find: Find = projection, *, trained: bool) -> Body | None:
    """The template of one row's contribution, or None (then the grouped tier replays the user's own code).

    ``find``: which projections are one; ``with_terms`` for those that have low-rank terms. ``trained``: gradients may be recorded.
    """
    core, outer = split_weight(expr)
    last = find(core)
    if last is None:
        return None
    activated = gate_and_up(bare(last.child), find)
    if activated is None:
        return None
    activation, arguments, gate, up = activated
    if trained and not same_derivative(last.child, gate, up, activation, arguments):
        return None
    stored = storage(gate, up, find)
    if stored is None:
        return None
    gating, up_first, first, second = stored
    source, inner = split_weight(first.child)
    token = bare(source)
    if not isinstance(token, Token) or (inner and outer):
        return None
    single, weight = one_weight(inner or outer)
    if not single:
        return None
    return Body(token, weight, bool(inner), first, second, last, gating, up_first, activation, arguments)


def storage(gate: Any, up: Any, find: Find = projection) -> tuple[Gating, bool, Projection, Projection | None] | None:
    """How gate and up projection are stored."""
    gate, up = bare(gate), bare(up)
    if up is None:
        found = find(gate)
        return None if found is None else ("plain", False, found, None)
    if isinstance(gate, Slice) and isinstance(up, Slice):
        one, two = find(gate.child), find(up.child)
        if one is None or two is None or not same_projection(one, two) or gate.length != up.length or gate.of != 2 * gate.length:
            return None
        places = ((gate.start, gate.step), (up.start, up.step))
        half = gate.length
        if places in (((0, 1), (half, 1)), ((half, 1), (0, 1))) and half > 1:
            return "merged", gate.start != 0, one, None
        if places in (((0, 2), (1, 2)), ((1, 2), (0, 2))):
            return "interleaved", gate.start != 0, one, None
        return None
    one, two = find(gate), find(up)
    if one is None or two is None or not same_expr(one.child, two.child) or one.biased != two.biased:
        return None
    return "split", False, one, two
