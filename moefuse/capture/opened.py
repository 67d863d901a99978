"""What is open in an attempt at a frame: scopes of assumptions, loops over rows, and counts that are gone through one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture.dynamo import values
from moefuse.capture.replay import replay
from moefuse.passes.graph.assumptions import Assumption, Place

RETURN = -1
"""In place of an instruction: where the function returns."""


@dataclass(eq=False)
class Loop:
    """A ``for`` over the rows of a mask: every row, whether the mask has it or not; or one row for each way through the body.

    ``like`` is the tensor of rows (in the second case only), ``handed`` the rows so far, ``conditions`` what the body asked about them,
    ``lists`` the lists of modules that it selects from: name of the source -> list; ``numbers`` its rows where Python has them as numbers.
    """

    mask: Node
    count: int
    place: Place
    location: str
    done: int = 0
    like: Any = None
    handed: list[tuple[int, Node]] = field(default_factory=list)
    assumptions: list[Assumption] = field(default_factory=list)
    conditions: list[tuple[Node, Node]] = field(default_factory=list)
    finished: bool = False
    lists: dict[str, Any] = field(default_factory=dict)
    numbers: set[Node] = field(default_factory=set)

    @property
    def represented(self) -> bool:
        """Whether one row is traced for each way through the body, instead of every row."""
        return self.like is not None

    def outcomes(self, row: int) -> tuple[bool, ...]:
        """Which ways the conditions met so far take for a row. Raises what ``replay`` raises."""
        value = torch.full(tuple(self.like.shape[1:]), row, dtype=self.like.dtype)
        return tuple(bool(replay(node, start, value)) for node, start in self.conditions)

    def row(self) -> Assumption:
        """The assumption of its next iteration."""
        if self.represented:
            row, node = self.handed[min(self.done, len(self.handed) - 1)]
            return Assumption("row", self.place, self.location, self.mask, row=row, row_node=node)
        return Assumption("row", self.place, self.location, self.mask, row=self.done)


@dataclass(eq=False)
class Elements:
    """The numbers of ``bincount(ids)`` that a ``for`` goes through: as many as there are experts, though the last ones may be missing.

    Each iteration is the scope of an assumption: that the tensor has this element. ``nodes``: number in the graph -> place. ``lazy``: they
    come through ``enumerate``, which must not have been turned into a list before.
    """

    length: Assumption
    nodes: dict[Any, int]
    lazy: bool
    done: set[int] = field(default_factory=set)

    def given(self, iterator: Any, item: Any) -> int | None:
        """The place of the element that a ``for`` has just got, by itself or in a tuple (``enumerate``, ``zip``)."""
        if self.lazy and not values.is_generator(values.plain(iterator)):
            return None
        item = values.plain(item)
        inside = vars(item).get("items")
        found = [self.nodes.get(values.number_node(values.plain(v))) for v in (inside if isinstance(inside, list | tuple) else [item])]
        return next((at for at in found if at is not None), None)


@dataclass(eq=False)
class Scope:
    """An assumption whose two ways have not met yet.

    Attributes:
        join: number of the instruction where they meet; :data:`RETURN` where both return from the function.
        stack, locals: the state at the branch, to compare with.
        marker: the last operation recorded before the scope.
        loop: the loop whose iteration this is, if it is one.
        then: the instruction to go on with at ``join``, where this is the way that is not assumed (``dummies``).
        clock: what was made later than this was made inside.
        other: then, what the other way returns.
        notes: each ``ctx`` of an ``autograd.Function`` that returns early, and what was noted in it before.
    """

    assumption: Assumption
    translator: Any
    join: int
    stack: list[Any]
    locals: dict[str, Any]
    graph: Any
    marker: Node
    clock: int
    check: Callable[[], object] = lambda: None
    loop: Loop | None = None
    then: int | None = None
    other: Any = None
    notes: list[tuple[Any, Any]] = field(default_factory=list)
