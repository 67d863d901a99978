"""Where a view of a whole matrix is in the slice of it that a rank holds: numbers only.

A matrix [A, B] of one expert has a dimension of N hidden units in equal blocks, and of each block every rank has its part, in order. A view
of the matrix reads, along that dimension, rows ``start, start + step, ..``; it can be read from a slice where every rank's part of these
rows is spaced as evenly in the slice, and equally on each rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class NotLocalError(ValueError):
    """A value is no view of gathered weights that each rank could take of its own ones."""


class UnevenError(NotLocalError):
    """So many hidden units do not divide by so many ranks."""

    def __init__(self, units: int, world: int) -> None:
        super().__init__(f"{units} hidden units do not divide by {world} ranks")


@dataclass(frozen=True)
class View:
    """A strided view of a contiguous tensor of the shape ``whole``, in elements."""

    whole: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def last(self) -> int:
        """The largest offset that it reads."""
        return self.start + sum((n - 1) * by for n, by in zip(self.sizes, self.strides, strict=True))

    def along(self, axis: int) -> tuple[int, int, int]:
        """(dimension of the view, first index, step) of what it reads along a dimension of the whole; -1 for one that stands still.

        Raises:
            NotLocalError: two dimensions of the view, or one that runs over several of the whole.
        """
        unit = math.prod(self.whole[axis + 1 :])
        first = self.start // unit % self.whole[axis]
        dims = enumerate(zip(self.sizes, self.strides, strict=True))
        moving = [d for d, (n, by) in dims if n > 1 and unit <= abs(by) < unit * self.whole[axis]]
        if len(moving) > 1 or any(self.strides[d] % unit for d in moving):
            raise NotLocalError("its hidden units are not one dimension of the weights")
        if not moving:
            return -1, first, 1
        step = self.strides[moving[0]] // unit
        if not 0 <= first + step * (self.sizes[moving[0]] - 1) < self.whole[axis]:
            raise NotLocalError("its hidden units are not one dimension of the weights")
        return moving[0], first, step

    def as_slices(self) -> tuple[tuple[slice, ...], tuple[int, ...]] | None:
        """(a slice of each dimension of the whole, their order in the view, but for sizes of one); None if it is no such view."""
        try:
            found = [self.along(axis) for axis in range(len(self.whole))]
        except NotLocalError:
            return None
        taken = [dim for dim, _, _ in found if dim >= 0]
        if sorted(taken) != [d for d, n in enumerate(self.sizes) if n > 1]:
            return None
        cut = tuple(slice(first, first + (step * (self.sizes[dim] - 1) if dim >= 0 else 0) + 1, step) for dim, first, step in found)
        axes = sorted(range(len(found)), key=lambda axis: (found[axis][0], axis))
        return cut, tuple(axes)


def owners(rows: Sequence[int], total: int, blocks: int, world: int) -> list[tuple[int, int]]:
    """(rank, row of its slice) of rows of a dimension of ``total``."""
    block, part = total // blocks, total // blocks // world
    return [((row % block) // part, row // block * part + row % block % part) for row in rows]


def holders(count: int, groups: int, world: int) -> list[int]:
    """[count]: the rank that has each of so many rows; of each of the equal groups of them, rank r has the r-th P-th."""
    size = count // groups
    return [i % size * world // size for i in range(count)]


def in_slice(view: View, axis: int, blocks: int, world: int, groups: int) -> tuple[View, int]:
    """The view of what one rank holds that is its part of ``view``; and which of the view's dimensions the hidden units are.

    Args:
        axis: the dimension of ``view.whole`` of which every rank has a part.
        groups: equal parts of the view's rows, each with all hidden units, in order: two for gate and up projection one behind the other.

    Raises:
        NotLocalError: ranks hold other hidden units than the r-th P-th of each group, or not evenly spaced.
    """
    total = view.whole[axis]
    dim, first, step = view.along(axis)
    if dim < 0:
        raise NotLocalError("it reads one hidden unit")
    count = view.sizes[dim]
    if total % (blocks * world) or count % (groups * world):
        raise UnevenError(count, world)
    held = owners(range(first, first + step * count, step), total, blocks, world)
    if [rank for rank, _ in held] != holders(count, groups, world):
        raise NotLocalError("ranks hold other hidden units of it")
    parts = [[row for rank, row in held if rank == r] for r in range(world)]
    mine = parts[0]
    by = mine[1] - mine[0] if len(mine) > 1 else 1
    if any(part != mine for part in parts) or any(row != mine[0] + by * i for i, row in enumerate(mine)):
        raise NotLocalError("what ranks hold of it is not evenly spaced")
    return _cut(view, axis, dim, (mine[0], by, len(mine)), world), dim


def _cut(view: View, axis: int, dim: int, rows: tuple[int, int, int], world: int) -> View:
    """The view with other rows (first, step, count) of ``axis``, in a whole that has the P-th part of them."""
    whole = tuple(n // world if d == axis else n for d, n in enumerate(view.whole))
    sizes, strides, start = list(view.sizes), list(view.strides), 0
    for d in range(len(whole)):
        moving, first, step = (dim, *rows[:2]) if d == axis else view.along(d)
        unit = math.prod(whole[d + 1 :])
        start += first * unit
        if moving >= 0:
            strides[moving] = step * unit
    sizes[dim] = rows[2]
    return View(whole, tuple(sizes), tuple(strides), start)
