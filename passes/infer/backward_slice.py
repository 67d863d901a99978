"""What a value that is older than a region is made by: the steps from the inputs of the graph, writes in place among them.

A weight is a few views of a Parameter, or some arithmetic on a few (``w = empty(...); w[::2] = packed & 15; w[1::2] = packed >> 4;
(w - zero) * scale``). What has more behind it is an activation, and nobody has to know its value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import call_of, call_target
from moefuse.passes.graph.op_classes import random
from moefuse.passes.graph.sharded import is_gathered, is_root
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.regions import Region

SMALL, WEIGHT = 16, 96
"""Most steps of a value that the region reads, and of an expert weight."""


class Older:
    """Steps of the values that a region reads. Of several versions of a storage the one that the region finds counts.

    Args:
        ctx: of it storage, writes and positions.
    """

    def __init__(self, ctx: Context, region: Region) -> None:
        self.ctx = ctx
        self._used: dict[Node, int] = {}
        for node in region.nodes:
            for source in node.all_input_nodes:
                root, at = self.storage(source), ctx.position[node]
                self._used[root] = min(at, self._used.get(root, at))
        self._last = ctx.position[region.anchor]

    def storage(self, node: Node) -> Node:
        """The first node of a node's storage."""
        return self.ctx.storage.get(node, node)

    def writes(self, node: Node) -> list[Node]:
        """What writes to a node's storage."""
        return self.ctx.writes.get(self.storage(node), [])

    def steps(self, node: Node, most: int) -> list[Node] | None:
        """The nodes that make a value, in the order of the program; None if they are many, or one of them is not a plain operation."""
        position, last = self.ctx.position, self._used.get(self.storage(node), self._last)
        found: set[Node] = set()
        stack = [node]
        while stack:
            step = stack.pop()
            if step in found:
                continue
            if step not in position or not (is_root(step) or _plain(step)) or len(found) == most:
                return None
            found.add(step)
            stack += [] if is_gathered(step) else step.all_input_nodes
            stack += [w for w in self.writes(step) if position[w] < last]
        return sorted(found, key=position.__getitem__)

    def roots(self, node: Node, most: int) -> list[Node]:
        """The inputs of the graph that a value is made from; none if its steps are not known."""
        return [n for n in self.steps(node, most) or [] if is_root(n)]

    def written(self, root: Node, steps: list[Node]) -> bool:
        """Whether one of the steps writes to an input of the graph."""
        storage = self.storage(root)
        return any(self.storage(n) is storage and any(w in steps for w in self.writes(n)) for n in steps if n is root)


def _plain(node: Node) -> bool:
    """Whether a node may be run again: a torch operation that draws no random numbers."""
    call = call_of(node)
    return call is not None and not random(call.name) and not isinstance(node.target, _torch_private.HigherOrderOperator)


def execute(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], value: Callable[[Node], Any], kept: set[int]) -> Any:
    """Run one operation, unless it writes to a storage that is to stay as it is.

    Args:
        args, kwargs: its arguments, with values in place of nodes.
        value: gives the values of its targets.
        kept: addresses of the storages.

    Raises:
        ValueError: it would.
    """
    call = call_of(node)
    if call is not None and any(storages(value(target)) & kept for target in call.targets):
        raise ValueError(f"{node.name} would write to a user's tensor")
    return call_target(node, args, kwargs)


def storages(value: Any) -> set[int]:
    """Addresses of the storages of a tensor, or of several."""
    if isinstance(value, tuple | list):
        return {s for v in value for s in storages(v)}
    if not isinstance(value, torch.Tensor):
        return set()
    try:
        return {value.untyped_storage().data_ptr()} - {0}
    except (NotImplementedError, RuntimeError):  # a subclass that holds none
        return set()
