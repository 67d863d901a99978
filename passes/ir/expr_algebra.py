"""Products in an expression: factors, routing weights among them, projections, and when two expressions are the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moefuse.passes.graph.calls import tensor
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Gate, Held, Leaf, Linear, Op, SharedVector, Slice, SlotWeight, Token

Number = SharedVector | ExpertVector
"""A real number that the graph computes, for all experts or for each."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """``scale * B @ A``, with A (r, in) and B (out, r) of each expert.

    ``dropout``: the probability in front of A. ``by``: numbers that the graph computes, which scale it as well.
    """

    a: Leaf
    b: Leaf
    scale: float
    dropout: float = 0.0
    by: tuple[Number, ...] = ()

    @property
    def rank(self) -> int:
        """r."""
        return size(self.a, 0)


def size(leaf: Leaf, which: int) -> int:
    """Output (0) or input (1) features of a projection's weight."""
    value = tensor(leaf.source)
    if value is None:
        return 0
    if leaf.held is not None and leaf.held.shape is not None:
        return leaf.held.shape[which]
    shape = tuple(value.shape[d] for d in leaf.order)
    return int((shape if leaf.held is None else leaf.held.encoding.logical(shape))[which])


@dataclass(frozen=True, eq=False)
class Added:
    """``scale * vector``, a bias that comes with a low-rank term. ``by``: numbers that the graph computes, which scale it as well."""

    vector: Leaf
    scale: float = 1.0
    by: tuple[Number, ...] = ()


@dataclass(frozen=True, eq=False)
class Projection:
    """One expert projection, its bias, low-rank terms beside its weight, and what these add to the bias."""

    weight: Leaf
    bias: Leaf | None
    child: Expr
    terms: tuple[LowRank, ...] = ()
    added: tuple[Added, ...] = ()

    @property
    def biased(self) -> bool:
        """Whether anything is added behind the products."""
        return self.bias is not None or bool(self.added)


def bare(expr: Any) -> Any:
    """An expression without casts that round."""
    while isinstance(expr, Cast) and expr.rounds:
        expr = expr.child
    return expr


def factors(expr: Any) -> list[Any]:
    """The factors of a product."""
    expr = bare(expr)
    if isinstance(expr, Op) and expr.name == "mul" and len(expr.args) == 2 and not expr.kwargs:
        return [*factors(expr.args[0]), *factors(expr.args[1])]
    return [expr]


def is_weight(expr: Any) -> bool:
    """Whether a factor is the routing weight (or the mask) of a row."""
    return isinstance(expr, SlotWeight | Gate)


def split_weight(expr: Any) -> tuple[Any, list[Any]]:
    """A product taken apart into the one factor that is not a routing weight, and the weights. The first is None if there are several."""
    found = factors(expr)
    rest = [f for f in found if not is_weight(f)]
    weights = [f for f in found if is_weight(f)]
    if len(rest) != 1:
        return (expr, []) if not weights else (None, weights)
    return rest[0], weights


def one_weight(weights: list[Any]) -> tuple[bool, Any]:
    """(whether at most one weight is more than a 0/1 mask, that weight or a mask or None)."""
    real = [w for w in weights if not (isinstance(w, Gate) and w.ones)]
    if len(real) > 1:
        return False, None
    return True, real[0] if real else weights[0] if weights else None


def projection(expr: Any) -> Projection | None:
    """``linear(child)`` with or without a bias."""
    expr = bare(expr)
    if isinstance(expr, Linear):
        return Projection(expr.weight, None, expr.child)
    if isinstance(expr, Op) and expr.name == "add" and len(expr.args) == 2 and not expr.kwargs:
        for a, b in (expr.args, expr.args[::-1]):
            inside = bare(a)
            if isinstance(inside, Linear) and isinstance(bare(b), ExpertVector):
                return Projection(inside.weight, bare(b).vector, inside.child)
    return None


def same_projection(a: Projection, b: Projection) -> bool:
    base = same_leaf(a.weight, b.weight) and same_leaf(a.bias, b.bias) and same_expr(a.child, b.child)
    if not base or (len(a.terms), len(a.added)) != (len(b.terms), len(b.added)):
        return False
    return all(map(_same_term, a.terms, b.terms)) and all(map(_same_added, a.added, b.added))


def _same_term(a: LowRank, b: LowRank) -> bool:
    return same_leaf(a.a, b.a) and same_leaf(a.b, b.b) and (a.scale, a.dropout) == (b.scale, b.dropout) and _same_by(a.by, b.by)


def _same_added(a: Added, b: Added) -> bool:
    return same_leaf(a.vector, b.vector) and a.scale == b.scale and _same_by(a.by, b.by)


def _same_by(a: tuple[Number, ...], b: tuple[Number, ...]) -> bool:
    return len(a) == len(b) and all(map(same_expr, a, b))


def same_leaf(a: Leaf | None, b: Leaf | None) -> bool:
    """Whether two leaves are the same weight."""
    if a is None or b is None:
        return a is b
    if (a.order, a.stacked, a.detached, a.zeros) != (b.order, b.stacked, b.detached, b.zeros):
        return False
    if a.held is not None and b.held is not None and not _same_held(a.held, b.held):
        return False
    return a.source is b.source and a.parts == b.parts and (a.held is None) == (b.held is None)


def _same_held(a: Held, b: Held) -> bool:
    return a.how == b.how and all(map(same_leaf, a.leaves, b.leaves))


def same_expr(a: Any, b: Any) -> bool:
    """Whether two expressions compute the same value."""
    a, b = bare(a), bare(b)
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    match a:
        case Token():
            return a.source is b.source and a.by_slot == b.by_slot
        case SlotWeight():
            return a.source is b.source
        case Gate():
            return a.ones == b.ones and (a.ones or a.source is b.source)
        case Linear():
            return same_leaf(a.weight, b.weight) and same_expr(a.child, b.child)
        case ExpertVector():
            return same_leaf(a.vector, b.vector)
        case Slice():
            return (a.start, a.step, a.length, a.of) == (b.start, b.step, b.length, b.of) and same_expr(a.child, b.child)
        case Op():
            pairs = zip((*a.args, *a.options.values()), (*b.args, *b.options.values()), strict=False)
            return (
                a.name == b.name
                and len(a.args) == len(b.args)
                and a.options.keys() == b.options.keys()
                and all(same_expr(x, y) for x, y in pairs)
            )
        case Expr():
            return getattr(a, "source", None) is getattr(b, "source", a)
    return bool(a == b)
