"""Code that capture traced as if there were rows, behind ``if n == 0: continue``. A replay jumps over it where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of, fake
from moefuse.passes.graph.op_classes import CASTS, SHAPED
from moefuse.passes.graph.sizes import shape_of, size_of


class Guards:
    """Conditions on numbers of rows in front of some nodes, asked about the values that a replay has so far.

    Args:
        assumptions: any; those about a size are such conditions.
        nodes: what is replayed, in order.
        env: values so far, filled by the replay.
    """

    def __init__(self, assumptions: Sequence[Assumption], nodes: Sequence[Node], env: dict[Node, Any]) -> None:
        # What appended to a list is read behind it, element by element: there has to be one.
        conditions = [a for a in assumptions if a.kind == "size" and not a.appended]
        self._of = {node: found for node in nodes if (found := [a for a in conditions if node in a.nodes])}
        self._sizes = _sizes(nodes) if self._of else {}
        self._env = env
        self._jumped: dict[Node, Assumption] = {}

    def jump(self, node: Node, value: Callable[[Node], Any]) -> bool:
        """Whether a node is jumped over. What it writes to, or the local that it replaces, then stays what it was."""
        guard = next((a for a in self._of.get(node, ()) if not self._holds(a)), None)
        # How long something is that was jumped over, Dynamo asks where it likes.
        guard = guard or next((self._jumped[i] for i in node.all_input_nodes if i in self._jumped), None) if self._of else None
        if guard is None:
            return False
        if isinstance(fake(node), torch.SymInt):
            return self._number(node, guard)
        if node is guard.returned:
            self._env[node] = _nothing(node)
            return True
        call = call_of(node)
        before = call.targets[0] if call is not None and call.targets else None
        for _, old, new in guard.carried:
            before = old if node in _bound(new, guard) and isinstance(old, Node) else before
        if before is None or before in self._jumped:
            self._jumped[node] = guard
        else:
            self._env[node] = value(before)
        return True

    def jumped(self, node: Node) -> bool:
        """Whether a node has no value, for it was jumped over."""
        return node in self._jumped

    def _number(self, node: Node, guard: Assumption) -> bool:
        """As :func:`jump`: a number that the guarded code leaves stays what it was, rows that are not there are none, and a number of
        numbers is one without rows, too."""
        old = next((old for _, old, new in guard.carried if isinstance(new, Node) and _expr(new) == _expr(node)), None)
        was = old if isinstance(old, int) else None if old is None else self._size(_expr(old))
        if was is None and _expr(node).is_Symbol and any(i in self._jumped for i in node.all_input_nodes):
            was = 0
        if was is not None:
            self._env[node] = was
        return was is not None or not all(i in self._env for i in node.all_input_nodes)

    def _holds(self, guard: Assumption) -> bool:
        """Whether there are rows; also where the values so far do not say."""
        ends = guard.subject if isinstance(guard.subject, tuple) else (guard.subject,)
        sizes = [self._size(symbol) for symbol in ends]
        return None in sizes or sizes[0] > sum(sizes[1:])

    def _size(self, symbol: Any) -> Any:
        """The value of a size that only the run knows."""
        node, dim = self._sizes.get(symbol, (None, None))
        held = None if node is None else self._env.get(node)
        return held if held is None or dim is None else held.shape[dim]


def _expr(node: Node) -> Any:
    value = fake(node)
    return size_of(value) if isinstance(value, int | torch.SymInt) else None


def _bound(new: Any, guard: Assumption) -> list[Node]:
    """A local that the guarded code leaves, and what it was before operations bound it again that change nothing."""
    found = [new]
    while found[-1] in guard.nodes and (call := call_of(found[-1])) is not None and call.name in CASTS | SHAPED and not call.targets:
        found.append(call.args[0])
    return found


def _nothing(node: Node) -> torch.Tensor:
    """What a function returns where there are no rows: a tensor like that of a node, without elements."""
    value = fake(node)
    shape = [size if isinstance(size, int) else 0 for size in shape_of(value)]
    return torch.empty(shape, dtype=value.dtype, device=value.device)


def _sizes(nodes: Sequence[Node]) -> dict[Any, tuple[Node, int | None]]:
    """For each symbol the first node that has it: as a dimension, or as its value."""
    found: dict[Any, tuple[Node, int | None]] = {}
    for node in nodes:
        value = fake(node)
        if isinstance(value, torch.Tensor):
            for dim, size in enumerate(shape_of(value)):
                found.setdefault(size, (node, dim))
        elif isinstance(value, torch.SymInt):
            found.setdefault(size_of(value), (node, None))
    return found
