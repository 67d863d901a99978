"""Strides of a replacement: those of the value that it stands for, since a program may look at them, and views depend on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same, same_shape, shape_of, size_of


def in_layout(emit: Emitter, node: Node, like: Node) -> Node:
    """``node`` with the strides of ``like``, which has its shape: as it is where they are equal, else one copy.

    Raises:
        ValueError: if ``like`` has gaps between its elements, or some of them in common.
    """
    mine, theirs = tensor(node), tensor(like)
    if mine is None or theirs is None or same_strides(mine, theirs):
        return node
    order = _dense_order(theirs)
    if order is None:
        raise ValueError(f"the result has strides {tuple(theirs.stride())} for the shape {tuple(theirs.shape)}")
    inner = emit(torch.Tensor.contiguous, emit(torch.permute, node, order))
    return emit(torch.permute, inner, [order.index(d) for d in range(len(order))])


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are known to have the same strides, where a stride means anything."""
    sizes = shape_of(a)
    if not same_shape(sizes, shape_of(b)):
        return False
    if any(same(size, 0) for size in sizes):
        return True
    return all(same(size, 1) or same(size_of(x), size_of(y)) for size, x, y in zip(sizes, a.stride(), b.stride(), strict=True))


def _dense_order(value: Tensor) -> list[int] | None:
    """The dimensions from the outermost to the innermost of a tensor without gaps; None for any other."""
    sizes = shape_of(value)
    left = [d for d, size in enumerate(sizes) if not same(size, 1)]
    order: list[int] = []
    step: Any = 1
    while left:
        inner = next((d for d in reversed(left) if same(size_of(value.stride(d)), step)), None)
        if inner is None:
            return None
        left.remove(inner)
        order.insert(0, inner)
        step = step * sizes[inner]
    return [d for d, size in enumerate(sizes) if same(size, 1)] + order
