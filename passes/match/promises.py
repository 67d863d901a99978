"""Assertions about sizes that only the run knows: those that always hold, and those that a program makes of its own.

Dynamo writes an assertion for whatever it learnt about such a size: that it is not negative, that a mask has no more true elements than
elements, that a view fits. What goes with a region's rows is no loss: its ops hold for any number of rows. But ``assert len(rows) <
capacity`` in the program, or ``torch._check``, is an effect like any other: it may stop the program.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.op_classes import ASSERTS, COUNTED
from moefuse.passes.graph.sizes import product, shape_of
from moefuse.passes.graph.symbols import always, unbacked, unbacked_in
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Entries, Many, Occurring, Order, Present, Routing, RowNumber, Rows, Selection, Span

_TRIED = 33
"""Up to so many rows a remainder or a quotient is tried: as many as anybody groups them in."""

_ROWS = 2**56
"""More rows than any tensor has: a tensor may have 2^63 - 1 elements, of which Dynamo writes down what that means for rows."""

_ANY = sympy.Symbol("rows", integer=True, nonnegative=True)

_INEQUALITIES = (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


def about_data(ctx: Context, node: Node) -> bool:
    """Whether a node only asserts something about sizes and numbers that the run decides."""
    call = ctx.calls.get(node)
    return call is not None and call.name in ASSERTS and any(unbacked_in(fake(i)) for i in node.all_input_nodes)


def settled(node: Node) -> bool:
    """Whether an assertion is of a number that was read out of a tensor, and that is what it says to all that follows: ``torch._check``."""
    stack = list(node.all_input_nodes)
    while stack:
        here = stack.pop()
        value = fake(here)
        if not isinstance(value, torch.SymBool | torch.SymInt | torch.SymFloat):
            continue
        if any(isinstance(fake(i), torch.Tensor) for i in here.all_input_nodes) and not unbacked_in(value) and _is_read(here):
            return True
        stack.extend(here.all_input_nodes)
    return False


def _is_read(node: Node) -> bool:
    return node.target == "item" or getattr(node.target, "__name__", "") in ("item", "_local_scalar_dense", "is_nonzero")


def promised(ctx: Context, node: Node) -> bool:
    """Whether an assertion says of numbers of rows more than what holds for every routing, or may do so."""
    if not about_data(ctx, node):
        return False
    asserted = getattr(fake(node.all_input_nodes[0]), "node", None)
    condition = getattr(asserted, "expr", None)
    symbols = sorted(unbacked_in(fake(node.all_input_nodes[0])), key=str)
    if not isinstance(condition, sympy.Basic) or not symbols or condition == sympy.true:
        return False
    known = {s: n for s in symbols if (n := ctx.sizes.get(s)) is not None and not unbacked(n)}
    condition, symbols = condition.subs(known), [s for s in symbols if s not in known]
    if not symbols or condition == sympy.true:
        return bool(condition != sympy.true)
    return _of_one(ctx, condition, symbols[0], asserted) if len(symbols) == 1 else _of_several(ctx, condition, symbols)


def _of_one(ctx: Context, condition: Any, rows: Any, asserted: Any) -> bool:
    most = _most(ctx, rows)
    if condition.has(sympy.Function):  # a remainder or a quotient, which views ask for too: of elements, that they make whole rows
        tried = range(1, min(most, _TRIED) + 1) if isinstance(most, int) else range(1, _TRIED)
        return not _of_elements(ctx, rows) and any(_fails(condition, {rows: n}) for n in tried)
    if isinstance(ctx.facts.get(ctx.made_by[rows]), Occurring) and not condition.atoms(sympy.Eq, sympy.Ne, sympy.Le, sympy.Lt):
        return False  # that the list has an element which is read: capture assumes it, and proves what follows where it is missing
    if most is None:
        settled = isinstance(fake(ctx.made_by[rows]), torch.SymBool)  # nothing has this size any more: capture knows it
        return not settled and bool(condition.subs(rows, _ANY) != sympy.true)
    if isinstance(condition, sympy.Le) and condition.lhs == rows and condition.rhs.is_Integer and condition.rhs >= _ROWS:
        return False
    if not isinstance(condition, _INEQUALITIES):
        return not (condition == sympy.Ne(rows, 0) and rows in ctx.given.not_empty)
    ends = [most] if rows in ctx.given.not_empty else [most, 0]
    return not all(always(condition.subs(rows, end), asserted.shape_env) for end in ends)


def _of_several(ctx: Context, condition: Any, symbols: list[Any]) -> bool:
    """Of numbers of slots of several experts: what is linear holds for every routing if it does wherever one expert has all slots.

    And where none of these experts has any, unless they have all slots together.
    """
    numbers: dict[Any, _Number] = {}
    entries = [s for s in symbols if isinstance(ctx.facts.get(ctx.made_by[s]), Entries)]
    for symbol in (s for s in symbols if s not in entries):
        order = _order(ctx.facts.get(ctx.made_by[symbol]))
        if order is not None:
            condition = condition.subs(symbol, _slots(order.routing))
            continue
        number = _slots_of(ctx, symbol)
        if number is None:
            return True
        if _of_elements(ctx, symbol):
            rows = sympy.Symbol(f"{symbol}_rows", integer=True, nonnegative=True)
            condition, symbol = condition.subs(symbol, _features(ctx, symbol) * rows), rows
        equal = next((s for s, n in numbers.items() if n.same(number)), None)
        if equal is None:
            numbers[symbol] = number
        else:
            condition = condition.subs(symbol, equal)
    for symbol in entries:  # as many as all experts' counts together
        counted = all(n.bins and n.routing is ctx.facts[ctx.made_by[symbol]].routing for n in numbers.values())
        if not counted or {e for n in numbers.values() for e in n.experts} != set(range(len(numbers))):
            return True
        condition = condition.subs(symbol, sum(numbers))
    routings = {id(n.routing) for n in numbers.values()}
    return condition != sympy.true and (len(routings) != 1 or _of_slots(condition, numbers))


def _of_slots(condition: Any, numbers: dict[Any, _Number]) -> bool:
    """Whether a condition on different numbers of slots of one routing says more than what always holds."""
    symbols = list(numbers)
    most, none = _slots(numbers[symbols[0]].routing), dict.fromkeys(symbols, 0)
    experts = frozenset[int]().union(*(n.experts for n in numbers.values()))
    whole = _of_all_slots(list(numbers.values()), experts)
    if whole and all(len(n.experts) == 1 for n in numbers.values()):
        condition = condition.subs(symbols[-1], most - sum(symbols[:-1]))
        if condition == sympy.true:
            return False
    if condition.has(sympy.Function):
        return any(_fails(condition, none | {s: n}) for s in symbols for n in range(1, _TRIED))
    if not isinstance(condition, (*_INEQUALITIES, sympy.Eq)) or sympy.Poly(condition.lhs - condition.rhs, *symbols).total_degree() > 1:
        return True
    corners = [{s: most if e in n.experts else 0 for s, n in numbers.items()} for e in experts]
    corners += [] if whole else [none]
    fewer = [s for s, n in numbers.items() if n.fewer]
    corners += [corner | {s: 0} for corner in corners for s in fewer]
    return len(fewer) > 1 or any(condition.subs(corner) != sympy.true for corner in corners)


@dataclass(frozen=True)
class _Number:
    """How many slots some experts have together.

    ``fewer``: perhaps less than that, tokens or those of one slot for example. ``bins``: one entry of a list of all counts.
    """

    routing: Routing
    experts: frozenset[int]
    rows: Selection | None = None
    bins: bool = False

    @property
    def fewer(self) -> bool:
        return self.rows is not None and (self.rows.slot is not None or (self.rows.by_token and not self.routing.distinct))

    def same(self, other: _Number) -> bool:
        """Whether two of them are one number."""
        if self.fewer or other.fewer:
            return self.rows is not None and self.rows.same(other.rows)
        return self.routing is other.routing and self.experts == other.experts


def _slots_of(ctx: Context, symbol: Any) -> _Number | None:
    """What is known of a number that only the run knows; None if it is no number of slots."""
    fact = ctx.facts.get(ctx.made_by[symbol])
    if isinstance(fact, Span):
        return _Number(fact.routing, frozenset(range(fact.start, fact.stop)), bins=fact.stop == fact.start + 1)
    rows = _selection(fact)
    if rows is None or isinstance(rows.expert, RowNumber):
        return None
    return _Number(rows.routing, frozenset((rows.expert,)), rows, bins=rows.order is not None)


def _order(fact: Any) -> Order | None:
    """The order of all slots, where a tensor has a row for each of them."""
    return fact.domain.order if isinstance(fact, Rows) and fact.domain.selection is None else None


def _selection(fact: Any) -> Selection | None:
    """The rows of one expert, of which a tensor has as many."""
    first = next((item for item in fact.items if item is not None), None) if isinstance(fact, Many) else fact
    return first.domain.selection if isinstance(first, Rows) else getattr(first, "selection", None)


def _of_all_slots(numbers: list[_Number], experts: Set[int]) -> bool:
    """Whether every slot is in one of these numbers."""
    routing, count = numbers[0].routing, len(experts)
    if any(n.fewer for n in numbers) or not routing.whole or set(experts) != set(range(count)):
        return False
    # Where nothing bounds the ids, they are all bins that there are: ``split`` adds them up.
    return routing.within(count) or (routing.choices is None and len(numbers) == count and all(n.bins for n in numbers))


def _fails(condition: Any, numbers: dict[Any, int]) -> bool:
    """Whether a condition is false of some numbers; one that divides by zero there says nothing of them."""
    try:
        return bool(condition.subs(numbers) == sympy.false)
    except (ZeroDivisionError, AssertionError):
        return False


def _of_elements(ctx: Context, rows: Any) -> bool:
    """Whether a mask over features picked so many numbers, one by one: ``x.masked_select(mask.expand_as(x)).view(-1, H)``."""
    value = tensor(ctx.made_by[rows])
    several = not isinstance(ctx.facts.get(ctx.made_by[rows]), Rows) or _features(ctx, rows) != 1
    return value is not None and value.is_floating_point() and value.dim() == 1 and several


def _features(ctx: Context, elements: Any) -> Any:
    """How many of them a row has."""
    fact = ctx.facts[ctx.made_by[elements]]
    return product(a.size for axis in fact.axes for a in axis if a.kind == "f")


def _most(ctx: Context, symbol: Any) -> Any:
    """How large a number of rows may be: the elements of the mask that decides it, or all slots, which an expert's segment is cut from.

    Or all experts, of those that occur; None where it is no such number.
    """
    node = ctx.made_by.get(symbol)
    call = ctx.calls.get(node) if node is not None else None
    if node is None or call is None:
        return None
    fact = ctx.facts.get(node)
    rows = _order(fact) or _selection(fact)
    occurring = fact.items[0] if isinstance(fact, Many) and fact.items else fact
    if isinstance(occurring, Present):
        slots = _slots(occurring.routing)
        return min(occurring.count, slots) if isinstance(slots, int) else occurring.count
    if isinstance(fact, Span):
        return _slots(fact.routing)
    if isinstance(rows, Order) or (rows is not None and rows.order is not None):
        return _slots(rows.routing)
    if call.name not in COUNTED:
        return None
    if rows is not None and (rows.by_token or rows.routing.distinct) and not _of_elements(ctx, symbol):
        return rows.routing.num_tokens  # each token once
    read = [t for i in node.all_input_nodes if (t := tensor(i)) is not None]
    masks = [t for t in read if t.dtype == torch.bool or len(read) == 1]
    return product(shape_of(masks[0])) if len(masks) == 1 else None


def _slots(routing: Routing) -> Any:
    return routing.num_tokens * routing.top_k
