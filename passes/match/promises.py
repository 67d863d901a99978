"""Assertions about sizes that only the run knows: those that always hold, and those that a program makes of its own.

Dynamo writes an assertion for whatever it learnt about such a size: that it is not negative, that a mask has no more true elements than
elements, that a view fits. What goes with a region's rows is no loss: its ops hold for any number of rows. But ``assert len(rows) <
capacity`` in the program, or ``torch._check``, is an effect like any other: it may stop the program.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse._dynamo.values import unbacked_in
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.op_classes import ASSERTS
from moefuse.passes.graph.sizes import product, shape_of
from moefuse.passes.infer.state import Context

_COUNTED = frozenset("nonzero argwhere where masked_select getitem index".split())
"""Operations with as many rows as a mask has true elements."""


def about_data(ctx: Context, node: Node) -> bool:
    """Whether a node only asserts something about sizes that the run decides."""
    call = ctx.calls.get(node)
    return call is not None and call.name in ASSERTS and any(unbacked_in(fake(i)) for i in node.all_input_nodes)


def promised(ctx: Context, node: Node) -> bool:
    """Whether an assertion says of a number of rows more than what holds for every mask. Of several numbers at once nothing is known."""
    if not about_data(ctx, node) or not node.all_input_nodes:
        return False
    condition = getattr(getattr(fake(node.all_input_nodes[0]), "node", None), "expr", None)
    symbols = unbacked_in(fake(node.all_input_nodes[0]))
    if not isinstance(condition, sympy.Basic) or len(symbols) != 1:
        return False
    (rows,) = symbols
    most = _most(ctx, rows)
    if most is None:
        return False
    if condition.has(sympy.Function):  # a remainder or a quotient: views ask for such themselves, and the facts of rows are the answer
        return False
    if not isinstance(condition, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt):
        return bool(condition != sympy.true) and not (condition == sympy.Ne(rows, 0) and rows in ctx.not_empty)
    ends = [most] if rows in ctx.not_empty else [most, 0]
    return any(condition.subs(rows, end) != sympy.true for end in ends)


def _most(ctx: Context, rows: Any) -> Any:
    """The elements of the mask that decides a number of rows; None where it is no mask that does."""
    node = ctx.made_by.get(rows)
    call = ctx.calls.get(node) if node is not None else None
    if node is None or call is None or call.name not in _COUNTED:
        return None
    masks = [t for i in node.all_input_nodes if (t := tensor(i)) is not None and t.dtype == torch.bool]
    return product(shape_of(masks[0])) if len(masks) == 1 else None
