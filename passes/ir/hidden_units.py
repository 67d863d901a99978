"""Which dimensions of an expert's weights its hidden units are: those that each unit has of its own, between two projections.

    y = sum over hidden units of last[:, u] f_u(first[u, :] x, ..)   +  what is added behind the sum

Some of the units give a part of the sum, whatever ``f`` does with a unit's own numbers. Nothing else is accepted: a function of all units
of a token (a norm, a softmax), one of the sum, or a second sum inside of the first.
"""

from __future__ import annotations

from typing import Any

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.op_classes import BINARY, CONDITIONS, PICKS, TERNARY, UNARY
from moefuse.passes.graph.sizes import same
from moefuse.passes.graph.slices import NotLocalError, UnevenError
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Gate, Leaf, Linear, Op, Slice, SlotWeight, weight_leaves

_OF_EACH_UNIT = frozenset((*UNARY, *BINARY, *TERNARY)) | CONDITIONS | PICKS

Units = tuple[int, int]
"""Of one expert's weight as it is held: the dimension, and how often the units stand in it one behind the other."""


class Hidden:
    """The hidden units of an expression.

    Attributes:
        units: of each weight that has hidden units.
        behind: vectors that are added behind the sum over them.
        parts: views that read some of the features of a value that has units several times, or in turns.

    Raises:
        NotLocalError: it is no one sum over hidden units.
    """

    def __init__(self, expr: Expr) -> None:
        self.units: dict[Leaf, Units] = {}
        self.behind: set[Leaf] = set()
        self.parts: set[Slice] = set()
        self._seen: dict[Expr, int] = {}
        self._summed(expr)
        whole = [leaf for leaf in weight_leaves(expr) if leaf not in self.units and leaf not in self.behind]
        if whole:
            raise NotLocalError(f"{_name(whole[0])} has no hidden units, and is not added behind the sum over them")

    def _summed(self, expr: Expr) -> None:
        """A value that is a sum over hidden units, or a vector."""
        match expr:
            case Linear() if weight_leaves(expr.child):
                self._weight(expr.weight, 1, 1)
                return self._of_units(expr.child, 1)
            case ExpertVector():
                self.behind.add(expr.vector)
                return None
            case Cast() if expr.rounds:
                return self._summed(expr.child)
            case Op(name="neg", args=(child,)):
                return self._summed(child)
            case Op(name="add" | "sub", args=(Expr() as one, Expr() as other)):
                self._summed(one)
                return self._summed(other)
            case Op(name="mul" | "div" as name, args=(one, other), kwargs=()):
                scaled, by = (other, one) if name == "mul" and not _has_weights(one) else (one, other)
                if _has_weights(scaled) and not _has_weights(by):
                    return self._summed(scaled)
        how = "is of the sum over all hidden units" if _has_weights(expr) else "is added to that sum, which would be on each rank"
        raise NotLocalError(f"`{_what(expr)}` {how}")

    def _of_units(self, expr: Expr, groups: int) -> None:
        """A value with a feature for each hidden unit; ``groups``: so many times all units, one behind the other."""
        if self._seen.setdefault(expr, groups) != groups:
            raise NotLocalError("its hidden units are read in two ways")
        match expr:
            case Linear():
                if weight_leaves(expr.child):
                    raise NotLocalError("it sums over hidden units more than once")
                self._weight(expr.weight, 0, groups)
            case ExpertVector():
                self._found(expr.vector, (-1, groups))
            case Slice():
                self.parts.add(expr)
                self._of_units(expr.child, groups * _times(expr))
            case Cast():
                self._of_units(expr.child, groups)
            case Op() if expr.name in _OF_EACH_UNIT:
                for child in expr.children:
                    if _has_weights(child) or not _one_number(child):
                        self._of_units(child, groups)
            case _:
                raise NotLocalError(f"`{_what(expr)}` is not of each hidden unit")

    def _weight(self, leaf: Leaf, side: int, groups: int) -> None:
        self._found(leaf, (sorted(leaf.order).index(leaf.order[side]), groups))

    def _found(self, leaf: Leaf, units: Units) -> None:
        if self.units.setdefault(leaf, units) != units:
            raise NotLocalError(f"the hidden units of {_name(leaf)} are read in two ways")


def _times(part: Slice) -> int:
    """How many times units stand one behind the other in what a part of it is read from: once where they stand in turns."""
    if part.step == 1 and part.of % part.length == 0 and part.start % part.length == 0:
        return part.of // part.length
    if part.step * part.length == part.of and part.start < part.step:
        return 1
    raise NotLocalError("it reads some of the hidden units")


def of_part(part: Slice, world: int) -> Slice:
    """The same part of what one of so many ranks has.

    Raises:
        UnevenError: hidden units do not divide by the ranks.
    """
    if part.length % world:
        raise UnevenError(part.length, world)
    start = part.start // world if part.step == 1 else part.start
    return Slice(part.node, part.child, start, part.step, part.length // world, part.of // world)


def _has_weights(value: Any) -> bool:
    return isinstance(value, Expr) and bool(weight_leaves(value))


def _one_number(expr: Expr) -> bool:
    """Whether a row has one number of it, and no features."""
    value = tensor(expr.node)
    return isinstance(expr, SlotWeight | Gate) or (value is not None and (not value.dim() or same(value.shape[-1], 1)))


def _name(leaf: Leaf) -> str:
    return f"`{leaf.nodes[0].name}`"


def _what(expr: Expr) -> str:
    return expr.name if isinstance(expr, Op) else str(expr.node.name)
