"""Which way a program probably goes when its experts have tokens. A guess may be wrong: what makes it right is its discharge."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph import symbols

_VIEWS = frozenset(
    ("flatten", "squeeze", "view", "reshape", "ravel", "contiguous", "cpu", "long", "int", "unique", "detach", "numpy", "to", "sort")
)
_SOME = frozenset(("getitem", "index_select", "t", "transpose", "permute", "unsqueeze", "clone"))
"""They give elements of their first argument, in another order or only some of them."""
_COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt, "greater": operator.gt, "ge": operator.ge, "greater_equal": operator.ge, "lt": operator.lt, "less": operator.lt,
    "le": operator.le, "less_equal": operator.le, "eq": operator.eq, "ne": operator.ne, "not_equal": operator.ne,
}  # fmt: skip
_COUNTS = frozenset(("sum", "count_nonzero", "bincount", "histc", "getitem", "select", "numel", "any", "max", "amax"))
_KEEPS_IDS = frozenset(("one_hot", "permute", "transpose", "movedim", "unsqueeze"))
_UNIQUE = frozenset(("unique", "unique_consecutive"))
_SAME = frozenset(("cpu", "long", "int", "detach", "to", "contiguous", "flatten", "numpy", "view_as"))
_NOT = frozenset(("logical_not", "bitwise_not", "invert", "not_"))


def _name(node: Node) -> str:
    name = node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", node.target))
    name = name.removeprefix("wrapped_")  # of NumPy's
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


def _value(node: Node) -> Any:
    return node.meta.get("example_value")


def mask_of(node: Node | None) -> Node | None:
    """The mask [n] (n known) whose true positions a tensor lists, or the distinct expert ids; None for any other tensor."""
    value = None if node is None else _value(node)
    if not isinstance(value, torch.Tensor) or not value.dim() or not symbols.unbacked(value.shape[0]):
        return None
    source = _listed(node)
    if source is not None and _name(source) in _UNIQUE:
        return source
    mask = _value(source) if source is not None else None
    return source if isinstance(mask, torch.Tensor) and mask.dim() == 1 and isinstance(mask.shape[0], int) else None


def _listed(node: Any) -> Node | None:
    """The argument of the ``nonzero`` that a chain of views starts from."""
    for _ in range(8):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            return None
        name, first = _name(node), node.args[0]
        if name in _UNIQUE and choices(first) is not None:
            return _unique(node)
        alone = not node.kwargs.get("as_tuple", False) and len(node.args) == 1
        if name == "argwhere" or (name == "nonzero" and alone):
            return first if isinstance(first, Node) else None
        if name == "getitem" and isinstance(first, Node):
            if _name(first) in ("where", "nonzero", "nonzero_numpy") and isinstance(_value(first), tuple | list):
                return first.args[0] if node.args[1] == 0 and len(first.args) == 1 and isinstance(first.args[0], Node) else None
            if _unique(node) is not None:
                return first
            if not _whole(node.args[1]):
                return None
        elif name not in _VIEWS:
            return None
        node = first
    return None


def _unique(node: Node) -> Node | None:
    """The ``unique`` that gives a tensor of distinct ids, perhaps beside how often each of them is there; None for any other tensor."""
    several = _name(node) == "getitem" and node.args[1] == 0 and isinstance(node.args[0], Node)
    made = node.args[0] if several else node
    if not isinstance(made, Node) or _name(made) not in _UNIQUE or several is isinstance(_value(made), torch.Tensor):
        return None
    return made if _plainly(made) else None


def _plainly(made: Node) -> bool:
    """Whether a ``unique`` gives each id once, and how many there may be is known."""
    if set(made.kwargs) - {"sorted", "return_counts"} or len(made.args) != 1 or choices(made.args[0]) is None:
        return False
    ids: Any = made.args[0]
    return _name(made) != "unique_consecutive" or (_name(ids) == "getitem" and bool(ids.args[1] == 0) and _name(ids.args[0]) == "sort")


def occurring(node: Node | None) -> tuple[Node, str] | None:
    """(``unique(ids, return_counts=True)``, "ids") of its distinct ids, "counts" of how often each is there, "ends" of their sum so far."""
    summed = False
    for _ in range(8):
        value = None if node is None else _value(node)
        if node is None or not isinstance(value, torch.Tensor) or value.dtype not in (torch.int64, torch.int32) or not node.args:
            return None
        name, first = _name(node), node.args[0]
        if name == "getitem" and isinstance(first, Node) and node.args[1] in (0, 1):
            counted = isinstance(_value(first), tuple | list) and len(_value(first)) == 2 and first.kwargs.get("return_counts") is True
            counted = counted and first.kwargs.get("sorted", True) is True  # else they come in an order that nobody promises
            what = ("ids", "counts")[node.args[1]] if not summed else ("", "ends")[node.args[1]]  # type: ignore[index]
            return (first, what) if what and counted and _name(first) in _UNIQUE and _plainly(first) else None
        if name not in _SAME and (summed or name != "cumsum"):
            return None
        summed, node = summed or name == "cumsum", first if isinstance(first, Node) else None
    return None


def _whole(index: Any) -> bool:
    """``[:]``, or ``[:, 0]``: every row."""
    items = index if isinstance(index, tuple) else (index,)
    return items[0] == slice(None) and all(i == 0 for i in items[1:])


def length(source: Node) -> int:
    """How many rows a mask, or a list of distinct ids, can have."""
    count = choices(source.args[0]) if _name(source) in _UNIQUE else None
    return int(_value(source).shape[0]) if count is None else count


def bins(node: Node | None) -> tuple[int, bool] | None:
    """How long ``bincount(ids)``, or a running sum of it, may be, and whether it always is; None for any other tensor.

    It has E elements where ``minlength`` says so and the ids are below it; ``zeros(E).scatter_add(0, ids, ones)`` then (bins.py). Without,
    it ends behind the highest id that occurs.
    """
    for _ in range(8):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            return None
        name, first = _name(node), node.args[0]
        if name == "bincount":
            least, count = node.kwargs.get("minlength", node.args[2] if len(node.args) > 2 else 0), choices(first)
            return (max(least, count), count <= least) if isinstance(least, int) and count is not None else None
        if name == "scatter_add" and len(node.args) == 4 and choices(node.args[2]) is not None:
            value = _value(node)
            integers = isinstance(value, torch.Tensor) and value.dim() == 1 and value.dtype == torch.int64
            return (value.shape[0], True) if integers and isinstance(value.shape[0], int) else None
        if name not in _VIEWS and name not in ("cumsum", "view_as"):
            return None
        node = first  # type: ignore[assignment]
    return None


def from_table(node: Node | None) -> bool:
    """Whether a tensor is ``bincount(table[numbers], minlength=E)``: experts out of a table that the model holds, as in hash layers."""
    counted = False
    for _ in range(16):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            return False
        name, first = _name(node), node.args[0]
        if name == "bincount":
            counted = bool(node.kwargs.get("minlength", node.args[2] if len(node.args) > 2 else 0))
        held = isinstance(first, Node) and first.op in ("placeholder", "get_attr") and "_buffers_" in first.name
        if counted and held and name in ("getitem", "index_select"):
            value, numbers = _value(first), node.args[-1]  # type: ignore[arg-type]
            return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and isinstance(numbers, Node)
        if name not in _VIEWS and name != "bincount":
            return False
        node = first  # type: ignore[assignment]
    return False


def choices(ids: Any) -> int | None:
    """How many experts the router chose from, where ids are views of the places of the best scores; None if that is not known.

    Where they are the first of the places of a map [E, T], there are as many as rows of it.
    """
    for _ in range(8):
        if not isinstance(ids, Node) or ids.op not in ("call_method", "call_function") or not ids.args:
            return None
        name, first = _name(ids), ids.args[0]
        if name == "argmax":
            return _chosen_among(ids)
        rows = _rows(first, ids.args[1]) if name == "getitem" and isinstance(first, Node) else None
        if rows is not None:
            return rows
        pair = first if name == "getitem" and isinstance(first, Node) and _name(first) in ("topk", "sort", "max") else None
        if pair is not None and ids.args[1] == 1:
            return _chosen_among(pair)
        if pair is not None and _name(pair) != "sort":
            return None
        if name not in _VIEWS and name not in _SOME:
            return None
        ids = first if pair is None else pair.args[0]
    return None


def _rows(places: Node, index: Any) -> int | None:
    """How many rows a map has, if an index takes those numbers out of its places (``where(map)[0]``, ``map.nonzero()[:, 0]``)."""
    listed = _name(places) in ("where", "nonzero", "nonzero_numpy", "argwhere") and bool(places.args)
    chosen = _value(places.args[0]) if listed and isinstance(places.args[0], Node) else None
    first = index == 0 if isinstance(_value(places), tuple | list) else index in ((slice(None), 0), (Ellipsis, 0))
    if not first or not isinstance(chosen, torch.Tensor) or chosen.dim() < 2 or (_name(places) == "where" and len(places.args) > 1):
        return None
    return chosen.shape[0] if isinstance(chosen.shape[0], int) else None


def end(mask: Node) -> int:
    """The first row that a mask never has, if its length is no better bound: experts are chosen among fewer than it has positions for.

    ``one_hot(ids, E + 1)`` has one for ids that a shard of the experts does not have; where ids come from a top-k of E scores, no id is E.
    """
    node: Any = mask
    for _ in range(16):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            break
        name, first = _name(node), node.args[0]
        if name in ("topk", "argmax"):
            count = _chosen_among(node)
            return length(mask) if count is None else min(length(mask), count)
        if name not in _KEEPS_IDS and name not in _VIEWS and name not in _COUNTS and name not in _COMPARES:
            break
        node = first
    return length(mask)


def _chosen_among(node: Node) -> int | None:
    """How many things a top-k, a sort, a maximum or an argmax chooses among; None where that is not plain."""
    scores = _value(node.args[0]) if isinstance(node.args[0], Node) else None
    place = 2 if _name(node) == "topk" else 1
    if _name(node) == "argmax" and len(node.args) < 2 and node.kwargs.get("dim") is None:
        return None  # the place among all elements
    dim = node.kwargs.get("dim", node.args[place] if len(node.args) > place else -1)
    size = scores.shape[dim] if isinstance(dim, int) and isinstance(scores, torch.Tensor) and scores.dim() else None
    return size if isinstance(size, int) and size > 0 else None


def about_size(number: Any) -> tuple[Any, bool] | None:
    """(the symbol, the outcome) of a condition that says whether one unbacked size is zero; None for any other condition.

    Of ``end == start``, where both are such sizes, the pair of them.
    """
    import sympy  # here: importing moefuse must stay cheap

    expr = symbols.expression(number)
    found = symbols.unbacked(number)
    if expr is None or not found or expr.free_symbols != found:
        return None
    if isinstance(expr, sympy.core.relational.Relational):
        expr = expr.func(sympy.expand(expr.lhs - expr.rhs), 0)
        found = expr.free_symbols
    size, less = _between(expr, found)
    if size is None:
        return None
    some = _truth(expr.subs(size, less + sympy.Symbol("n", integer=True, positive=True)))
    none = _truth(expr.subs(size, less))
    return None if some is None or none is None or some == none else (size if less == 0 else (size, less), some)


def _between(expr: Any, unknown: set[Any]) -> tuple[Any, Any]:
    """(size, 0) of an expression of one size; (end, start) of one of a difference; else (None, 0)."""
    if len(unknown) == 1:
        return next(iter(unknown)), 0
    signs = (expr.lhs if hasattr(expr, "lhs") else expr).as_coefficients_dict() if len(unknown) == 2 else {}
    found = {sign: symbol for symbol, sign in signs.items()}
    if set(found) != {1, -1} or set(found.values()) != unknown:
        return None, 0
    # A program may write ``start >= end``: both orders are differences, and the facts say which one is the end.
    return (found[1], found[-1]) if _rises(found) else (found[-1], found[1])


def _rises(found: dict[Any, Any]) -> bool:
    """Whether the symbol with the plus sign was made after the other, as ends are after starts."""
    return str(found[1])[1:].zfill(9) > str(found[-1])[1:].zfill(9)


def _truth(expr: Any) -> bool | None:
    import sympy

    found = sympy.simplify(expr)
    if found in (sympy.true, sympy.false):
        return bool(found)
    if not isinstance(found, sympy.Expr):
        return None
    return True if found.is_nonzero else False if found.is_zero else None


_OFFSETS = {"eq": False, "ne": True, "gt": True, "lt": True}


def _about_offsets(node: Node) -> bool | None:
    """The outcome of ``start == end``, ``end > start`` of 0-d tensors when there is something between them; None for other conditions."""
    both = len(node.args) == 2 and all(isinstance(a, Node) and _integer(_value(a)) for a in node.args)
    return _OFFSETS.get(_name(node)) if both else None


def _tells(name: str, bound: Any) -> bool | None:
    """The outcome of comparing a number with a constant, where every number but zero gives the same and zero does not."""
    if name not in _COMPARES or not isinstance(bound, int | float):
        return None
    holds = {bool(_COMPARES[name](n, bound)) for n in (1, 2, 3, 1 << 40)}
    return holds.pop() if len(holds) == 1 and bool(_COMPARES[name](0, bound)) not in holds else None


def _integer(value: Any) -> bool:
    return isinstance(value, torch.SymInt) or (isinstance(value, torch.Tensor) and not value.dim() and value.dtype == torch.int64)


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
    if _about_offsets(node) is not None:
        return _about_offsets(node)
    if name == "sub" and all(isinstance(a, Node) and _integer(_value(a)) for a in node.args):
        return True
    if name in _NOT:
        inner = about_value(first, depth - 1)
        return None if inner is None else not inner
    if name in _COMPARES and len(node.args) == 2 and isinstance(node.args[1], int | float):
        return None if about_value(first, depth - 1) is None else _tells(name, node.args[1])
    if name in _VIEWS or name in ("bool", "item", "int"):
        return about_value(first, depth - 1)
    value = _value(node)
    if name not in _COUNTS or not isinstance(value, torch.Tensor):
        return None
    return True if not value.dtype.is_floating_point or _of_ids(first) else None


def _of_ids(node: Any) -> bool:
    """Whether a number that is a float adds up masks of ids, or is ``histc`` of them: else it may be a loss, or anything."""
    for _ in range(16):
        if not isinstance(node, Node) or node.op not in ("call_method", "call_function") or not node.args:
            return False
        name = _name(node)
        if name in ("histc", "one_hot", "eq", "scatter_add", "scatter_add_"):
            return True
        if name not in _VIEWS and name not in _COUNTS and name not in _KEEPS_IDS and name not in ("float", "bool", "mul"):
            return False
        node = node.args[0]
    return False
