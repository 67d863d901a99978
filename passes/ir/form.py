"""What experts compute, in a few letters: equal on ranks whose experts compute the same, for each runs them on the tokens of all."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from moefuse.passes.ir.expr import Cast, Expr, Gate, Op, Slice, SlotWeight, Token


def form_of(expr: Expr) -> str:
    """A checksum of operations, of their constants, and of what reads what; sizes of tokens and the values of weights do not count."""
    return f"{zlib.crc32(repr(list(_steps(expr, {}))).encode()):08x}"


def _steps(expr: Expr, seen: dict[int, int]) -> Iterator[tuple[object, ...]]:
    """Each expression once, behind what it reads."""
    if id(expr) in seen:
        return
    for child in expr.children:
        yield from _steps(child, seen)
    read = [seen[id(child)] for child in expr.children]
    seen[id(expr)] = len(seen)
    yield (type(expr).__name__, *_own(expr), read)


def _own(expr: Expr) -> tuple[object, ...]:
    match expr:
        case Token():
            return expr.width, expr.by_slot
        case SlotWeight():
            return (expr.slot,)
        case Gate():
            return expr.slots, expr.ones
        case Slice():
            return expr.start, expr.step, expr.length, expr.of
        case Cast():
            return (expr.dtype,)
        case Op():
            given = (*enumerate(expr.args), *expr.kwargs)
            return expr.name, [(name, value) for name, value in given if isinstance(value, bool | int | float | complex | str)]
    return ()


__all__ = ["form_of"]
