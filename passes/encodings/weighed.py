"""A weight that is a tensor of a class of its own, and how the program multiplies it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.inner import Inner, inner, like
from moefuse.passes.encodings.placed import Form
from moefuse.passes.encodings.terms import Read, device_of
from moefuse.passes.encodings.tried import Product, dtype_of_rows, multiplied
from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.state import Context

_FEW = 2
"""Experts that are made up."""


class Weighed:
    """A weight of a class of its own, and how the program multiplies it.

    Args:
        node: an input of the graph; ``order``: its dimensions that are experts (where it has all), features and inputs.
        product: a product that reads it, or one like it.
        source: what ``product`` reads.
    """

    def __init__(self, ctx: Context, node: Node, order: tuple[int, ...], product: Product, source: Node) -> None:
        self.ctx, self.node, self.order, self.product, self.source = ctx, node, order, product, source
        value: Any = tensor(node)
        self.value, self.inner = value, list(inner(value))
        self.dtype: torch.dtype = value.dtype
        self.device = device_of(Read(node, torch.zeros(0, device="cpu"), self.dtype))
        self.sizes = self._few()

    def _few(self) -> tuple[int, ...] | None:
        """The sizes of the same with few experts, if each of its tensors has these first."""
        sizes = tuple(self.value.shape)
        if len(self.order) < 3 or self.order[0] != 0 or any(len(i.path) > 1 or i.value.shape[:1] != sizes[:1] for i in self.inner):
            return None
        return (min(_FEW, sizes[0]), *sizes[1:])

    @property
    def form(self) -> Form:
        """The form of the weights that are made up."""
        return Form(self.sizes or tuple(self.value.shape), self.order)

    def made(self, fill: Any) -> Any:
        """A made-up weight."""
        few = None if self.sizes is None else self.sizes[0]

        def filled(one: Inner) -> Tensor:
            shape = one.value.shape if few is None else (few, *one.value.shape[1:])
            found: Tensor = fill(one, tuple(shape)).to(self.device)
            if found.stride() != one.value.stride() and few is None:
                strided = torch.empty_strided(shape, one.value.stride(), dtype=found.dtype, device=self.device)
                return strided.copy_(found)
            return found

        return like(self.value, filled, self.sizes)

    def seen(self, value: Any, expert: int, inputs: Tensor) -> Tensor:
        """[N, some of K]: the weights of an expert, as the program's product shows them."""
        size = Form(tuple(value.shape), self.order).logical[-1]
        rows = torch.zeros(len(inputs), size, dtype=dtype_of_rows(self.ctx, self.product), device=self.device)
        rows[range(len(inputs)), inputs.to(self.device)] = 1
        return self.multiplied(value, rows, expert).T

    def multiplied(self, value: Any, rows: Tensor, expert: int) -> Tensor:
        """[R, N]: rows times the weight of an expert."""
        return multiplied(self.ctx, self.product, self.source, value, rows, expert)

    def experts(self, value: Any) -> list[int]:
        """The first and the last expert."""
        return sorted({0, value.shape[self.order[0]] - 1}) if len(self.order) == 3 else [0]
