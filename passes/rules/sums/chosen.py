"""What stands where the mask of an expert chose, and something else elsewhere: routing weights, an expert's rows, a sum with its rows.

Where a condition is of the rows themselves, it is a part of what the expert computes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import same
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.operands import leaf
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.expr import Op
from moefuse.passes.ir.facts import Domain, Fill, Finding, Lost, Mask, Rows, SlotMask, Sum, Table, Unmasked, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import slot_masks
from moefuse.passes.rules.routing.absent import zeroed
from moefuse.passes.rules.routing.masks import constant, mask_table, masked, on_nonzero
from moefuse.passes.rules.rows.pointwise import domain_of, expert_output, gated, row_local
from moefuse.passes.rules.sums.add import add_to_sum


@rule("where")
def on_where(ctx: Context, node: Node, condition: Node, a: Any = None, b: Any = None) -> Finding:
    if a is None and b is None:
        return on_nonzero(ctx, node, condition, as_tuple=True)
    fact = ctx.fact(condition)
    if isinstance(fact, SlotMask):
        return slot_masks.kept(ctx, fact, *((b, a) if fact.negated else (a, b)))
    if not isinstance(fact, Mask | Table):
        kept, zero = (b, a) if isinstance(ctx.fact(b), Rows) else (a, b)
        left = zeroed(ctx, node, kept, condition, where=kept is b) if constant(ctx, zero) == 0 else None
        return _picked(ctx, node, condition, (condition, a, b)) if left is None else left
    keep, other = (b, a) if fact.negated else (a, b)
    return _chosen(ctx, node, fact, keep, other)


@rule("masked_fill")
def on_masked_fill(ctx: Context, node: Node, x: Node, mask: Node, value: Any) -> Finding:
    fact = ctx.fact(mask)
    if isinstance(fact, SlotMask):
        return slot_masks.kept(ctx, fact, x, value) if fact.negated else None
    if not isinstance(fact, Mask | Table):
        left = zeroed(ctx, node, x, mask) if constant(ctx, value) == 0 else None
        return _picked(ctx, node, mask, (x, mask, value)) if left is None else left
    return _chosen(ctx, node, fact, x, value) if fact.negated else None


def _picked(ctx: Context, node: Node, condition: Node, values: tuple[Any, ...]) -> Finding:
    """What an expert picks by a condition of its own rows: ``where(h > 0, h, 0.1 * h)``."""
    return row_local(ctx, node, values, {}) if isinstance(ctx.fact(condition), Rows) and is_boolean(condition) else None


def _chosen(ctx: Context, node: Node, fact: Mask | Table, keep: Any, other: Any) -> Finding:
    """``keep`` where the expert was chosen, ``other`` elsewhere."""
    table = _table(ctx, node, fact)
    if table is None or not isinstance(keep, Node):
        return masked(ctx, node, fact, keep, other)
    summed = _summed(ctx, node, table, keep, other)
    if summed is not None:
        return summed
    zero, given, out = constant(ctx, other), tensor(keep), tensor(node)
    if zero is None:
        return ctx.lost("no-rule", node, op="where") if isinstance(ctx.fact(keep), Rows) else None
    same_dtype = given is not None and out is not None and given.dtype == out.dtype
    rows = _rows(ctx, node, table, keep) if zero == 0 and same_dtype else None
    return masked(ctx, node, fact, keep, other) if rows is None else rows


def _table(ctx: Context, node: Node, fact: Mask | Table) -> Table | None:
    """The mask of one expert over the tokens, as it meets rows: [tokens, 1] of ids with one slot is one, too."""
    if isinstance(fact, Table):
        return replace(fact, negated=False) if fact.ones and fact.expert is not None else None
    wide = bool(out_shape(node)) and not same(out_shape(node)[-1], 1)
    if not wide or fact.expert is None or fact.weight is not None or fact.routing.top_k != 1:
        return None
    return mask_table(ctx, node, fact, tuple(tuple(a for a in axis if a.kind != "k") for axis in fact.axes))


def _rows(ctx: Context, reader: Node, table: Table, value: Node) -> Rows | Lost | None:
    """One expert's rows, which ``reader`` reads, where it was chosen, and zeros elsewhere: what a product with the mask is."""
    fact = ctx.fact(value)
    if not isinstance(fact, Rows):
        return expert_output(ctx, reader, value, table) if isinstance(fact, View) else None
    domain = domain_of([fact], [table])
    if domain is None or (gated(fact.expr) and not _covers(table, fact.domain)):
        return ctx.lost("experts-differ", reader, expert="?", detail="rows of different experts or layers meet in one operation")
    if gated(fact.expr):  # their weight is zero elsewhere as it is
        return fact
    found = leaf(ctx, reader, fact.axes, domain, table)
    return None if found is None else Rows(fact.axes, domain, Op(reader, "mul", (fact.expr, found)))


def _covers(table: Table, domain: Domain) -> bool:
    """Whether a mask is set for every token that an expert's rows are weighted for."""
    return domain.routing is table.routing and domain.expert == table.expert and table.slot in (None, domain.slot)


def _summed(ctx: Context, node: Node, table: Table, more: Node, out: Any) -> Finding:
    """``where(hit, out + rows, out)``; or ``where(hit, rows, out)``, if nothing can be there for tokens that have one expert."""
    call, before = ctx.calls.get(more), ctx.fact(out)
    if not isinstance(before, Sum | Fill | View) or call is None:
        return None
    terms = [a for a in call.args if a is not out]
    added = call.name == "add" and not call.inplace and not call.kwargs and len(terms) == 1 and len(call.args) == 2
    if added and isinstance(terms[0], Node) and ctx.written_between(out, more, node) is None:
        rows = _rows(ctx, more, table, terms[0])
        summed = add_to_sum(ctx, node, out, None, before, rows) if isinstance(rows, Rows) else rows
        if isinstance(summed, Sum):
            ctx.facts[more] = Unmasked()  # no sum of its own: this one goes on from what stood before
        return summed
    if not _is_empty(before, table):
        return None
    rows = _rows(ctx, node, table, more)
    return add_to_sum(ctx, node, out, None, before, rows) if isinstance(rows, Rows) else rows


def _is_empty(before: Any, table: Table) -> bool:
    """Whether a sum is zero for tokens of one more expert: each has no other one."""
    if table.routing.top_k != 1 or not isinstance(before, Sum):
        return table.routing.top_k == 1 and isinstance(before, Fill) and before.value == 0.0
    others = [(p.rows.domain.routing, p.rows.domain.expert) for p in before.parts]
    return before.base is None and all(routing is table.routing and expert != table.expert for routing, expert in others)
