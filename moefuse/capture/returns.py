"""A function that returns early where there are no rows: ``if x.numel() == 0: return x.new_empty(0, n)``.

The early way is traced first, to see what it returns: a tensor without elements, if the condition says that there are no rows. Then
Python's state is put back, and the other way is traced to where it returns. Its tensor has the same shape in the number of rows, so without
rows neither has elements, and nobody can tell one from the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.capture.bytecode import RETURNS, Code
from moefuse.capture.dynamo import values
from moefuse.capture.opened import RETURN
from moefuse.passes.graph import symbols


def here(tx: Any, at: int) -> int | None:
    """:data:`RETURN` if the instruction leaves the function."""
    return RETURN if tx.instructions[at].opname in RETURNS else None


def may(tx: Any, code: Code, there: int, on: int) -> bool:
    """Whether the way at ``there`` of an inlined function leaves it, and never meets the one at ``on``."""
    return getattr(tx, "parent", None) is not None and code.leaves(there, on)


def node(tx: Any) -> Node | None:
    """What is about to be returned, if that is a tensor."""
    return None if tx.instructions[tx.instruction_pointer].opname != "RETURN_VALUE" else values.tensor_node(values.realized(tx.stack[-1]))


def value(tx: Any) -> torch.Tensor | None:
    """Its fake value."""
    found = node(tx)
    shown = None if found is None else found.meta.get("example_value")
    return shown if type(shown) in _PLAIN else None


_PLAIN = (_torch_private.FakeTensor,)


def same_without(one: torch.Tensor, other: torch.Tensor, size: Any) -> bool:
    """Whether two tensors have no elements where ``size``, a symbol, is zero, and are alike there.

    ``one`` may have a gradient that ``other`` has not: of no elements, so that weights get zeros, as those of all fused experts.
    """
    if other.requires_grad and not one.requires_grad:
        return False
    facts = [(t.dtype, t.device, t.layout, t.dim(), t.is_inference(), t.is_conj(), t.is_neg()) for t in (one, other)]
    if facts[0] != facts[1] or one.layout != torch.strided:
        return False
    shape = [_expression(n) for n in one.shape]
    without = [[0 if n == size else n for n in sizes] for sizes in (shape, [_expression(n) for n in other.shape])]
    return without[0] == without[1] and size in shape and all(isinstance(n, int) for n in without[0])


def _expression(size: Any) -> Any:
    return size if isinstance(size, int) else symbols.expression(size)


__all__ = ["here", "may", "node", "same_without", "value"]
