"""Which matrix of a stack [E, m, n] an operation takes out of it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, call_of, fake, tensor
from moefuse.passes.graph.sizes import shape_of

_STEPS = 4
"""Views and casts between a matrix that is taken out of a stack and the product that reads it."""


def row_of(call: Call, dims: int = 3) -> int | None:
    """The expert whose matrix (or vector, of a stack with two dimensions) an operation takes out of a stack; None for any other."""
    known = tensor(call.args[0]) if call.args else None
    if call.name not in ("getitem", "select") or known is None or known.dim() != dims:
        return None
    index = call.args[1] if call.name == "getitem" else call.args[2] if call.args[1] == 0 else None
    count = shape_of(fake(call.args[0]))[0]
    if not isinstance(index, int) or isinstance(index, bool) or not isinstance(count, int):
        return None
    return index % count


def row_behind(node: Node, stack: Node, expert: int) -> Node | None:
    """One expert's matrix (or vector) of a stack, as it is taken out for an operation that reads it, perhaps turned."""
    sizes = shape_of(fake(stack))[1:]
    below = [node]
    for _ in range(_STEPS):
        below = [n for value in below for n in value.all_input_nodes if _has(n, sizes)]
        for value in below:
            call = call_of(value)
            if call is not None and call.args and call.args[0] is stack and row_of(call, len(sizes) + 1) == expert:
                return value
    return None


def _has(node: Node, sizes: tuple[Any, ...]) -> bool:
    known = tensor(node)
    return known is not None and tuple(shape_of(known)) in (sizes, sizes[::-1])
