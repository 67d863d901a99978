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

from moefuse._dynamo.values import always, unbacked_in
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.op_classes import ASSERTS, COUNTED
from moefuse.passes.graph.sizes import product, shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Index, Routing, Span

_TRIED = 33
"""Up to so many rows a remainder or a quotient is tried: as many as anybody groups them in."""

_INEQUALITIES = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


def about_data(ctx: Context, node: Node) -> bool:
    """Whether a node only asserts something about sizes that the run decides."""
    call = ctx.calls.get(node)
    return call is not None and call.name in ASSERTS and any(unbacked_in(fake(i)) for i in node.all_input_nodes)


def promised(ctx: Context, node: Node) -> bool:
    """Whether an assertion says of numbers of rows more than what holds for every routing."""
    if not about_data(ctx, node) or not node.all_input_nodes:
        return False
    asserted = getattr(fake(node.all_input_nodes[0]), "node", None)
    condition = getattr(asserted, "expr", None)
    symbols = sorted(unbacked_in(fake(node.all_input_nodes[0])), key=str)
    if not isinstance(condition, sympy.Basic) or not symbols:
        return False
    return _of_one(ctx, condition, symbols[0], asserted) if len(symbols) == 1 else _of_several(ctx, condition, symbols)


def _of_one(ctx: Context, condition: Any, rows: Any, asserted: Any) -> bool:
    most = _most(ctx, rows)
    if most is None:
        return False
    if condition.has(sympy.Function):  # a remainder or a quotient, which views ask for too: of elements, that they make whole rows
        tried = range(1, min(most, _TRIED) + 1) if isinstance(most, int) else range(1, _TRIED)
        return not _of_elements(ctx, rows) and any(_fails(condition, {rows: n}) for n in tried)
    if not isinstance(condition, _INEQUALITIES):
        return bool(condition != sympy.true) and not (condition == sympy.Ne(rows, 0) and rows in ctx.given.not_empty)
    ends = [most] if rows in ctx.given.not_empty else [most, 0]
    return not all(always(condition.subs(rows, end), asserted.shape_env) for end in ends)


def _of_several(ctx: Context, condition: Any, symbols: list[Any]) -> bool:
    """Of several experts' numbers of slots, together all slots at most: what is linear holds if it does where one has them all."""
    facts = [ctx.facts.get(ctx.made_by[s]) for s in symbols]
    spans = [f for f in facts if isinstance(f, Span)]
    if len(spans) < len(facts) or any(f.routing is not spans[0].routing for f in spans):
        return False
    most = _slots(spans[0].routing)
    if _of_each_expert(spans):  # together they are all slots
        condition = condition.subs(symbols[-1], most - sum(symbols[:-1]))
        if condition == sympy.true:
            return False
    none = dict.fromkeys(symbols, 0)
    if condition.has(sympy.Function):
        return any(_fails(condition, none | {s: n}) for s in symbols for n in range(1, _TRIED))
    if not isinstance(condition, _INEQUALITIES) or sympy.Poly(condition.lhs - condition.rhs, *symbols).total_degree() > 1:
        return True
    return any(condition.subs(none | some) != sympy.true for some in ({}, *({s: most} for s in symbols)))


def _fails(condition: Any, numbers: dict[Any, int]) -> bool:
    """Whether a condition is false of some numbers; one that divides by zero there says nothing of them."""
    try:
        return bool(condition.subs(numbers) == sympy.false)
    except (ZeroDivisionError, AssertionError):
        return False


def _of_each_expert(spans: list[Span]) -> bool:
    """Whether these are the numbers of all experts, which ``split`` adds up."""
    count = len(spans)
    return sorted((s.start, s.stop) for s in spans) == [(e, e + 1) for e in range(count)] and spans[0].routing.choices in (None, count)


def _of_elements(ctx: Context, rows: Any) -> bool:
    """Whether a mask over features picked so many numbers, one by one: ``x.masked_select(mask.expand_as(x)).view(-1, H)``."""
    value = tensor(ctx.made_by[rows])
    return value is not None and value.is_floating_point() and value.dim() == 1


def _most(ctx: Context, rows: Any) -> Any:
    """How large a number of rows may be: the elements of the mask that decides it, or all slots, which an expert's segment is cut from.

    None where it is no such number.
    """
    node = ctx.made_by.get(rows)
    call = ctx.calls.get(node) if node is not None else None
    if node is None or call is None:
        return None
    fact = ctx.facts.get(node)
    if isinstance(fact, Span):
        return _slots(fact.routing)
    if isinstance(fact, Index) and fact.selection.order is not None:
        return _slots(fact.selection.routing)
    if call.name not in COUNTED:
        return None
    masks = [t for i in node.all_input_nodes if (t := tensor(i)) is not None and t.dtype == torch.bool]
    return product(shape_of(masks[0])) if len(masks) == 1 else None


def _slots(routing: Routing) -> Any:
    return routing.num_tokens * routing.top_k
