"""What capture asks of a graph that is half written: whether a size or a condition has to do with the choice of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Hit, Index, IndexMatrix, Mask, Routing, Rows
from moefuse.passes.match.interpret import interpret
from moefuse.passes.rules.routing.nonempty import hit_of

Chosen = tuple[Routing, int, int | None]
"""A routing, an expert, and the slot that it is about (None: any)."""


def counts_rows(graph: Graph, symbols: set[Any]) -> bool:
    """Whether one of these sizes is how many rows an expert has, in a graph that is half written."""
    ctx = interpret(graph)
    return any((found := of_size(ctx, n, fact)) is not None and found[0] in symbols for n, fact in ctx.facts.items())


def concerns_routing(assumption: Assumption) -> bool:
    """Whether the condition of an assumption is computed from expert ids."""
    if assumption.concerns_experts is None and assumption.graph is not None:
        graphs = dict.fromkeys(g for g in (assumption.graph, assumption.whole) if g is not None)
        assumption.concerns_experts = any(concerns(interpret(graph), assumption) for graph in graphs)
    return assumption.concerns_experts is not False


def concerns(ctx: Context, assumption: Assumption) -> bool:
    if assumption.kind == "size":
        symbols = set(assumption.subject) if isinstance(assumption.subject, tuple) else {assumption.subject}
        return any(symbols & unbacked_in(fake(n)) and _routed(ctx.facts.get(n)) for n in ctx.position)
    stack, seen = [assumption.subject], {assumption.subject}
    while stack:
        node = stack.pop()
        if _routed(ctx.facts.get(node)):
            return True
        new = [i for i in node.all_input_nodes if i not in seen]
        seen.update(new)
        stack.extend(new)
    return False


def _routed(fact: Any) -> bool:
    return isinstance(fact, Hit | Mask | Index | IndexMatrix) or getattr(fact, "routing", None) is not None


def of_size(ctx: Context, node: Node, fact: Any) -> tuple[Any, Chosen] | None:
    """(symbol, selection) of a tensor whose length counts the rows of a selection, or of a number that does."""
    value, fact = fake(node), hit_of(fact)
    if isinstance(value, torch.SymInt):
        counts = isinstance(fact, Hit) and not fact.negated and fact.expert is not None
        return (value.node.expr, (fact.routing, fact.expert, fact.slot)) if counts else None
    if not isinstance(value, torch.Tensor) or not value.dim() or ctx.storage[node] in ctx.writes:
        return None
    at = 1 if isinstance(fact, IndexMatrix) and fact.transposed else 0
    symbol = getattr(getattr(value.shape[at], "node", None), "expr", None)
    selection = fact.selection if isinstance(fact, Index | IndexMatrix) else fact.domain.selection if isinstance(fact, Rows) else None
    if symbol is None or selection is None:
        return None
    return symbol, (selection.routing, selection.expert, selection.slot)
