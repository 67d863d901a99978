"""Places in memory: which element of a strided tensor stands where, and which element stands at a place."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import shape_of, size_of

Coords = tuple[Tensor, ...]
"""An index along each dimension, for each element of a batch."""


class Strided:
    """Sizes, strides and first place of what a node holds.

    Raises:
        UnreadError: it is no plain tensor, or its sizes are known to the run only.
    """

    def __init__(self, node: Node) -> None:
        value = tensor(node)
        if value is None or hasattr(value, "__tensor_flatten__") or value.layout != torch.strided:
            raise UnreadError(node, "is no plain tensor")
        self.node, self.dtype = node, value.dtype
        self.sizes = _known(node, shape_of(value))
        self.strides = _known(node, tuple(size_of(s) for s in value.stride()))
        (self.first,) = _known(node, (size_of(value.storage_offset()),))

    def place(self, coords: Coords) -> Tensor:
        """Where elements stand in their storage."""
        found = torch.zeros_like(coords[0]) if coords else torch.zeros(1, dtype=torch.int64)
        for index, stride in zip(coords, self.strides, strict=True):
            found = found + index * stride
        return found + self.first

    def at(self, places: Tensor) -> tuple[Tensor, Coords]:
        """Which places are those of an element, and of which one.

        Raises:
            UnreadError: several elements stand at one place.
        """
        rest = places - self.first
        inside = rest >= 0
        found: dict[int, Tensor] = {}
        moving = sorted((d for d in range(len(self.sizes)) if self.sizes[d] > 1 and self.strides[d]), key=lambda d: -self.strides[d])
        for i, d in enumerate(moving):
            if self.strides[d] <= sum((self.sizes[j] - 1) * self.strides[j] for j in moving[i + 1 :]):
                raise UnreadError(self.node, "has several elements at one place")
            found[d] = rest // self.strides[d]
            inside &= found[d] < self.sizes[d]
            rest = rest - found[d] * self.strides[d]
        return inside & (rest == 0), tuple(found.get(d, torch.zeros_like(places)) for d in range(len(self.sizes)))


def _known(node: Node, sizes: tuple[object, ...]) -> tuple[int, ...]:
    found = tuple(s for s in sizes if isinstance(s, int))
    if len(found) != len(sizes):
        raise UnreadError(node, "has a size that only the run knows")
    return found


def onto(coords: Coords, sizes: tuple[int, ...]) -> Coords:
    """Where the elements of something broadcast come from."""
    last = coords[len(coords) - len(sizes) :]
    return tuple(torch.zeros_like(c) if size == 1 else c for c, size in zip(last, sizes, strict=True))


def ravel(coords: Coords, sizes: tuple[int, ...], count: int) -> Tensor:
    """The number of elements in row-major order."""
    flat = torch.zeros(count, dtype=torch.int64)
    for index, size in zip(coords, sizes, strict=True):
        flat = flat * size + index
    return flat


def unravel(flat: Tensor, sizes: tuple[int, ...]) -> Coords:
    """The indices of elements that are numbered in row-major order."""
    found = []
    for size in reversed(sizes):
        found.append(flat % max(size, 1))
        flat = flat // max(size, 1)
    return tuple(reversed(found))


__all__ = ["Coords", "Strided", "onto", "ravel", "unravel"]
