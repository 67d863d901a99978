"""What stands where the mask of an expert chose, and something else elsewhere: routing weights, an expert's rows, a sum with its rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.infer.operands import leaf
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Op
from moefuse.passes.ir.facts import Domain, Fill, Lost, Mask, Rows, Sum, Table, Unmasked, View
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.absent import zeroed
from moefuse.passes.rules.routing.masks import constant, masked, on_nonzero
from moefuse.passes.rules.rows.pointwise import domain_of, expert_output, gated
from moefuse.passes.rules.sums.add import add_to_sum


@rule("where")
def on_where(ctx: Context, node: Node, condition: Node, a: Any = None, b: Any = None) -> Any:
    if a is None and b is None:
        return on_nonzero(ctx, node, condition, as_tuple=True)
    fact = ctx.fact(condition)
    if not isinstance(fact, Mask | Table):
        kept, zero = (b, a) if isinstance(ctx.fact(b), Rows) else (a, b)
        return zeroed(ctx, node, kept, condition, where=kept is b) if constant(ctx, zero) == 0 else None
    keep, other = (b, a) if fact.negated else (a, b)
    return _chosen(ctx, node, fact, keep, other)


@rule("masked_fill")
def on_masked_fill(ctx: Context, node: Node, x: Node, mask: Node, value: Any) -> Any:
    fact = ctx.fact(mask)
    if not isinstance(fact, Mask | Table):
        return zeroed(ctx, node, x, mask) if constant(ctx, value) == 0 else None
    return _chosen(ctx, node, fact, x, value) if fact.negated else None


def _chosen(ctx: Context, node: Node, fact: Mask | Table, keep: Any, other: Any) -> Any:
    """``keep`` where the expert was chosen, ``other`` elsewhere."""
    if not isinstance(fact, Table) or not fact.ones or fact.expert is None or not isinstance(keep, Node):
        return masked(ctx, node, fact, keep, other)
    table = replace(fact, negated=False)
    more = _one_more(ctx, node, table, keep, other)
    if more is not None or constant(ctx, other) is None:
        return more
    given, out = tensor(keep), tensor(node)
    same_dtype = given is not None and out is not None and given.dtype == out.dtype
    rows = _rows(ctx, node, table, keep) if constant(ctx, other) == 0 and same_dtype else None
    return masked(ctx, node, fact, keep, other) if rows is None else rows


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


def _one_more(ctx: Context, node: Node, table: Table, more: Node, out: Any) -> Any:
    """``where(hit, out + rows, out)``."""
    call, before = ctx.calls.get(more), ctx.fact(out)
    if call is None or call.name != "add" or call.inplace or call.kwargs or not isinstance(before, Sum | Fill | View):
        return None
    terms = [a for a in call.args if a is not out]
    if len(terms) != 1 or not isinstance(terms[0], Node) or ctx.written_between(out, more, node) is not None:
        return None
    rows = _rows(ctx, more, table, terms[0])
    summed = add_to_sum(ctx, node, out, None, before, rows) if isinstance(rows, Rows) else rows
    if isinstance(summed, Sum):
        ctx.facts[more] = Unmasked()  # no sum of its own: this one goes on from what stood before
    return summed
