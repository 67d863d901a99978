"""What elements are asked for, and what an operation asks of them in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.memory import Coords
from moefuse.passes.encodings.terms import Term


@dataclass(frozen=True)
class Batch:
    """What elements are asked for.

    Attributes:
        count: how many.
        expert: of each of them, the expert; it is the index where the program takes the row of an expert that stands for all of them.
        rows: index tensors that hold an expert's number.
        fixed: the values of inputs of the graph that never change.
        slots: of each of them, whose weights it is one of, where each element of ``rows`` chooses an expert's; None if one stands for all.
        given: what counts as inputs.
    """

    count: int
    expert: Tensor | None = None
    rows: frozenset[Node] = frozenset()
    fixed: Callable[[Node], Tensor | None] = lambda _: None
    slots: Tensor | None = None
    given: frozenset[Node] = frozenset()


class Asked(Protocol):
    """Elements that are followed (``elements.py``), as the rule of one operation sees them."""

    batch: Batch

    def of(self, node: Node, coords: Coords, user: Node) -> Term:
        """Elements of an argument, as the operation ``user`` finds them."""

    def every(self, node: Node, count: int, user: Node) -> Term:
        """All elements of a tensor of one dimension."""
