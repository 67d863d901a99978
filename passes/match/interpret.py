"""The abstract interpretation: visit nodes in program order, ask the rule of each operation, remember the fact."""

from __future__ import annotations

import inspect
from typing import Any

from torch.fx import Graph, Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.masked_totals import STATISTIC
from moefuse.passes.graph.named import named, placed
from moefuse.passes.graph.op_classes import METADATA
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.state import ComputedDimError, Context, Given, out_shape, shows_the_same
from moefuse.passes.infer.symbolic_sizes import refine
from moefuse.passes.infer.unpacking import is_unpacked
from moefuse.passes.ir.axes import fresh
from moefuse.passes.ir.expr import has_linear, walk
from moefuse.passes.ir.facts import Buffer, Combined, Filled, Lost, Many, PerSlot, Pieces, Rows, Sum, View
from moefuse.passes.match.arguments import taken
from moefuse.passes.match.encodings import foreign
from moefuse.passes.rules import Rule, rule_of
from moefuse.passes.rules.refused import capacity, expert_choice, unknown_routing


def interpret(graph: Graph, given: Given | None = None) -> Context:
    """Facts for every node of a Dynamo-level graph; ``given``: what capture says of it."""
    ctx = _interpret(graph, given, frozenset())
    ends = per_slot_results(ctx)
    return _interpret(graph, given, ends) if ends else ctx


def per_slot_results(ctx: Context) -> frozenset[Node]:
    """Where rows of experts are back in their slots, and no sum over slots ever reads them.

    They were sorted, or the chosen ones are taken of all; or gathered weights made them for tokens with one expert.
    """
    found = {}
    for node, fact in ctx.facts.items():
        if isinstance(fact, Rows) and fact.domain.name == "slots" and has_linear(fact.expr):
            before = [f for f in map(ctx.facts.get, node.all_input_nodes) if isinstance(f, Rows)]
            taken = any(f.domain.name in ("sorted", "dense") and f.expr is fact.expr for f in before)
            if taken or (_of_one(ctx, fact) and not any(_goes_on(ctx.facts.get(user)) for user in node.users)):
                found[node] = fact.expr
    sums = (f for f in ctx.facts.values() if isinstance(f, Combined | Sum)) if found else ()
    rows = (p.rows for f in sums for p in (f.parts if isinstance(f, Sum) else (f,)))
    summed = {id(e) for each in rows for e in walk(each.expr)}
    return frozenset(node for node, expr in found.items() if id(expr) not in summed)


def _of_one(ctx: Context, rows: Rows) -> bool:
    """Whether each token has one row, so that there is nothing to sum. (One of several slots is a part of a layer.)"""
    routing = rows.domain.routing
    if routing is None or not same(routing.top_k, 1):
        return False
    call = ctx.calls.get(routing.node)
    whole = tensor(call.args[0]) if call is not None and call.name in ("getitem", "select") and call.args else None
    return whole is None or not whole.dim() or same(whole.shape[-1], 1)


def _goes_on(fact: Any) -> bool:
    return isinstance(fact, Sum | Combined) or (isinstance(fact, Rows) and has_linear(fact.expr))


def _interpret(graph: Graph, given: Given | None, ends: frozenset[Node]) -> Context:
    ctx = Context(graph, given)
    for node in graph.nodes:
        call = ctx.calls[node]
        if call is None or node.meta.get(STATISTIC):
            continue
        refine(ctx.sizes, node)
        fact = _visit(ctx, node, call)
        lost = (family.follow(ctx, node, call, fact) for family in (capacity, expert_choice, unknown_routing))
        fact = next((found for found in lost if found is not None), fact)
        if node in ends and isinstance(fact, Rows):
            fact = PerSlot(fact)
        if type(fact) is View and _is_put_together(fact) and is_unpacked(ctx, node):
            fact = View(fresh(out_shape(node)), node)  # however its dimensions came about, it is a weight
        if fact is not None:
            ctx.facts[node] = fact
        plain = type(fact) is View and fact.root is node
        for target in call.targets:
            result = _is_result(ctx, node, target)
            _write(ctx, node, target, fact if result and not plain else None)
            if result and plain:  # under its own name, by which what follows reads it
                ctx.facts[target] = View(fact.axes, target)
    return ctx


def _is_put_together(view: View) -> bool:
    """Whether a dimension of a view is several of its root's, or a part of one, or it has fewer or more of them."""
    return len(view.axes) != len(out_shape(view.root)) or any(len(axis) != 1 or axis[0].kind != "d" for axis in view.axes)


def _visit(ctx: Context, node: Node, call: Call) -> Any:
    inputs = [ctx.facts.get(n) for n in node.all_input_nodes]
    rule = rule_of(call.name) if call.kwargs.get("out") is None else None
    fact = _apply(rule, ctx, node, call) if rule is not None else None
    if rule is not None and (fact is None or (isinstance(fact, Lost) and "ways" not in fact.details)):
        fact = _behind_sums(ctx, node, call) or fact
    stale = next((f for f in inputs if isinstance(f, Lost) and f.code == "alias"), None)
    if isinstance(fact, Lost) and stale is not None:
        return ctx.lost("alias", stale.node, **stale.details)
    if fact is not None:
        return fact
    if call.name in METADATA or not any(_carries(f) for f in inputs):
        return None
    filled = next((f for f in inputs if isinstance(f, Filled)), None)
    if filled is not None and not call.targets:
        experts = sorted(int(p.rows.domain.expert or 0) for p in filled.parts)
        present = f"{experts[0]}..{experts[-1]}" if len(experts) > 1 else str(experts[0])
        return ctx.lost("missing-experts", node, present=present, count=str(filled.routing.choices or "more"))
    before = next((f for f in inputs if isinstance(f, Lost)), None)
    if before is not None and rule is not None:
        return before
    return foreign(ctx, node) or _together(ctx, node, call, inputs) or ctx.lost("no-rule", node, op=call.name)


def _together(ctx: Context, node: Node, call: Call, inputs: list[Any]) -> Lost | None:
    """The refusal where the rows of several experts come together by something else than a sum, or at places that nobody knows."""
    rows = [f for f in inputs if isinstance(f, Rows) and has_linear(f.expr)]
    reads = any(isinstance(f, Buffer) for f in inputs)
    if rows and not call.targets and (reads or any(_reduces(call, f) for f in rows)):
        return ctx.lost("not-combined", node, by=call.name)
    if rows and call.name in _PUTS:
        where = next((n for n in node.all_input_nodes if (v := tensor(n)) is not None and not v.is_floating_point()), None)
        said = None if where is None else f"rows are added where {placed(where, node)} says, and no rule reads whose tokens those are"
        return None if said is None else ctx.lost("tokens-differ", node, detail=said)
    return None


def _reduces(call: Call, rows: Rows) -> bool:
    """Whether an operation goes along the experts."""
    dims, rank = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 else None), len(rows.axes)
    numbers = [d for d in (dims if isinstance(dims, tuple | list) else (dims,)) if isinstance(d, int) and -rank <= d < rank]
    return any(atom.kind == "e" for d in numbers for atom in rows.axes[d])


def _behind_sums(ctx: Context, node: Node, call: Call) -> Any:
    """What an operation is to a later layer: sums over experts that it does not go on with, and rows of them, are plain to it.

    That a sum is complete where it is read, and the same until the later layer is done, the safety check asks of both layers.
    """
    held = {n: fact for n in node.all_input_nodes if isinstance(fact := ctx.facts.get(n), Sum | Buffer)}
    rule = rule_of(call.name)
    if not held or rule is None:
        return None
    ctx.facts |= {n: _plain(ctx, n, fact) for n, fact in held.items()}
    found = _apply(rule, ctx, node, call)
    ctx.facts |= held
    return None if isinstance(found, Lost) else found


def _plain(ctx: Context, node: Node, fact: Sum | Buffer) -> Any:
    """What a sum, or rows of one, would be if the sum was any tensor; None for no fact."""
    call = ctx.calls[node]
    return _behind_sums(ctx, node, call) if isinstance(fact, Buffer) and fact.rows is None and call is not None else None


_PUTS = frozenset("index_add index_put setitem scatter_add scatter_reduce index_reduce".split())


def _carries(fact: Any) -> bool:
    """Whether a fact is expert computation, whose loss is worth reporting."""
    if isinstance(fact, Many):
        return any(_carries(f) for f in fact.items)
    return isinstance(fact, Buffer | Pieces | Filled) or (isinstance(fact, Rows) and fact.domain.routing is not None)


def _apply(rule: Rule, ctx: Context, node: Node, call: Call) -> Any:
    given = taken(rule, node, call, ctx.mode[node].grad)
    try:
        bound = inspect.signature(rule).bind(ctx, node, *given.args, **given.kwargs)
    except TypeError:  # a spelling of the arguments that the rule does not know
        return None
    try:
        fact = rule(*bound.args, **bound.kwargs)
    except ComputedDimError:
        return None
    if not given.unread:
        return fact
    argument = ", ".join(f"{name}={named(value).strip('`') if isinstance(value, Node) else value}" for name, value in given.unread)
    return ctx.lost("no-rule", node, op=call.name, argument=argument) if isinstance(fact, Lost) or _carries(fact) else None


def _write(ctx: Context, node: Node, target: Node, fact: Any) -> None:
    """An in-place operation: its target now holds the result, and every other alias of that storage is out of date."""
    for alias in (alias for name in ctx.memory.storages(target) for alias in ctx.aliases.get(name, ())):
        if ctx.position[alias] > ctx.position[node] or alias in (node, target):
            continue
        if _whole_view(ctx, alias, target):
            ctx.forget(alias)
            if fact is not None:
                ctx.facts[alias] = fact if isinstance(fact, Lost) else _like(ctx, fact, alias)
        elif isinstance(ctx.facts.get(alias), Rows | Lost):
            ctx.facts[alias] = ctx.lost("alias", node, name=named(alias))
        elif alias in ctx.facts:
            ctx.forget(alias)
    ctx.forget(target)
    if fact is not None:
        ctx.facts[target] = fact


def _is_result(ctx: Context, node: Node, target: Node) -> bool:
    """Whether what an operation writes to a tensor is its result, and not something beside it."""
    return tensor(node) is None or (ctx.storage[node] is ctx.storage[target] and _whole_view(ctx, node, target))


def _whole_view(ctx: Context, alias: Node, target: Node) -> bool:
    """Whether two aliases show the same elements in the same shape (``contiguous``, a cast to the same dtype)."""
    a, b = tensor(alias), tensor(target)
    return a is not None and b is not None and shows_the_same(a, b)


def _like(ctx: Context, fact: Any, alias: Node) -> Any:
    return View(fact.axes, alias) if isinstance(fact, View) else fact
