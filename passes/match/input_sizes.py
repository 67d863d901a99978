"""Sizes of inputs that a graph does not know enough of: numbers of tokens that are one, and how many experts a token has.

Behind a graph break, and in a function that gets tokens, ids and routing weights from its caller, each of them is an input; once their
number has changed between two calls, Dynamo gives each a size of its own, and the rules read a graph that indexes some rows by the ids of
others. Sizes that were compared, and are equal in this call, are taken to be equal (``t`` and ``7*s``, too), as Dynamo's duck shaping does
from the first call on: the fewest that do. And once the last
size of ids has changed it is a symbol, too, where all of moefuse reads the number of slots of a token as a number: it is taken to be what
it is in this call. Both only where a region is found that way and not without: the graph gets a guard, and is compiled anew for a call in
which they differ, beside what was compiled before.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import sympy
import torch
from torch.fx import Graph

from moefuse import _torch_private
from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.sizes import supposing, undecided
from moefuse.passes.graph.symbols import hint, marked_dims
from moefuse.passes.infer.routings import unknown_slots
from moefuse.passes.infer.state import Context, Given
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.interpret import interpret
from moefuse.passes.match.lift import lift

_ROUNDS = 4
"""One relation can be what another question is asked for."""

_Supposed = Mapping[sympy.Symbol, sympy.Expr]
_Sizes = Mapping[sympy.Symbol, "_Size"]


class _Size(NamedTuple):
    """A symbol among the inputs: a size of some tensor, perhaps the last one, or one that the user wants to stay a symbol."""

    value: torch.SymInt
    last: bool = False
    marked: bool = False


def interpreted(graph: Graph, given: Given) -> Context:
    """As :func:`interpret`, with a guard on the graph for sizes of inputs that have to be equal, or a number."""
    sizes = _sizes(graph)
    if not sizes:
        return interpret(graph, given)
    values = {node: node.meta.get("example_value") for node in graph.nodes}
    with undecided() as questions:
        ctx = interpret(graph, given)
        if len(sizes) < 2 and not _numbers(sizes, unknown_slots(ctx)):
            return ctx  # nothing to compare
        most = _regions(ctx)  # which leaves notes in the context: it is not the one that is given back
    numbers = _numbers(sizes, unknown_slots(ctx))
    best: _Supposed = {}
    if numbers or _relations(sizes, questions):
        best = _best(graph, given, sizes, most, [{}, numbers] if numbers else [{}])
    for node, value in values.items():  # what was found out about sizes and values on trial is not known yet
        if "example_value" in node.meta:
            node.meta["example_value"] = value
    for symbol, other in best.items():
        bool(sizes[symbol].value == _valued(other, sizes))  # a guard
    return interpret(graph, given)


def _best(graph: Graph, given: Given, sizes: _Sizes, most: int, starts: list[_Supposed]) -> _Supposed:
    """The least that may be supposed for the most regions; nothing where no region is found that way."""

    def regions(supposed: _Supposed) -> tuple[int, set[sympy.Expr]]:
        with supposing(supposed), undecided() as questions:
            return _regions(interpret(graph, given)), questions

    best: _Supposed = {}
    for start in starts:
        supposed = start
        for _round in range(_ROUNDS):
            found, questions = regions(supposed)
            if found > most:
                best, most = supposed, found
            more = _relations(sizes, questions)
            if not more:
                break
            supposed = {symbol: size.xreplace(more) for symbol, size in supposed.items()} | more
    for symbol in list(best) if len(best) > 1 else ():
        fewer = {other: size for other, size in best.items() if other != symbol}
        best = fewer if regions(fewer)[0] >= most else best
    return best


def _regions(ctx: Context) -> int:
    return sum(isinstance(found, Region) for found in lift(ctx))


def _numbers(sizes: _Sizes, slots: set[Any]) -> dict[sympy.Symbol, sympy.Expr]:
    """How many experts a token has, of ids and of routing weights beside them: the symbols, and what they are now."""
    if _torch_private.frame_id() is None:
        return {}
    now = {hint(sizes[symbol].value) for symbol in slots & sizes.keys()}
    found = {symbol: hint(size.value) for symbol, size in sizes.items() if (size.last or symbol in slots) and not size.marked}
    return {symbol: sympy.Integer(number) for symbol, number in found.items() if number is not None and number in now}


def _relations(sizes: _Sizes, questions: set[sympy.Expr]) -> dict[sympy.Symbol, sympy.Expr]:
    """Of the differences that were asked for, those that are zero in this call, each solved for one symbol of the inputs."""
    if _torch_private.frame_id() is None:  # nobody asks the guards of an exported program
        return {}
    now = {symbol: number for symbol, size in sizes.items() if (number := hint(size.value)) is not None and number > 1}
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for question in sorted(questions, key=str):
        difference = sympy.expand(question.xreplace(found))
        symbols = difference.free_symbols
        if len(symbols) < 2 or not symbols <= now.keys() or difference.subs(now) != 0:
            continue
        solved = next((s for v in sorted(symbols, key=lambda v: (-now[v], v.name)) if (s := _solved(difference, v)) is not None), None)
        if solved is not None:
            symbol, size = solved
            found = {other: known.xreplace({symbol: size}) for other, known in found.items()} | {symbol: size}
    return found


def _solved(difference: sympy.Expr, symbol: sympy.Symbol) -> tuple[sympy.Symbol, sympy.Expr] | None:
    """``symbol`` as a polynomial of the others with whole numbers: a size whatever they are."""
    factor, rest = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
    if not factor.is_Integer or sympy.expand(difference - factor * symbol - rest) != 0:
        return None
    size = sympy.expand(-rest / factor)
    whole = size.is_polynomial() and all(number.is_Integer for number in sympy.Poly(size).coeffs())
    return (symbol, size) if whole else None


def _valued(size: sympy.Expr, sizes: _Sizes) -> Any:
    """A polynomial of sizes as a number of torch's, of which guards are made."""
    if size.is_Integer:
        return int(size)
    poly = sympy.Poly(size)
    values = [sizes[symbol].value for symbol in poly.gens]
    return sum(int(number) * prod(v**power for v, power in zip(values, powers, strict=True) if power) for powers, number in poly.terms())


def _sizes(graph: Graph) -> _Sizes:
    """The sizes of inputs, and the numbers among the inputs, that are symbols."""
    found: dict[sympy.Symbol, _Size] = {}
    for node in graph.find_nodes(op="placeholder"):
        value, marked = fake(node), marked_dims(node)
        numbers: list[Any] = list(value.shape) if isinstance(value, torch.Tensor) else [value]
        for dim, number in enumerate(numbers):
            symbol = number.node.expr if isinstance(number, torch.SymInt) else None
            if isinstance(symbol, sympy.Symbol):
                known = found.setdefault(symbol, _Size(number))
                last = isinstance(value, torch.Tensor) and dim == len(numbers) - 1
                found[symbol] = _Size(known.value, known.last or last, known.marked or dim in marked)
    return found


__all__ = ["interpreted"]
