"""Points where a near-miss changes what a spelling computes. Every default is the identity, so a positive program is not touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor


def _second(_e: int, t: Tensor) -> Tensor:
    return t


def _same(t: Tensor) -> Tensor:
    return t


@dataclass(frozen=True)
class Hooks:
    """Callables that a spelling passes its values through.

    Attributes:
        experts: which experts a loop visits.
        source: the tensor expert ``e`` takes its rows from.
        routed: expert rows after the down projection and before weighting (loops).
        weight: the routing weight of one expert's rows (loops).
        join: how a loop joins accumulated rows and new rows; None for the program's own sum.
        partial: the accumulator after expert ``e`` was added (loops).
        descending: sort the other way round (sorted).
        perm_weights: flat weights taken in sorted order (sorted).
        offsets: group offsets (sorted).
        order: the permutation used to bring rows back (sorted).
        rows: all rows of all experts before weighting (slots, sorted, dense).
        parts: weighted rows, [T, K, H] (slots, sorted).
    """

    experts: Callable[[int], Iterable[int]] = range
    source: Callable[[int, Tensor], Tensor] = _second
    routed: Callable[[int, Tensor], Tensor] = _second
    weight: Callable[[int, Tensor], Tensor] = _second
    join: Callable[[Tensor, Tensor], Tensor] | None = None
    partial: Callable[[int, Tensor], Tensor] = _second
    descending: bool = False
    perm_weights: Callable[[Tensor, Tensor], Tensor] = lambda w, perm: w[perm]
    offsets: Callable[[Tensor], Tensor] = _same
    order: Callable[[Tensor], Tensor] = _same
    rows: Callable[[Tensor], Tensor] = _same
    parts: Callable[[Tensor], Tensor] = _same


PLAIN = Hooks()
