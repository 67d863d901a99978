"""Low-rank terms beside a projection (LoRA, arXiv:2106.09685): ``linear(x, W) + s * linear(linear(x, A), B)`` is one projection.

The base and its terms start at the same expression, up to casts that round and, in training, a dropout in front of A. A bias behind B is
one of the projection, with the scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Leaf, Linear, Op, SharedVector, walk
from moefuse.passes.ir.expr_algebra import Added, LowRank, Number, Projection, bare, factors, projection, same_expr, size


@dataclass(frozen=True, eq=False)
class Adapted:
    """A projection with its low-rank terms. ``linears``: every product of it, the base first, then A and B of each term."""

    projection: Projection
    linears: tuple[Linear, ...]


def adapted(expr: Any) -> Adapted | None:
    """A sum of one base product, low-rank products of the same rows and biases; None if the expression is anything else.

    Without terms it has one bias at most.
    """
    base: Linear | None = None
    biases: list[Leaf] = []
    added: list[Added] = []
    found: list[_Term] = []
    for part in _addends(expr):
        term = _term(part)
        if term is not None:
            found.append(term)
            added += [] if term.added is None else [term.added]
        elif isinstance(part, Linear) and base is None:
            base = part
        elif isinstance(part, ExpertVector):
            biases.append(part.vector)
        else:
            return None
    if base is None or not all(_fits(base, term.term, term.child) for term in found) or (len(biases) > 1 and not found):
        return None
    added += map(Added, biases[1:])
    if not all(_per_feature(a.vector, base.weight) for a in added):
        return None
    linears = (base, *(linear for term in found for linear in term.linears))
    terms = tuple(term.term for term in found)
    return Adapted(Projection(base.weight, next(iter(biases), None), base.child, terms, tuple(added)), linears)


def _per_feature(vector: Leaf, weight: Leaf) -> bool:
    """Whether a bias has as many numbers as its projection has results: no other is spread over them."""
    value = tensor(vector.source)
    return value is not None and bool(value.dim()) and shape_of(value)[-1] == size(weight, 0)


def with_terms(expr: Any) -> Projection | None:
    """As ``projection``, with low-rank terms."""
    found = adapted(expr)
    return None if found is None else found.projection


def adapters(expr: Expr) -> list[Adapted]:
    """The projections of an expression that have low-rank terms."""
    whole: dict[int, Adapted] = {}
    for e in walk(expr):
        found = adapted(e) if isinstance(e, Op) and e.name == "add" else None
        if found is None or not found.projection.terms:
            continue
        known = whole.get(id(found.linears[0]))
        if known is None or len(found.linears) > len(known.linears):
            whole[id(found.linears[0])] = found
    return list(whole.values())


def low_rank_products(expr: Expr) -> int:
    """How many products ``linear(linear(x, A), B)`` an expression has, of one expert or of all, whatever they are added to."""
    return sum(isinstance(e, Linear) and _term(e) is not None for e in walk(expr))


def in_front(expr: Expr) -> set[int]:
    """The ids of dropouts of an expression that stand in front of an A and nowhere else, each of one place in the tree: it draws once."""
    found = [e for e in walk(expr) if isinstance(e, Op) and e.name == "dropout"]
    drops = {id(e) for e in found if sum(other.node is e.node for other in found) == 1}
    first = {id(linear) for a in adapters(expr) for linear in a.linears[1::2]}
    readers = [(e, _through(c)) for e in walk(expr) if not _looked_through(e) for c in e.children]
    return {d for d in drops if all(id(e) in first for e, seen in readers if d in seen)}


def _looked_through(expr: Expr) -> bool:
    return isinstance(expr, Cast) and expr.rounds


def _through(expr: Expr) -> set[int]:
    found = {id(expr)}
    while isinstance(expr, Cast) and expr.rounds:
        expr = expr.child
        found.add(id(expr))
    return found


def _addends(expr: Any) -> list[Any]:
    expr = bare(expr)
    if isinstance(expr, Op) and expr.name == "add" and len(expr.args) == 2 and not expr.kwargs:
        return [*_addends(expr.args[0]), *_addends(expr.args[1])]
    return [expr]


def _scaled(expr: Any) -> tuple[float, tuple[Number, ...], Any]:
    """The numbers of a product, those that the graph computes, and its one other factor (or the expression, if there are several)."""
    found = factors(expr)
    numbers = [f for f in found if isinstance(f, int | float)]
    by = tuple(f for f in found if isinstance(f, SharedVector | ExpertVector) and _is_number(f))
    rest = [f for f in found if isinstance(f, Expr) and f not in by]
    alone = len(rest) == 1 and len(numbers) + len(by) + 1 == len(found)
    return (float(math.prod(numbers)), by, rest[0]) if alone else (1.0, (), bare(expr))


def _is_number(vector: Number) -> bool:
    """Whether it is a number that the graph computes: one for all experts, or one for each that is of its own."""
    nodes = (vector.source,) if isinstance(vector, SharedVector) else vector.vector.parts
    return bool(nodes) and all(is_number(fake(node)) for node in nodes)


def is_number(value: object) -> bool:
    """Whether a value that torch recorded is one real number: a tensor without dimensions, or of Python's."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype.is_floating_point
    return isinstance(value, torch.SymFloat | torch.SymInt)


@dataclass(frozen=True, eq=False)
class _Term:
    """A term, the rows that A is applied to, the two products, and what is added with it."""

    term: LowRank
    child: Expr
    linears: tuple[Linear, Linear]
    added: Added | None


def _term(expr: Any) -> _Term | None:
    """``s * linear(linear(x, A), B)``, or with a bias behind B."""
    outer, first, b = _scaled(expr)
    added: Added | None = None
    if isinstance(b, Op) and (behind := projection(b)) is not None and behind.bias is not None:
        added = Added(behind.bias, outer, first)
        b = next(part for part in _addends(b) if isinstance(part, Linear))
    if not isinstance(b, Linear):
        return None
    middle, second, a = _scaled(b.child)
    if not isinstance(a, Linear):
        return None
    inner, third, child = _scaled(a.child)
    dropout = 0.0
    if isinstance(child, Op) and child.name == "dropout":
        dropout = float(child.args[1])
        more, fourth, child = _scaled(child.args[0])
        inner, third = inner * more, (*third, *fourth)
    term = LowRank(a.weight, b.weight, outer * middle * inner, dropout, (*first, *second, *third))
    return _Term(term, child, (a, b), added) if thin([(a.weight, b.weight)]) else None


def thin(terms: Sequence[tuple[Leaf, Leaf]]) -> bool:
    """Whether the ranks of A and B (each pair a term) are together at most half of the smaller side: else the sum is cheaper."""
    return 2 * sum(size(a, 0) for a, _ in terms) <= min(n for a, b in terms for n in (size(a, 1), size(b, 0)))


def _fits(base: Linear, term: LowRank, child: Expr) -> bool:
    shapes = size(base.weight, 1) == size(term.a, 1) and size(base.weight, 0) == size(term.b, 0)
    return shapes and same_expr(base.child, child)
