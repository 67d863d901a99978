"""Row-local operations: pointwise functions, and reductions over the features of a row. Everything else mixes rows."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import call_of, tensor
from moefuse.passes.graph.named import named, placed
from moefuse.passes.graph.op_classes import CASTS, RANDOM, SHAPED, TERNARY, UNARY, drop_probability
from moefuse.passes.graph.sizes import same
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.cone import cone_rows
from moefuse.passes.infer.operands import beside, joined, leaf, padded, real, scalar, symbol
from moefuse.passes.infer.routings import shared_routing
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Axes, extent, fresh
from moefuse.passes.ir.expr import Expr, Gate, Op, has_linear, walk
from moefuse.passes.ir.facts import Buffer, Counts, Domain, Fill, Finding, Listed, Lost, Mask, Rows, Sorted, Span, Table, View
from moefuse.passes.rules import EVERYTHING, rule
from moefuse.passes.rules.routing import slot_masks
from moefuse.passes.rules.routing.masked_slots import dropped
from moefuse.passes.rules.routing.masks import masked_weight
from moefuse.passes.rules.routing.offsets import difference
from moefuse.passes.rules.routing.sort import on_div
from moefuse.passes.rules.routing.tables import table_with, unary
from moefuse.passes.rules.routing.valid_slots import restricted
from moefuse.passes.rules.rows.by_slot import by_slot
from moefuse.passes.rules.rows.listed import product
from moefuse.passes.rules.rows.views import inherited

_BESIDE = SHAPED | CASTS | frozenset(("stack", "cat"))
"""What puts values beside others as they are."""


@rule(*UNARY, *(set(TERNARY) - {"addcmul"}), "pow", "maximum", "minimum", "remainder", "fmod", "atan2", "rsub")
def on_pointwise(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Finding:
    facts = [ctx.fact(a) for a in (*args, *kwargs.values())]
    if any(isinstance(f, Span | Counts) for f in facts):
        return difference(ctx, *args) if ctx.calls[node].name == "sub" and len(args) == 2 and not kwargs else None  # type: ignore[union-attr]
    if facts and isinstance(facts[0], Sorted) and facts[0].of == "ids" and ctx.calls[node].name == "clamp":  # type: ignore[union-attr]
        return clamped_ids(ctx, facts[0], *args[1:], **kwargs)
    table = next((f for f in facts if isinstance(f, Table)), None)
    rows = [f for f in facts if isinstance(f, Rows)]
    if rows:
        return row_local(ctx, node, args, kwargs)
    if table is not None:
        if args and args[0] is not None and facts[0] is table:
            return unary(ctx, node, table, *args[1:], **kwargs)
        return None
    return plain(ctx, node, facts)


def clamped_ids(ctx: Context, ids: Sorted, low: Any = None, high: Any = None, **bounds: Any) -> Sorted | None:
    """``sorted_ids.clamp(max=E - 1)``: only sentinels change, whose rows belong to no expert. lift checks that the bound is E."""
    low, high = bounds.get("min", low), bounds.get("max", high)
    if (isinstance(low, int) and low > 0) or not isinstance(high, int):
        return None
    ctx.sentinels.setdefault(ids.order.routing, set()).add(high + 1)
    return ids


def plain(ctx: Context, node: Node, facts: list[Any]) -> View | None:
    """A pointwise result of plain tensors is a new plain tensor whose dimensions factor as its inputs' do."""
    shape = out_shape(node)
    for f in facts:
        if isinstance(f, View) and len(f.axes) == len(shape) and all(same(extent(a), s) for a, s in zip(f.axes, shape, strict=True)):
            found = inherited(f, node)
            if found is not None:
                return found
    return None


def row_local(ctx: Context, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None = None) -> Finding:
    """A pointwise operation with at least one operand that has rows; ``name``: it is a part of what the node does."""
    call = ctx.calls[node]
    facts = [ctx.fact(a) for a in args]
    rows = [f for f in (*facts, *(ctx.fact(v) for v in kwargs.values())) if isinstance(f, Rows)]
    domain = domain_of(rows, [f for f in facts if isinstance(f, Table)])
    if call is None or domain is None:
        return _met(ctx, node, rows) or ctx.lost(
            "experts-differ", node, expert="?", detail="rows of different experts or layers meet in one operation"
        )
    axes = joined([r.axes for r in rows], len(out_shape(node)))
    like = next((r.expr for r in rows if not is_boolean(r.expr.node)), rows[0].expr)
    new: list[Any] = []
    for value in args:
        item = operand(ctx, node, axes, domain, value, like)
        if isinstance(item, Lost):
            return item
        new.append(item)
    options = []
    for key, value in kwargs.items():
        item = operand(ctx, node, axes, domain, value, like)
        if isinstance(item, Lost):
            return item
        options.append((key, item))
    return Rows(axes, domain, Op(node, name or call.name, tuple(new), tuple(options)))


def _met(ctx: Context, node: Node, rows: list[Rows]) -> Lost | None:
    """The refusal where the rows of one expert meet those of another in something that is no sum."""
    call, domains = ctx.calls[node], [r.domain for r in rows]
    apart = len({d.expert for d in domains if d.expert is not None}) > 1 and len({d.routing for d in domains if d.routing is not None}) == 1
    if call is None or call.name == "add" or not apart or not all(has_linear(r.expr) for r in rows):
        return None
    return ctx.lost("not-combined", node, by=call.name)


def operand(ctx: Context, node: Node, axes: Axes, domain: Domain, value: Any, like: Expr | None = None) -> Any:
    """An argument as an Expr or a constant; Lost if it is neither. ``like``: a value of the same rows."""
    if scalar(value) or isinstance(value, torch.dtype):
        return value
    fact = ctx.fact(value) if isinstance(value, Node) else None
    found = _filled(ctx, node, axes, domain, fact, value, like) if isinstance(fact, Fill) else None
    found = beside(ctx, node, axes, domain, value) if found is None and isinstance(value, Node) else found
    found = found if found is not None else symbol(node, value)
    if found is not None:
        return found
    lost = _put_together(ctx, node, domain, value) if isinstance(value, Node) else None
    if lost is not None:
        return lost
    if isinstance(fact, Table) and None not in (fact.expert, domain.expert) and fact.expert != domain.expert:
        detail = f"its routing weight meets the weights of expert {domain.expert}"
        return ctx.lost("experts-differ", node, expert=str(fact.expert), detail=detail)
    end = _logarithms(node) if isinstance(fact, Table) and fact.fill == -math.inf else None
    if end is not None:
        return ctx.lost("not-combined", node, by=ctx.calls[end].name, at=end)  # type: ignore[union-attr]
    name = placed(value, node) if isinstance(value, Node) else "an argument"
    if isinstance(fact, Fill) and math.isnan(fact.value):
        return ctx.lost("no-rule", node, how=f"an operation with {name}, which nothing has initialised")
    if isinstance(fact, Fill):
        return ctx.lost("no-rule", node, how=f"an operation with {name}, a constant that does not have their shape")
    return ctx.lost("tokens-differ", node, detail=f"{name} is not a value per row of the same experts")


def _logarithms(node: Node) -> Node | None:
    """Where exponentials of what a node computes are added up; None if nothing does so."""
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            call = call_of(user)
            if call is not None and call.name in ("logsumexp", "logaddexp", "logaddexp2"):
                return user
            if user not in seen and call is not None and call.name in _BESIDE:
                seen.add(user)
                stack.append(user)
    return None


def _filled(ctx: Context, node: Node, axes: Axes, domain: Domain, fill: Fill, value: Node, like: Expr | None) -> Expr | None:
    """A tensor of one constant beside rows: as it is where all rows read the same of it, else made again for the rows."""
    theirs = padded(fill.axes, len(axes))
    if any(real(a) and not real(mine) for mine, a in zip(axes, theirs, strict=True)):
        return None
    features = {any(b.kind == "f" for b in mine) for mine, a in zip(axes, theirs, strict=True) if real(a)}
    of_rows = any(isinstance(ctx.fact(n), Rows) for n in value.all_input_nodes)
    known = None if len(features) > 1 or of_rows else leaf(ctx, node, axes, domain, View(fresh(out_shape(value)), value))
    if known is not None:
        return known
    made, before = tensor(value), None if like is None else tensor(like.node)
    if like is None or math.isnan(fill.value) or made is None or before is None:
        return None
    if made.dtype != before.dtype and not made.dim():
        return None  # of no weight among dtypes, as one element is
    dtype = () if made.dtype == before.dtype else (("dtype", made.dtype),)
    return Op(value, "full_like", (like, fill.value), dtype)


def _put_together(ctx: Context, node: Node, domain: Domain, value: Node) -> Lost | None:
    """The refusal where rows of an expert meet what is read of a tensor that the rows of all of them go to; None for other values."""
    read, call = ctx.calls[value], ctx.calls[node]
    base = read.args[0] if read is not None and read.name in ("getitem", "index_select", "gather") and read.args else None
    written = isinstance(base, Node) and any(ctx.position[w] > ctx.position[node] for w in ctx.writes.get(ctx.storage[base], ()))
    if call is None or not written or not any(isinstance(f := ctx.fact(i), Rows) and has_linear(f.expr) for i in node.all_input_nodes):
        return None
    fact = ctx.fact(value)
    if isinstance(fact, Buffer) and domain.selection is not None and fact.selection.same(domain.selection) and call.name != "add":
        return ctx.lost("not-combined", node, by=call.name)
    return ctx.lost("not-combined", node, into=named(value))


def domain_of(rows: list[Rows], tables: list[Table] | None = None) -> Domain | None:
    """The one domain of all operands, with whatever any of them knows about routing and expert."""
    first = rows[0].domain
    for r in rows[1:]:
        if not first.same(r.domain):
            return None
        first = merged(first, r.domain)
    for t in tables or ():
        if first.routing is not None and first.routing is not t.routing:
            return None
        known = first.expert is not None
        first = replace(
            first, routing=t.routing, expert=first.expert if known else t.expert, slot=first.slot if first.slot is not None else t.slot
        )
    return first


def merged(a: Domain, b: Domain) -> Domain:
    """Two equal domains, each perhaps knowing more than the other."""
    return replace(
        a,
        routing=a.routing or b.routing,
        selection=a.selection or b.selection,
        order=a.order or b.order,
        expert=a.expert if a.expert is not None else b.expert,
        slot=a.slot if a.slot is not None else b.slot,
    )


@rule("mul", "div")
def on_mul(ctx: Context, node: Node, a: Any, other: Any, *, rounding_mode: str | None = None) -> Finding:
    if rounding_mode is not None:
        return on_div(ctx, node, a, other, rounding_mode)
    return multiplied(ctx, node, "mul" if ctx.calls[node].name == "mul" else "div", a, other)  # type: ignore[union-attr]


def multiplied(ctx: Context, node: Node, name: str, a: Any, b: Any) -> Finding:
    """A product or a quotient, which may be only a part of what the node does."""
    x, y = ctx.fact(a), ctx.fact(b)
    weighted = (slot_masks.product(x, y) or by_slot(node, x, y) or by_slot(node, y, x)) if name == "mul" else None
    if weighted is not None:
        return weighted
    if isinstance(x, Rows) or isinstance(y, Rows):
        return row_local(ctx, node, (a, b), {}, name)
    if isinstance(x, Listed) or isinstance(y, Listed):
        return product(node, name, x if isinstance(x, Listed) else a, y if isinstance(y, Listed) else b)
    for first, second, source in ((x, y, b), (y, x, a)):
        if name == "mul" and isinstance(first, Mask | Table):
            left = dropped(ctx, node, first, second) or restricted(ctx, node, first, second)
            if left is not None:
                return left
        if isinstance(first, Mask) and isinstance(second, View | Fill) and not first.negated and first.weight is None and name == "mul":
            weight = second if isinstance(second, View) else View(fresh(out_shape(source)), source)
            return masked_weight(ctx, node, first, weight)
        if isinstance(first, Table) and isinstance(second, View) and name == "mul" and not first.negated:
            rows = expert_output(ctx, node, source, first)
            if rows is not None:
                return rows
    for first, second, ahead in ((x, y, True), (y, x, False)):
        if isinstance(first, Table) and not first.negated:
            return table_with(ctx, node, name, first, second if second is not None else (b if ahead else a), ahead)
    return plain(ctx, node, [x, y])


def expert_output(ctx: Context, node: Node, value: Any, table: Table) -> Rows | Lost | None:
    """A plain [tokens, features] tensor times a routing table: the output (or input) of one expert, or of all of them."""
    view, rank = ctx.view(value), len(out_shape(node))
    if view is None or table.fill != 0.0:
        return None
    axes, theirs = padded(view.axes, rank), padded(table.axes, rank)
    if not rank or not real(axes[-1]) or real(theirs[-1]):
        return None
    if theirs[-1] and rank > 1:
        # The one token of a call may have gone to the dimension of size one in a reshape; that one is for the features.
        table = table.with_axes((*theirs[:-2], theirs[-2] + theirs[-1], ()))
    if table.expert is not None and not table.routing.shared:
        table = spread(ctx, table, axes[:-1], padded(table.axes, rank)[:-1])
    found = cone_rows(ctx, node, value, table)
    if found is None:
        return None
    expr = leaf(ctx, node, found.axes, found.domain, table)
    if expr is None and has_linear(found.expr):
        return ctx.lost("not-weighted", node)
    return None if expr is None else replace(found, expr=Op(node, "mul", (found.expr, expr)))


def spread(ctx: Context, table: Table, tokens: Axes, theirs: Axes) -> Table:
    """The table for more tokens than it has rows: one for a whole sequence, if its own dimensions are the first ones of the tokens."""
    own = [i for i, axis in enumerate(theirs) if real(axis)]
    more = [i for i, axis in enumerate(tokens) if real(axis) and i not in own]
    if not more or (max(own) > min(more) if own else not same(table.routing.num_tokens, 1)):
        return table
    return replace(table, routing=shared_routing(ctx, table.routing, tuple(extent(tokens[i]) for i in more)))


@rule("register_hook", shown=(EVERYTHING,))
def on_hook(ctx: Context, node: Node, x: Any) -> Finding:
    return ctx.lost("hook", node) if isinstance(ctx.fact(x), Rows) else None


@rule(*RANDOM)
def on_random(ctx: Context, node: Node, x: Any = None, *args: Any, **kwargs: Any) -> Finding:
    fact, call = ctx.fact(x), ctx.calls[node]
    if not isinstance(fact, Rows):
        return None
    probability = drop_probability(None if call is None else replace(call, args=(x, *args), kwargs=kwargs))
    if probability is None:
        return ctx.lost("random", node, op=call.name if call is not None else "?")
    return replace(fact, expr=Op(node, "dropout", (fact.expr, probability, True))) if probability else fact


def gated(expr: Expr) -> bool:
    """Whether the weight that selects the expert is in the expression."""
    return any(isinstance(e, Gate) for e in walk(expr))


__all__ = ["Fill", "domain_of", "expert_output", "gated", "row_local"]
