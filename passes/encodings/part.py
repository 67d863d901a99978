"""What is read: an encoding, and storages, scales and zeros as views of the graph's inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.ops.meaning.encoding import Encoding
from moefuse.passes.encodings.memory import Strided
from moefuse.passes.graph.named import named

Put = Callable[..., Node]
"""Writes a call into a graph (``passes.graph.builder.Emitter``)."""


@dataclass(frozen=True)
class Part:
    """A view [N', K'] or [E, N', K'] of an input of the graph: sizes, strides, and its first element, counted from the input's own.

    ``path``: the attributes that lead to what is viewed, where the input is made of other tensors.
    """

    node: Node
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    first: int = 0
    path: tuple[str, ...] = ()

    def show(self, value: Tensor) -> Tensor:
        """The view of the input's value."""
        for name in self.path:
            value = getattr(value, name)
        return value.as_strided(self.sizes, self.strides, value.storage_offset() + self.first)


@dataclass(frozen=True)
class Coded:
    """A weight [N, K], or [E, N, K], as its program holds it: what ``dequantise`` makes of its parts is the weight, bit by bit.

    Attributes:
        dtype: of the weight.
        storage, scale, zero: views of the model's tensors; of a weight of one expert without the first dimension.
    """

    encoding: Encoding
    storage: Part
    scale: Part
    zero: Part | None
    dtype: torch.dtype

    @property
    def is_inner(self) -> bool:
        """Whether the weight is made of other tensors by its class, and not by the program."""
        return bool(self.storage.path)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All views, the storage first, the others in the order of ``Encoding.parts``."""
        return (self.storage, self.scale) if self.zero is None else (self.storage, self.scale, self.zero)


def joined(parts: Sequence[Part]) -> Part | None:
    """The stack [E, N', K'] of what each expert has, where they are evenly spaced in one input of the graph."""
    first = parts[0]
    step = parts[1].first - first.first if len(parts) > 1 else 0
    for i, part in enumerate(parts):
        if (part.node, part.path, part.sizes, part.strides) != (first.node, first.path, first.sizes, first.strides):
            return None
        if part.first != first.first + i * step:
            return None
    return None if step < 0 else Part(first.node, (len(parts), *first.sizes), (step, *first.strides), first.first, first.path)


def emit(put: Put, part: Part) -> Node:
    """Write the view into a graph: with ``select`` and ``permute`` where these do, else by its strides. It is never a copy."""
    if part.path:
        node = part.node
        for name in part.path:
            node = put(getattr, node, name)
        return emit(put, replace(part, node=node, path=()))
    own = Strided(part.node)
    inside, at = own.at(torch.tensor([part.first + own.first]))
    if not inside.all():
        raise ValueError(f"the view begins beside {named(part.node)}")
    begin = [int(i) for i in at]
    moving = [d for d, size in enumerate(part.sizes) if size > 1]
    dims = [_dim_of(own, begin, part, d) for d in moving]
    if None not in dims and len(set(dims)) == len(dims):
        return _by_dims(put, part, own, begin, [d for d in dims if d is not None])
    if _is_reshape(part, own):
        order = sorted(range(len(part.sizes)), key=lambda d: -part.strides[d])
        node = put(torch.reshape, part.node, tuple(part.sizes[d] for d in order))
        back = tuple(order.index(d) for d in range(len(order)))
        return node if back == tuple(range(len(order))) else put(torch.permute, node, back)
    node = part.node
    for d, start in enumerate(begin):
        if start:
            node = put(torch.narrow, node, d, start, own.sizes[d] - start)
    return put(torch.as_strided, node, part.sizes, part.strides)


def _dim_of(own: Strided, begin: list[int], part: Part, d: int) -> int | None:
    """The dimension of the input all of which a dimension of the view is."""
    for dim, (size, stride) in enumerate(zip(own.sizes, own.strides, strict=True)):
        if size == part.sizes[d] and stride == part.strides[d] and not begin[dim]:
            return dim
    return None


def _by_dims(put: Put, part: Part, own: Strided, begin: list[int], dims: list[int]) -> Node:
    """A view of whole dimensions of the input, ``dims`` in the view's order, at one index of each of the others."""
    node = part.node
    for dim in reversed(range(len(own.sizes))):
        if dim not in dims:
            node = put(torch.select, node, dim, begin[dim])
    kept = sorted(dims)
    if dims != kept:
        node = put(torch.permute, node, tuple(kept.index(d) for d in dims))
    for d, size in enumerate(part.sizes):
        if size == 1:
            node = put(torch.unsqueeze, node, d)
    return node


def _is_reshape(part: Part, own: Strided) -> bool:
    """Whether a view has all of a contiguous input, its dimensions in some order."""
    return part.first == 0 and _contiguous(own.sizes, own.strides) == _contiguous(part.sizes, part.strides) is not None


def _contiguous(sizes: Sequence[int], strides: Sequence[int]) -> int | None:
    """How many elements there are, if none is left out and none is there twice."""
    reach = 1
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1:
            if stride != reach:
                return None
            reach *= size
    return reach


__all__ = ["Coded", "Part", "Put", "emit", "joined"]
