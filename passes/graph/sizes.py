"""Sizes without guards: tensor sizes as ints or sympy expressions, compared symbolically, so that no rule adds a shape guard.

One pass may ask for one, and says why (match/input_sizes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch

Size = Any  # int | sympy.Expr


_SUPPOSED: ContextVar[Mapping[sympy.Symbol, sympy.Expr]] = ContextVar("moefuse_supposed_sizes", default={})  # noqa: B039


_UNDECIDED: ContextVar[set[sympy.Expr] | None] = ContextVar("moefuse_undecided_sizes", default=None)


@contextmanager
def supposing(equal: Mapping[sympy.Symbol, sympy.Expr]) -> Iterator[None]:
    """Read sizes as if each symbol were the one, or the number, that it is mapped to, to see what would follow from it."""
    token = _SUPPOSED.set(equal)
    try:
        yield
    finally:
        _SUPPOSED.reset(token)


@contextmanager
def undecided() -> Iterator[set[sympy.Expr]]:
    """Collects the differences of sizes that were compared, and that are zero for some values of their symbols only."""
    found: set[sympy.Expr] = set()
    token = _UNDECIDED.set(found)
    try:
        yield found
    finally:
        _UNDECIDED.reset(token)


def size_of(value: object) -> Size:
    """An int, or the sympy expression of a SymInt."""
    if isinstance(value, int):
        return value
    expr = sympy.sympify(getattr(getattr(value, "node", None), "expr", value))
    expr = expr.xreplace(supposed) if (supposed := _SUPPOSED.get()) else expr
    return int(expr) if expr.is_Integer else expr


def shape_of(value: torch.Tensor) -> tuple[Size, ...]:
    """The shape of a (fake) tensor as sizes."""
    return tuple(size_of(s) for s in value.shape)


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are equal for every value of their symbols. False also means: not known."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    difference = sympy.expand(a - b)
    if difference != 0 and (open_questions := _UNDECIDED.get()) is not None:
        open_questions.add(difference)
    return bool(difference == 0)


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes, as an int where it is one."""
    out: Size = 1
    for s in sizes:
        out = out * s
    return out if isinstance(out, int) else size_of(sympy.expand(out))


def same_shape(a: Sequence[Size], b: Sequence[Size]) -> bool:
    """Whether two shapes are equal for every value of their symbols."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
