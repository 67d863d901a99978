"""Which number of the storage and which scale each weight has: strides, packing and blocks, read from where elements are found.

Each is a guess from a few elements that must hold for every element that was looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moefuse.ops.meaning.encoding import Packing

_EVERY, _SOME, _PER_EXPERT = 1 << 16, 4096, 48
"""Up to how many weights all are looked at; beyond, how many anywhere, and how many of each expert."""


@dataclass(frozen=True)
class Sample:
    """Elements of a weight [E, N, K] that are looked at: their indices, and the sizes. Each axis is there at length, others held at 0."""

    e: Tensor
    n: Tensor
    k: Tensor
    sizes: tuple[int, int, int]

    def at(self, e: int, n: int, k: int) -> int:
        """Where an element is in the sample, one with two indices of zero."""
        return int(((self.e == e) & (self.n == n) & (self.k == k)).nonzero()[0])


def sample(experts: int, features: int, inputs: int) -> Sample:
    """Of a small weight all, of a large one lines along each axis, among them the first and the last, and elements anywhere."""
    sizes = (experts, features, inputs)
    if experts * features * inputs <= _EVERY:
        flat = torch.arange(experts * features * inputs)
    else:
        dice = torch.Generator("cpu").manual_seed(features * 7919 + inputs)

        def some(size: int, count: int) -> Tensor:
            return torch.randint(size, (count,), generator=dice)

        def line(size: int) -> Tensor:
            return torch.cat([torch.tensor([0, 1 % size, size // 2, size - 1]), some(size, 4)])

        ends = torch.tensor([0, experts - 1])
        points = [
            torch.cartesian_prod(ends, torch.arange(features), line(inputs)),
            torch.cartesian_prod(ends, line(features), torch.arange(inputs)),
            torch.stack([torch.arange(experts), *[torch.zeros(experts, dtype=torch.int64)] * 2], 1),
            torch.stack([torch.arange(experts).repeat(_PER_EXPERT), *(some(n, experts * _PER_EXPERT) for n in sizes[1:])], 1),
            torch.stack([some(experts, _SOME), some(features, _SOME), some(inputs, _SOME)], 1),
        ]
        found = torch.cat(points)
        flat = ((found[:, 0] * features + found[:, 1]) * inputs + found[:, 2]).unique()
    return Sample(flat // (features * inputs), flat // inputs % features, flat % inputs, sizes)


@dataclass(frozen=True)
class Strides:
    """Where something [E, n, k] stands in memory: sizes, strides and first place."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    first: int


def packed(of: Sample, places: Tensor, shifts: Tensor) -> tuple[Packing | None, Strides] | None:
    """The packing of a storage and where it stands; None if it is none that there is a word for. ``shifts``: -1 for whole numbers."""
    found = shifts.unique().tolist()
    if found == [-1]:
        strides = _strides(of, places, (of.n, of.k), of.sizes[1:])
        return None if strides is None or _still(strides) else (None, strides)
    per = len(found)
    for axis in (1, 0):
        size, index = of.sizes[1 + axis], (of.n, of.k)[axis]
        for halves in (False, True) if size % per == 0 else ():
            part = index // (size // per) if halves else index % per
            order = [int(shifts[of.at(0, *_on(axis, j * (size // per) if halves else j))]) for j in range(per)]
            if not torch.equal(torch.tensor(order)[part], shifts):
                continue
            inside = index % (size // per) if halves else index // per
            step = 1 if halves else per
            sizes = tuple(n // per if d == axis else n for d, n in enumerate(of.sizes[1:]))
            numbers = (inside, of.k) if axis == 0 else (of.n, inside)
            steps = (step, 1) if axis == 0 else (1, step)
            strides = _strides(of, places, numbers, sizes, steps)
            if strides is not None and not _still(strides):
                return Packing(axis, tuple(order), halves), strides
    return None


def blocks(of: Sample, places: Tensor) -> tuple[int, int]:
    """(bn, bk) of numbers that several weights share, by their first ones; 0 for all of an axis."""
    found = []
    for axis in (0, 1):
        line = (of.e == 0) & ((of.k if axis == 0 else of.n) == 0)
        index = (of.n, of.k)[axis][line]
        order = index.argsort()
        own = places[line][order]
        moved = (own != own[0]).nonzero()
        found.append(int(index[order][moved[0]]) if len(moved) else 0)
    return found[0], found[1]


def in_blocks(of: Sample, places: Tensor, block: tuple[int, int]) -> Strides | None:
    """Where numbers stand of which each block has one."""
    sizes = tuple(-(-n // b) if b else 1 for n, b in zip(of.sizes[1:], block, strict=True))
    numbers = tuple(i // b if b else torch.zeros_like(i) for i, b in zip((of.n, of.k), block, strict=True))
    return _strides(of, places, (numbers[0], numbers[1]), sizes, (block[0] or 1, block[1] or 1))


def _on(axis: int, index: int) -> tuple[int, int]:
    return (index, 0) if axis == 0 else (0, index)


def _still(strides: Strides) -> bool:
    """Whether several weights would share a code."""
    return any(size > 1 and not by for size, by in zip(strides.sizes, strides.strides, strict=True))


def _strides(
    of: Sample, places: Tensor, numbers: tuple[Tensor, Tensor], sizes: tuple[int, ...], steps: tuple[int, int] = (1, 1)
) -> Strides | None:
    """Where something stands of which the weights read the elements ``numbers``; None if its strides are not the same everywhere.

    ``steps``: at which index of the weight the second element of each axis is.
    """
    first = int(places[of.at(0, 0, 0)])

    def by(size: int, e: int, n: int, k: int) -> int:
        return int(places[of.at(e, n, k)]) - first if size > 1 else 0

    strides = (by(of.sizes[0], 1, 0, 0), by(sizes[0], 0, steps[0], 0), by(sizes[1], 0, 0, steps[1]))
    wanted = first + of.e * strides[0] + numbers[0] * strides[1] + numbers[1] * strides[2]
    if not torch.equal(wanted, places) or min(strides) < 0:
        return None
    return Strides((of.sizes[0], sizes[0], sizes[1]), strides, first)


__all__ = ["Sample", "Strides", "blocks", "in_blocks", "packed", "sample"]
