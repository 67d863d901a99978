"""What an expert computes for one row, as a tree.

Every tree node keeps the FX node it came from, for error messages and for replaying the user's own operation. Row-wise everything is
[rows, features] with the features last; a scalar per row is [rows, 1].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.encoding import Encoding
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.values import is_boolean


@dataclass(frozen=True, eq=False)
class Expr:
    """A tree node; ``node`` is where it was computed."""

    node: Node

    @property
    def children(self) -> tuple[Expr, ...]:
        return ()


@dataclass(frozen=True, eq=False)
class Token(Expr):
    """The row's token: ``source[t, :]`` of a plain tensor [tokens..., H]. ``width`` is H (1 for a scalar per token).

    ``by_slot``: the tensor has a row for each slot, and the row is ``source[t * K + k, :]``.
    ``unread``: an operation made the tensor that no rule knows, for this one value of the program and nothing else.
    ``column``: of which table [tokens..., n] the tensor is which column.
    """

    source: Node
    width: int
    by_slot: bool = False
    unread: bool = False
    column: tuple[Node, int] | None = None


@dataclass(frozen=True, eq=False)
class SlotWeight(Expr):
    """The row's routing weight: ``source[t, k]``; of slot ``slot`` where a program handles one slot after another.

    ``column``: of which table [tokens..., n] the source is which column.
    """

    source: Node
    slot: int | None = None
    column: tuple[Node, int] | None = None


@dataclass(frozen=True, eq=False)
class Gate(Expr):
    """The weight of expert e for the row's token out of a dense [tokens, E] table that is zero where e was not chosen.

    ``source`` is that table (or, with ``slots``, the [tokens, K] weights it was made of; ``ones`` when it is a 0/1 mask).
    ``turned``: it is [E, tokens].
    """

    source: Node
    slots: bool
    ones: bool
    expert: int | None
    turned: bool = False


@dataclass(frozen=True, eq=False)
class Leaf:
    """An expert weight: row ``expert`` of a stacked tensor (None: the row's own expert), or a Parameter of its own (``stacked`` False).

    ``order`` holds the dims of ``source`` that remain, in the order the expression sees them; a stack has its experts along the first of
    the others. ``parts``: each expert's own, in one leaf for all of them; one tensor again and again where they share it. ``detached``:
    gradients end in front of it. ``zeros``: experts whose own is zeros, of the shape and dtype of the others', whatever stands for it here.
    ``held``: it is a storage in few bits, and an operation of the program multiplies what that stands for.
    """

    source: Node
    stacked: bool
    expert: int | None
    order: tuple[int, ...]
    parts: tuple[Node, ...] = ()
    detached: bool = False
    zeros: frozenset[int] = frozenset()
    held: Held | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What it reads: each expert's own, or the one source."""
        return self.parts or (self.source,)

    @property
    def along(self) -> int:
        """The dimension of a stack that has an entry for each expert."""
        return next(d for d in range(len(self.order) + 1) if d not in self.order)


@dataclass(frozen=True, eq=False)
class Held:
    """How a weight is held that an operation of the program multiplies from its storage, and its scales, a leaf like any other.

    ``shape``: (N, K) where storage and scales are rows of numbers in one dimension, a weight's features one after another. ``nested``: the
    scales are codes in bytes themselves, and these are their own scales, one for ``every`` of them, a table of 256, and what is added.
    """

    encoding: Encoding
    scale: Leaf
    shape: tuple[int, int] | None = None
    nested: tuple[Leaf, ...] = ()
    every: int = 0

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What goes with the storage."""
        return (self.scale, *self.nested)

    @property
    def how(self) -> tuple[Any, ...]:
        """All but the leaves."""
        return self.encoding, self.shape, len(self.nested), self.every

    def of(self, leaf: Callable[[Leaf], Leaf]) -> Held:
        """What is held with other leaves in the place of its own."""
        return replace(self, scale=leaf(self.scale), nested=tuple(map(leaf, self.nested)))


@dataclass(frozen=True, eq=False)
class Linear(Expr):
    """``child @ weight.T``: ``weight.order`` is (out, in)."""

    child: Expr
    weight: Leaf

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)


@dataclass(frozen=True, eq=False)
class ExpertVector(Expr):
    """A vector of features that belongs to the row's expert: a bias, a per-expert norm weight."""

    vector: Leaf


@dataclass(frozen=True, eq=False)
class SharedVector(Expr):
    """A vector of features (or a scalar tensor) that is the same for every row and expert."""

    source: Node


@dataclass(frozen=True, eq=False)
class Slice(Expr):
    """Features ``start, start+step, ...`` (``length`` of them) of the child."""

    child: Expr
    start: int
    step: int
    length: int
    of: int

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)


@dataclass(frozen=True, eq=False)
class Op(Expr):
    """A row-local operation. ``args`` are Exprs and constants; ``call`` replays it on [rows, features] values."""

    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def children(self) -> tuple[Expr, ...]:
        return tuple(a for a in (*self.args, *(v for _, v in self.kwargs)) if isinstance(a, Expr))

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.kwargs)


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    """A real change of dtype."""

    child: Expr
    dtype: torch.dtype

    @property
    def rounds(self) -> bool:
        """Whether it does no more than round: not where it truncates to integers, keeps eight bits, or makes numbers of conditions."""
        return self.dtype.is_floating_point and self.dtype.itemsize > 1 and not self.counts

    @property
    def counts(self) -> bool:
        """Whether it makes numbers, 1 and 0, of conditions."""
        return self.dtype != torch.bool and is_boolean(self.child.node)

    @property
    def children(self) -> tuple[Expr, ...]:
        return (self.child,)


def walk(expr: Expr) -> Iterator[Expr]:
    """Every tree node once, parents first."""
    seen: set[int] = set()
    stack = [expr]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        stack.extend(item.children)


Change = Callable[[Expr, Callable[[Any], Any]], Expr | None]
"""From a node, and what rebuilds a part of it, to the node in its place; None to rebuild its parts alone."""


def rebuilt(expr: Expr, change: Change) -> Expr:
    """The tree with other nodes in it; what was one node of it stays one."""
    memo: dict[int, Any] = {}

    def run(old: Any) -> Any:
        if not isinstance(old, Expr):
            return old
        if id(old) not in memo:
            new = change(old, run)
            memo[id(old)] = of_parts(old) if new is None else new
        return memo[id(old)]

    def of_parts(old: Expr) -> Expr:
        if isinstance(old, Op):
            return replace(old, args=tuple(map(run, old.args)), kwargs=tuple((k, run(v)) for k, v in old.kwargs))
        return replace(old, child=run(old.child)) if old.children else old  # type: ignore[call-arg, attr-defined]

    found: Expr = run(expr)
    return found


def rewritten(expr: Expr, source: Callable[[Node], Node], leaf: Callable[[Leaf], Leaf], number: Callable[[int | None], int | None]) -> Expr:
    """The tree with other shared tensors, weights and expert numbers."""

    def weight(old: Leaf) -> Leaf:
        new = leaf(old)
        return new if old.held is None else replace(new, held=old.held.of(leaf))

    def change(old: Expr, run: Callable[[Any], Any]) -> Expr | None:
        match old:
            case SharedVector():
                return replace(old, source=source(old.source))
            case Gate():
                return replace(old, expert=number(old.expert))
            case ExpertVector():
                return replace(old, vector=leaf(old.vector))
            case Linear():
                return replace(old, child=run(old.child), weight=weight(old.weight))
        return None

    return rebuilt(expr, change)


def has_linear(expr: Expr) -> bool:
    """Whether an expert projection was applied."""
    return any(isinstance(e, Linear) for e in walk(expr))


def weight_leaves(expr: Expr) -> list[Leaf]:
    """The expert weights of an expression."""
    return [e.weight if isinstance(e, Linear) else e.vector for e in walk(expr) if isinstance(e, Linear | ExpertVector)]


def held_leaves(expr: Expr) -> list[Leaf]:
    """The expert weights of an expression that operations of the program multiply from their storage."""
    return [e.weight for e in walk(expr) if isinstance(e, Linear) and e.weight.held is not None]


def computed_in(expr: Expr) -> torch.dtype | None:
    """The dtype to which weights in float32 are rounded as they are read; None where each product is in the dtype of its weight.

    Where one is rounded, all results have that dtype (``passes/match/safety.py``).
    """
    for e in walk(expr):
        if isinstance(e, Linear):
            result, weight = tensor(e.node), tensor(e.weight.source)
            if result is not None and weight is not None and result.dtype != weight.dtype:
                return result.dtype
    return None


def show(expr: Any) -> str:
    """The tree as text, for logs and golden tests: ``mul(linear(token, down), weight)``."""
    match expr:
        case Token(source=s):
            return f"token({s.name})"
        case SlotWeight():
            return "weight"
        case Gate(expert=e):
            return f"gate[{'e' if e is None else e}]"
        case Linear(child=c, weight=w):
            return f"linear({show(c)}, {w.source.name})"
        case ExpertVector(vector=v):
            return f"vector({v.source.name})"
        case SharedVector(source=s):
            return f"shared({s.name})"
        case Slice(child=c, start=a, step=s, length=n):
            return f"{show(c)}[{a}:{a + s * n}:{s}]"
        case Cast(child=c, dtype=d):
            return f"{show(c)}.to({str(d).removeprefix('torch.')})"
        case Op(name=n, args=a, kwargs=k):
            inside = [show(x) for x in a] + [f"{key}={show(v)}" for key, v in k]
            return f"{n}({', '.join(inside)})"
        case _:
            return str(expr)
