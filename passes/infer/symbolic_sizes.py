"""Sizes that Dynamo does not know and the facts do: the pieces of sorted slots have all slots together.

Behind ``torch.cat(pieces)`` every shape would hold the sum of unknown lengths; with one of them put as the difference it is a plain shape
again, for the rest of this pass and for the regions that follow.
"""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.fx import Node

from moefuse.passes.graph.sizes import Size, size_of

Known = dict[Any, Size]


def settle(known: Known, lengths: list[Size], total: Size) -> None:
    """Remember that ``lengths`` add up to ``total``. Does nothing if they already do, or if no length is a symbol of its own."""
    rest = sum(lengths[1:], start=lengths[0]) if lengths else 0
    rest = _resolved(known, rest)
    last = next((n for n in reversed(lengths) if isinstance(n, sympy.Symbol) and n in getattr(rest, "free_symbols", ())), None)
    if last is not None:
        known[last] = sympy.expand(total - (rest - last))


def refine(known: Known, node: Node) -> None:
    """Give a node's fake value the sizes that are known by now."""
    value = node.meta.get("example_value")
    if not known or value is None:
        return
    new = tuple(_refined(known, v) for v in value) if type(value) in (tuple, list) else _refined(known, value)
    if new is not value:
        node.meta["example_value"] = new


def _refined(known: Known, value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return _number(known, value)
    if not isinstance(value, torch.Tensor) or not hasattr(value, "fake_mode"):
        return value
    sizes, strides = ([_number(known, n) for n in numbers] for numbers in (value.shape, value.stride()))
    if all(a is b for a, b in zip((*sizes, *strides), (*value.shape, *value.stride()), strict=True)):
        return value
    with value.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad)


def _number(known: Known, number: Any) -> Any:
    if not isinstance(number, torch.SymInt):
        return number
    before = size_of(number)
    after = _resolved(known, before)
    if after == before or isinstance(after, int):
        return number if after == before else after
    return number.node.shape_env.create_symintnode(sympy.sympify(after), hint=None)


def _resolved(known: Known, size: Size) -> Size:
    if isinstance(size, int) or not size.free_symbols & known.keys():
        return size
    while size.free_symbols & known.keys():
        size = size.subs({symbol: known[symbol] for symbol in size.free_symbols & known.keys()})
    return size_of(sympy.simplify(sympy.expand(size)) if not size.is_Integer else size)
