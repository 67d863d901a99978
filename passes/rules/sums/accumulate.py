"""Accumulators that collect one expert's rows after another, and rows that go back to their slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.named import counted, named
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axes, Axis, align
from moefuse.passes.ir.expr import Expr, Gate, Op, Token, walk
from moefuse.passes.ir.facts import Buffer, Combined, Domain, Fill, Finding, Index, Lost, Part, Range, Rows, Selection, Sorted, Sum, View
from moefuse.passes.rules.sums.slots_together import nothing_else


def accumulated(ctx: Context, node: Node, target: Node, rows: Rows, *, once: bool = False, replaced: bool = False) -> Finding:
    """An accumulator with one more part, which is added to what stands there, or replaces it."""
    current = ctx.fact(target)
    part = Part(rows, node)
    axes = plain_axes(target)
    if isinstance(current, Sum) and _is_copy_of_another(ctx, target, current, rows):
        return Sum(axes, target, (part,), once, replaced)
    if isinstance(current, Sum):
        if current.base is not None and current.replaced != replaced:
            own = current.parts[0].rows.domain.routing is rows.domain.routing
            return ctx.lost("not-combined", node, ways=True) if own else None
        return replace(current, parts=(*current.parts, part), once=current.once or once)
    if isinstance(current, Fill) and current.value == 0.0:
        return Sum(axes, None, (part,), once)
    # A clone is a tensor of its own.
    own = isinstance(current, View) and (current.root is target or ctx.same_tensor(target, current.root) or ctx.storage[target] is target)
    return Sum(axes, target, (part,), once, replaced) if own or isinstance(current, Combined | Fill) else None


def _is_copy_of_another(ctx: Context, target: Node, current: Sum, rows: Rows) -> bool:
    """Whether a tensor was made of the sum over another routing, with which this one begins."""
    others = all(p.rows.domain.routing is not rows.domain.routing for p in current.parts)
    return others and all(ctx.storage[target] is target and (p.node is target or ctx.storage[p.node] is not target) for p in current.parts)


def add_rows(ctx: Context, node: Node, target: Node, where: Any, rows: Rows) -> Finding:
    """Rows added to the tokens they came from."""
    if isinstance(where, Index) and where.of == "token" and rows.domain.selection is not None:
        return accumulated(ctx, node, target, rows) if where.selection.same(rows.domain.selection) else None
    if isinstance(where, Range):
        base: Any = _base(ctx, target) if _own_token(where, rows) and same(out_shape(target)[0], where.size) else False
        tokens = tuple(a for a in rows.axes[0] if a.kind == "t")
        return None if base is False else Combined((tokens, *rows.axes[1:]), rows, base)
    if isinstance(where, Sorted) and where.of == "slot" and where.order.routing.top_k > 1:
        zeros = ctx.fact(target)
        return unsort(rows, where) if isinstance(zeros, Fill) and zeros.value == 0.0 else None
    each_token = isinstance(where, Sorted) and (where.of == "token" or (where.of == "slot" and where.order.routing.top_k == 1))
    if isinstance(where, Sorted) and each_token and rows.domain.order is where.order:
        base = _base(ctx, target)
        if base is False:
            return None
        tokens = tuple(Atom("t", i, s) for i, s in enumerate(where.order.routing.tokens))
        return Combined((tokens, *rows.axes[1:]), rows, base)
    return None


def _own_token(where: Range, rows: Rows) -> bool:
    """Whether row numbers are those of each slot's token (``arange(T).repeat_interleave(K)``), or of each expert's (``.repeat(E)``)."""
    routing, over = rows.domain.routing, {"slots": "k", "dense": "e"}.get(rows.domain.name)
    runs = align(rows.axes[0], where.axes[0])
    if routing is None or over is None or runs is None or not same(where.size, routing.num_tokens):
        return False
    kinds = [({a.kind for a in mine}, {a.kind for a in theirs}) for mine, theirs in runs]
    return all(pair in (({"t"}, {"d"}), ({over}, {"b"})) for pair in kinds)


def _base(ctx: Context, target: Node) -> Any:
    current = ctx.fact(target)
    if isinstance(current, Fill):
        return None if current.value == 0.0 else False
    return target if isinstance(current, View) and current.root is target else False


def plain_axes(node: Node) -> Axes:
    return tuple((Atom("d", i, s),) for i, s in enumerate(out_shape(node)))


def selects(rows: Rows) -> bool:
    """Whether the routing table is already in the expression, so that adding means combining experts."""
    return rows.domain.name == "masked" and any(isinstance(e, Gate) for e in walk(rows.expr))


def put(ctx: Context, node: Node, target: Node, chosen: Selection, rows: Any) -> Finding:
    """An accumulator whose rows at a selection are replaced: by themselves and an expert's rows, or by an expert's rows."""
    if isinstance(rows, Buffer) and rows.target is target and rows.rows is not None and rows.selection.same(chosen):
        if chosen.routing.top_k > 1 and ctx.written_between(target, rows.read, node) is not None:
            return ctx.lost("not-combined", node, choices=counted(chosen.routing.top_k))  # what the others added since is lost
        return accumulated(ctx, node, target, rows.rows, once=not chosen.by_token)
    if isinstance(rows, Rows) and rows.domain.selection is not None and rows.domain.selection.same(chosen):
        if any(_reads(ctx, e, target) for e in walk(rows.expr)):
            more = _added(ctx, node, target, rows.expr)
            if not isinstance(more, Expr):
                return _read_back(ctx, node, target)
            added = accumulated(ctx, node, target, replace(rows, expr=more), once=not chosen.by_token)
            return added or _read_back(ctx, node, target)
        before = ctx.fact(target)
        if chosen.slot is not None and _begins_again(ctx, before, chosen):
            return Sum(plain_axes(target), target, (Part(rows, node),), once=True, replaced=True)
        # Where a token has several experts, nothing may be lost: the one that writes is the first, and stands for no others.
        first = isinstance(before, Fill) and before.value == 0.0 and len(ctx.members(chosen.expert)) == 1
        if chosen.routing.top_k != 1 and not first and not _apart(ctx, before, chosen):
            return ctx.lost("not-combined", node, choices=counted(chosen.routing.top_k))
        return _alone(ctx, accumulated(ctx, node, target, rows, replaced=True))
    return None


def _begins_again(ctx: Context, before: Any, chosen: Selection) -> bool:
    """Whether nothing that stands in a tensor stays, once one slot's rows are in it: no zeros, or all of another slot's rows."""
    if isinstance(before, Fill):
        return before.value != 0.0
    domains = [p.rows.domain for p in before.parts] if isinstance(before, Sum) and nothing_else(ctx, before) else []
    return bool(domains) and all(d.routing is chosen.routing and d.slot not in (None, chosen.slot) for d in domains)


def _alone(ctx: Context, found: Finding) -> Finding:
    """A sum whose rows have replaced all that it began with is the sum of these rows."""
    if isinstance(found, Sum) and found.parts[0].rows.domain.slot is not None and nothing_else(ctx, found):
        return replace(found, base=None, replaced=False)
    return found


def _apart(ctx: Context, before: Any, chosen: Selection) -> bool:
    """Whether the rows stand where no others do: in one slot a token has one expert."""
    if (
        chosen.slot is None
        or not isinstance(before, Sum)
        or (before.base is not None and not before.replaced)
        or len(ctx.members(chosen.expert)) != 1
    ):
        return False
    others = [p.rows.domain for p in before.parts]
    return all(d.routing is chosen.routing and d.slot == chosen.slot and d.expert not in (None, chosen.expert) for d in others)


def _reads(ctx: Context, expr: Any, target: Node) -> bool:
    """Whether a row is read of the tensor that it is put into."""
    return isinstance(expr, Token) and any(ctx.storage[n] is ctx.storage[target] for n in expr.node.all_input_nodes)


def _added(ctx: Context, node: Node, target: Node, expr: Any) -> Any:
    """``y`` of ``out[m] = out[m] + y``, where ``out`` still is what was read; None where the rows are anything else."""
    if not isinstance(expr, Op) or expr.name != "add" or len(expr.args) != 2 or expr.kwargs:
        return None
    for old, more in (expr.args, expr.args[::-1]):
        if isinstance(more, Expr) and any(_reads(ctx, e, target) for e in walk(more)):
            continue
        if not _reads(ctx, old, target):
            inner = _added(ctx, node, target, old)
            return None if inner is None else replace(expr, args=(inner, more))
        same_place = any(ctx.first[n] is ctx.first[target] for n in old.node.all_input_nodes)
        return more if same_place and ctx.written_between(target, old.node, node) is None else None
    return None


def _read_back(ctx: Context, node: Node, target: Node) -> Lost:
    """The refusal of rows that are computed from what stands where they are put: they replace nothing, and are not added either."""
    root = ctx.storage[target]
    if ctx.memory.outlives(root):
        return ctx.lost("mutation", node, name=named(root))
    made = ctx.calls[root]
    sums = (ctx.facts.get(i) for i in root.all_input_nodes)
    if made is not None and any(isinstance(fact, Sum | Combined) for fact in sums):
        return ctx.lost("sum-changed", root, op=made.name)
    return ctx.lost("not-combined", node, into=named(target))


def unsort(rows: Rows, index: Sorted) -> Rows | None:
    """``out[perm] = rows``: back to one row per (token, slot)."""
    routing = index.order.routing
    if rows.domain.name != "sorted" or rows.domain.order is not index.order or index.of != "slot":
        return None
    slots: Axis = (*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k))
    return Rows((slots, *rows.axes[1:]), Domain("slots", routing), rows.expr)
