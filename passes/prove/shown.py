"""Weights that their class makes of others, as the reference reads them: an expert's at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.part import Coded
from moefuse.passes.encodings.subclass import unpacked
from moefuse.passes.ir.expr import Leaf, weight_leaves
from moefuse.passes.ir.regions import Region


class Shown:
    """The values of weights: those that are ``held`` unpacked, all others as ``value`` has them."""

    def __init__(self, region: Region, value: Callable[[Node], Any], held: Mapping[Node, Coded]) -> None:
        self.value, self.held = value, held
        self.leaves = {node: leaf for leaf in weight_leaves(region.expr) for node in leaf.parts or (leaf.source,) if node in held}

    def __call__(self, node: Node) -> Any:
        value = self.value(node)
        if node not in self.leaves:
            return value
        stack = Unpacked(self.held[node], value, self.leaves[node])
        return stack if stack.leaf.stacked else stack.select(0, 0)


class Unpacked:
    """A stack of weights, each unpacked when it is asked for."""

    def __init__(self, coded: Coded, value: Any, leaf: Leaf) -> None:
        self.coded, self.own, self.leaf = coded, value, leaf

    def select(self, _: int, expert: int) -> Tensor:
        """An expert's weight, its dimensions in the order in which the stack has them."""
        found = unpacked(self.coded, self.own, expert)
        return found if list(self.leaf.order) == sorted(self.leaf.order) else found.T


__all__ = ["Shown"]
