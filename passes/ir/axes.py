"""Axes: what each dimension of a tensor ranges over, and how view operations rearrange it.

An *atom* is one index variable. A dimension (an *axis*) is a tuple of atoms in row-major order, so flattening concatenates atoms and
splitting takes them apart again; a dimension of size one may have no atom. Kinds of atoms:

    d   dimension ``index`` of the plain tensor that a View looks at
    b   broadcast: nothing depends on it
    t   tokens (several, when a model does not flatten batch and sequence)      k   slots of a token
    e   experts        r   rows of one expert, or all slots sorted by expert    f   features of a row
    w   dimension ``index`` of an expert weight
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moefuse.passes.graph.sizes import Size, product, same


class Atom(NamedTuple):
    kind: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of an atom
    size: Size


Axis = tuple[Atom, ...]
Axes = tuple[Axis, ...]


def atoms(axes: Axes) -> Axis:
    """All atoms in row-major order."""
    return tuple(a for axis in axes for a in axis)


def extent(axis: Axis) -> Size:
    """Number of indices an axis has."""
    return product(a.size for a in axis)


def kinds(axis: Axis) -> str:
    """The kinds of an axis' atoms as a string, e.g. ``"tk"``, leaving out those of size one only if something else is left."""
    return "".join(a.kind for a in axis)


def _ones(run: Sequence[Atom]) -> int:
    """How many atoms of size one a run starts with."""
    n = 0
    while n < len(run) and same(run[n].size, 1):
        n += 1
    return n


def _leading_ones(sizes: Sequence[Size]) -> int:
    n = 0
    while n < len(sizes) and same(sizes[n], 1):
        n += 1
    return n


def reshape(axes: Axes, sizes: Sequence[Size]) -> Axes | None:
    """The axes after a row-major reshape to ``sizes``, or None where a new dimension would cut through an atom.

    Atoms of size one are ambiguous (one token!); they go to the dimension that leaves later ones their own.
    """
    rest = list(atoms(axes))
    empty = [i for i, size in enumerate(sizes) if same(size, 0)]
    if len(empty) == 1 and any(same(a.size, 0) for a in rest):
        return _around(rest, sizes, empty[0])
    out: list[Axis] = []
    for i, size in enumerate(sizes):
        later_ones = _leading_ones(sizes[i + 1 :])
        axis: list[Atom] = []
        if not same(size, 1):
            while rest and not same(product(a.size for a in axis), size):
                axis.append(rest.pop(0))
            if not same(product(a.size for a in axis), size):
                return None
        spare = _ones(rest) - later_ones
        axis += rest[: max(spare, 0)]
        del rest[: max(spare, 0)]
        out.append(tuple(axis))
    return tuple(out) if not rest else None


def _around(run: Sequence[Atom], sizes: Sequence[Size], empty: int) -> Axes | None:
    """The axes of a tensor without elements: products say nothing there, so the empty dimension has what those around it leave."""
    zeros = [i for i, a in enumerate(run) if same(a.size, 0)]
    before = ((i, reshape((tuple(run[:i]),), sizes[:empty])) for i in range(zeros[0], -1, -1))
    behind = ((i, reshape((tuple(run[i:]),), sizes[empty + 1 :])) for i in range(zeros[-1] + 1, len(run) + 1))
    first, left = next(((i, found) for i, found in before if found is not None), (0, None))
    last, right = next(((i, found) for i, found in behind if found is not None), (0, None))
    return None if left is None or right is None else (*left, tuple(run[first:last]), *right)


def in_order(axes: Axes) -> bool:
    """Whether each dimension runs through neighbouring ``d`` atoms in their own order: a reshape that gave it need not have moved anything.

    Atoms of size one are nobody's neighbours.
    """
    every = sorted(a.index for a in atoms(axes) if a.kind == "d" and not same(a.size, 1))
    place = {index: i for i, index in enumerate(every)}
    for axis in axes:
        run = [place[a.index] for a in axis if a.index in place and a.kind == "d"]
        if run and run != list(range(run[0], run[0] + len(run))):
            return False
    return True


def align(row: Axis, other: Axis) -> list[tuple[Axis, Axis]] | None:
    """Cut two axes of equal extent into the shortest runs of equal extent, ``[(run of row, run of other), ...]``.

    Atoms of size one are left out: they can be anywhere.
    """
    left, right = ([a for a in axis if a.kind == "r" or not same(a.size, 1)] for axis in (row, other))
    runs: list[tuple[Axis, Axis]] = []
    while left or right:
        a: list[Atom] = [left.pop(0)] if left else []
        b: list[Atom] = [right.pop(0)] if right else []
        while not same(extent(tuple(a)), extent(tuple(b))):
            grow_left = _shorter(tuple(a), tuple(b))
            source, target = (left, a) if grow_left else (right, b)
            if not source:
                source, target = (right, b) if grow_left else (left, a)
            if not source:
                return None
            target.append(source.pop(0))
        runs.append((tuple(a), tuple(b)))
    return runs


def _shorter(a: Axis, b: Axis) -> bool:
    """Whether the left run has to grow: its extent divides the right one's."""
    x, y = extent(a), extent(b)
    if isinstance(x, int) and isinstance(y, int):
        return x < y
    quotient = y / x
    return bool(quotient.is_polynomial()) if hasattr(quotient, "is_polynomial") else False


def permute(axes: Axes, dims: Sequence[int]) -> Axes:
    """The axes after a permutation of dimensions."""
    return tuple(axes[d] for d in dims)


def fresh(shape: Sequence[Size], kind: str = "d") -> Axes:
    """One atom for each dimension of a tensor."""
    return tuple((Atom(kind, i, s),) for i, s in enumerate(shape))
