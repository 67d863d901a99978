"""Which way a program probably goes when its experts have tokens. A guess may be wrong: what makes it right is its discharge."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moefuse._dynamo import values

_VIEWS = frozenset(
    ("flatten", "squeeze", "view", "reshape", "ravel", "contiguous", "cpu", "long", "unique", "detach", "numpy", "to", "sort")
)
_COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt, "greater": operator.gt, "ge": operator.ge, "greater_equal": operator.ge, "lt": operator.lt, "less": operator.lt,
    "le": operator.le, "less_equal": operator.le, "eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne,
}  # fmt: skip
_COUNTS = frozenset(("sum", "count_nonzero", "bincount", "getitem", "select", "numel", "any", "max", "amax"))
_KEEPS_IDS = frozenset(("one_hot", "permute", "transpose", "movedim", "unsqueeze"))
_NOT = frozenset(("logical_not", "bitwise_not", "invert", "not_"))


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def mask_of(node: Node | None) -> Node | None:
    """The mask [n] (n known) whose true positions a tensor lists; None for any other tensor."""
    value = None if node is None else _value(node)
    if not isinstance(value, torch.Tensor) or not value.dim() or not values.unbacked(value.shape[0]):
        return None
    source = _listed(node)
    mask = _value(source) if source is not None else None
    return source if isinstance(mask, torch.Tensor) and mask.dim() == 1 and isinstance(mask.shape[0], int) else None


def _listed(node: Any) -> Node | None:
    """The argument of the ``nonzero`` that a chain of views starts from."""
    for _ in range(8):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            return None
        name, first = _name(node), node.args[0]
        alone = not node.kwargs.get("as_tuple", False) and len(node.args) == 1
        if name == "argwhere" or (name == "nonzero" and alone):
            return first if isinstance(first, Node) else None
        if name == "getitem" and isinstance(first, Node):
            if _name(first) in ("where", "nonzero", "nonzero_numpy") and isinstance(_value(first), tuple | list):
                return first.args[0] if node.args[1] == 0 and len(first.args) == 1 and isinstance(first.args[0], Node) else None
            if not _whole(node.args[1]):
                return None
        elif name not in _VIEWS:
            return None
        node = first
    return None


def _whole(index: Any) -> bool:
    """``[:]``, or ``[:, 0]``: every row."""
    items = index if isinstance(index, tuple) else (index,)
    return items[0] == slice(None) and all(i == 0 for i in items[1:])


def length(mask: Node) -> int:
    """How many rows a mask can have."""
    return int(_value(mask).shape[0])


def end(mask: Node) -> int:
    """The first row that a mask never has, if its length is no better bound: experts are chosen among fewer than it has positions for.

    ``one_hot(ids, E + 1)`` has one for ids that a shard of the experts does not have; where ids come from a top-k of E scores, no id is E.
    """
    node: Any = mask
    for _ in range(16):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            break
        name, first = _name(node), node.args[0]
        if name in ("topk", "argmax") and isinstance(first, Node):
            return min(length(mask), _choices(node, first))
        if name not in _KEEPS_IDS and name not in _VIEWS and name not in _COUNTS and name not in _COMPARES:
            break
        node = first
    return length(mask)


def _choices(node: Node, scores: Node) -> int:
    """How many things a top-k or an argmax chooses among; no bound where that is not plain."""
    place = 2 if _name(node) == "topk" else 1
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    size = _value(scores).shape[dim] if isinstance(dim, int) and isinstance(_value(scores), torch.Tensor) else None
    return size if isinstance(size, int) and size > 0 else 1 << 62


def about_size(number: Any) -> tuple[Any, bool] | None:
    """(the symbol, the outcome) of a condition that says whether one unbacked size is zero; None for any other condition."""
    import sympy  # here: importing moefuse must stay cheap

    expr = sympy.sympify(getattr(number.node, "expr", None))
    symbols = values.unbacked(number)
    if expr is None or len(symbols) != 1 or expr.free_symbols != symbols:
        return None
    (size,) = symbols
    some = _truth(expr.subs(size, sympy.Symbol("n", integer=True, positive=True)))
    none = _truth(expr.subs(size, 0))
    return None if some is None or none is None or some == none else (size, some)


def _truth(expr: Any) -> bool | None:
    import sympy

    found = sympy.simplify(expr)
    if found in (sympy.true, sympy.false):
        return bool(found)
    if not isinstance(found, sympy.Expr):
        return None
    return True if found.is_nonzero else False if found.is_zero else None


def about_value(node: Node, depth: int = 6) -> bool | None:
    """The outcome of ``if mask.any():``, ``if mask.sum() == 0:``, ``if counts[e] > 0:`` when there are some; None for other conditions."""
    if depth == 0 or node.op not in ("call_method", "call_function"):
        return None
    name = _name(node)
    first = next((a for a in node.args if isinstance(a, Node)), None)
    if first is None:
        return None
    if name == "any":
        return True
    if name in _NOT:
        inner = about_value(first, depth - 1)
        return None if inner is None else not inner
    if name in _COMPARES and len(node.args) == 2 and isinstance(node.args[1], int | float):
        bound = node.args[1]
        holds = {bool(_COMPARES[name](n, bound)) for n in (1, 2, 3, 1 << 40)}
        if len(holds) != 1 or bool(_COMPARES[name](0, bound)) in holds or about_value(first, depth - 1) is None:
            return None
        return holds.pop()
    if name in _VIEWS or name in ("bool", "item", "int"):
        return about_value(first, depth - 1)
    value = _value(node)
    return True if name in _COUNTS and isinstance(value, torch.Tensor) and not value.dtype.is_floating_point else None
