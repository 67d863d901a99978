"""Sizes of inputs that a graph does not know enough of: numbers of tokens that are one, and how many experts a token has.

Behind a graph break, and in a function that gets tokens, ids and routing weights from its caller, each of them is an input; once their
number has changed between two calls, Dynamo gives each a size of its own, and the rules read a graph that indexes some rows by the ids of
others. Sizes that are equal in this call are taken to be equal, as Dynamo's duck shaping does from the first call on. And once the last
size of ids has changed it is a symbol, too, where all of moefuse reads the number of slots of a token as a number: it is taken to be what
it is in this call. Both only where a region is found that way and not without: the graph gets a guard, and is compiled anew for a call in
which they differ, beside what was compiled before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph

from moefuse import _torch_private
from moefuse._dynamo.values import hint, marked_dims
from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.sizes import supposing
from moefuse.passes.infer.routings import unknown_slots
from moefuse.passes.infer.state import Context, Given
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.interpret import interpret
from moefuse.passes.match.lift import lift

_Supposed = Mapping[sympy.Symbol, sympy.Expr]
_Sizes = Mapping[sympy.Symbol, "_Size"]


class _Size(NamedTuple):
    """A symbol among the inputs: a size of some tensor, perhaps the last one, or one that the user wants to stay a symbol."""

    value: torch.SymInt
    of_tensor: bool = False
    last: bool = False
    marked: bool = False


def interpreted(graph: Graph, given: Given) -> Context:
    """As :func:`interpret`, with a guard on the graph for sizes of inputs that have to be equal, or a number."""
    ctx = interpret(graph, given)
    sizes = _sizes(graph)
    guesses = _guesses(sizes, unknown_slots(ctx))
    if not guesses:
        return ctx
    values = {node: node.meta.get("example_value") for node in graph.nodes}
    best, most = None, _regions(ctx)
    for supposed in guesses:
        with supposing(supposed):
            found = _regions(interpret(graph, given))
        best, most = (supposed, found) if found > most else (best, most)
    for node, value in values.items():  # what was found out about sizes while supposing is not known yet
        if "example_value" in node.meta:
            node.meta["example_value"] = value
    if best is None:
        return ctx
    for symbol, other in best.items():
        bool(sizes[symbol].value == (sizes[other].value if other in sizes else int(other)))  # a guard
    return interpret(graph, given)


def _regions(ctx: Context) -> int:
    return sum(isinstance(found, Region) for found in lift(ctx))


def _guesses(sizes: _Sizes, slots: set[Any]) -> list[_Supposed]:
    """What may be supposed, the least that has to be guarded first."""
    numbers = _numbers(sizes, slots)
    alike = _alike(sizes)
    rest = _alike({symbol: size for symbol, size in sizes.items() if symbol not in numbers})
    return [guess for guess in (alike, numbers, rest | numbers if rest and numbers else {}) if guess]


def _numbers(sizes: _Sizes, slots: set[Any]) -> dict[sympy.Symbol, sympy.Expr]:
    """How many experts a token has, of ids and of routing weights beside them: the symbols, and what they are now."""
    if _torch_private.frame_id() is None:  # nobody asks the guards of an exported program
        return {}
    now = {hint(sizes[symbol].value) for symbol in slots & sizes.keys()}
    found = {symbol: hint(size.value) for symbol, size in sizes.items() if (size.last or symbol in slots) and not size.marked}
    return {symbol: sympy.Integer(number) for symbol, number in found.items() if number is not None and number in now}


def _alike(sizes: _Sizes) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbols that are equal numbers now, each but the first of them with the first."""
    groups: dict[int, list[sympy.Symbol]] = {}
    for symbol, size in sizes.items():
        number = hint(size.value) if size.of_tensor else None
        if number is not None and number > 1:
            groups.setdefault(number, []).append(symbol)
    return {symbol: first for first, *others in groups.values() for symbol in others}


def _sizes(graph: Graph) -> _Sizes:
    """The sizes of inputs, and the numbers among the inputs, that are symbols."""
    found: dict[sympy.Symbol, _Size] = {}
    for node in graph.find_nodes(op="placeholder"):
        value, marked = fake(node), marked_dims(node)
        numbers: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for dim, number in enumerate(numbers):
            symbol = number.node.expr if isinstance(number, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol):
                known, of_tensor = found.setdefault(symbol, _Size(number)), isinstance(value, torch.Tensor)
                last = of_tensor and dim == len(numbers) - 1
                found[symbol] = _Size(known.value, known.of_tensor or of_tensor, known.last or last, known.marked or dim in marked)
    return found


__all__ = ["interpreted"]
