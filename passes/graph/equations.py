"""Equations of einsum with a letter for every dimension: for those that an ellipsis stands for, too, and for those of a result left out."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any, NamedTuple

from moefuse.passes.graph.calls import tensor

_ELLIPSIS = "..."


class Equation(NamedTuple):
    """What is multiplied, the letters of each operand's dimensions, and those of the result."""

    operands: tuple[Any, ...]
    labels: tuple[str, ...]
    out: str


def equation(text: Any, *given: Any) -> Equation | None:
    """``einsum(text, *given)``; None where a letter is twice in an operand, or where it is not written as text and tensors."""
    operands = tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    if not isinstance(text, str) or any(tensor(value) is None for value in operands):
        return None
    inputs, arrow, out = text.replace(" ", "").partition("->")
    names = inputs.split(",")
    if len(names) != len(operands):
        return None
    more = [_behind(name, tensor(value).dim()) for name, value in zip(names, operands, strict=True)]  # type: ignore[union-attr]
    if any(count is None for count in more):
        return None
    free = [c for c in string.ascii_letters if c not in text]
    shared = "".join(free[: max((count or 0 for count in more), default=0)])
    labels = tuple(name.replace(_ELLIPSIS, shared[len(shared) - (count or 0) :]) for name, count in zip(names, more, strict=True))
    result = out.replace(_ELLIPSIS, shared) if arrow else shared + _once(names)
    every = set("".join(labels))
    apart = all(len(set(name)) == len(name) for name in (*labels, result))
    return Equation(operands, labels, result) if apart and set(result) <= every <= set(string.ascii_letters) else None


def _behind(name: str, rank: int) -> int | None:
    """How many dimensions an ellipsis stands for; None where the letters are not those of so many dimensions."""
    left = rank - len(name.replace(_ELLIPSIS, ""))
    return left if left == 0 or (left > 0 and name.count(_ELLIPSIS) == 1) else None


def _once(names: Sequence[str]) -> str:
    """The letters of a result that the equation leaves out: those that stand there once, in order."""
    every = "".join(names).replace(_ELLIPSIS, "")
    return "".join(sorted(c for c in set(every) if every.count(c) == 1))
