"""Numbers of tokens that a graph does not know to be one: those of inputs that come with a size of their own each.

Behind a graph break, and in a function that gets tokens, ids and routing weights from its caller, each of them is an input; once their
number has changed between two calls, Dynamo gives each a size of its own, and the rules read a graph that indexes some rows by the ids of
others. Sizes that are equal in this call are taken to be equal, as Dynamo's duck shaping does from the first call on, but only where a
region is found that way and not without: the graph gets a guard, and is compiled anew for a call in which they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch.fx import Graph

from moefuse._dynamo.values import hint
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import supposing
from moefuse.passes.infer.state import Context, Given
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.interpret import interpret
from moefuse.passes.match.lift import lift


def interpreted(graph: Graph, given: Given) -> Context:
    """As :func:`interpret`, with a guard on the graph for sizes of inputs that have to be equal."""
    ctx = interpret(graph, given)
    groups = _equal(graph)
    if not groups:
        return ctx
    supposed = {symbol: first for first, *others in groups for symbol in others}
    values = {node: node.meta.get("example_value") for node in graph.nodes}
    with supposing(supposed):
        better = _regions(interpret(graph, given)) > _regions(ctx)
    for node, value in values.items():  # what was found out about sizes while supposing is not known yet
        if "example_value" in node.meta:
            node.meta["example_value"] = value
    if not better:
        return ctx
    for first, *others in groups.values():
        for other in others:
            bool(first == other)  # a guard
    return interpret(graph, given)


def _regions(ctx: Context) -> int:
    return sum(isinstance(found, Region) for found in lift(ctx))


def _equal(graph: Graph) -> Mapping[tuple[sympy.Symbol, ...], list[torch.SymInt]]:
    """Sizes of inputs that are different symbols and equal numbers, by their symbols."""
    sizes: dict[sympy.Symbol, torch.SymInt] = {}
    for size in _sizes(graph):
        sizes.setdefault(size.node.expr, size)
    groups: dict[int, list[torch.SymInt]] = {}
    for symbol, size in sizes.items():
        number = hint(size) if isinstance(symbol, sympy.Symbol) else None
        if number is not None and number > 1:
            groups.setdefault(number, []).append(size)
    return {tuple(s.node.expr for s in group): group for group in groups.values() if len(group) > 1}


def _sizes(graph: Graph) -> Iterator[torch.SymInt]:
    for node in graph.find_nodes(op="placeholder"):
        value = tensor(node)
        sizes: tuple[Any, ...] = () if value is None else tuple(value.shape)
        yield from (size for size in sizes if isinstance(size, torch.SymInt))


__all__ = ["interpreted"]
