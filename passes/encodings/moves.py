"""Operations that move elements and change none: which element of an argument each element of the result is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.batch import Asked
from moefuse.passes.encodings.memory import Coords, Strided, onto, ravel, unravel
from moefuse.passes.encodings.terms import Const, Term, UnreadError, cast, looked_up
from moefuse.passes.graph.calls import Call, call_target
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import COPIES, FILLS, RESHAPES

Move = Callable[[Asked, Node, Call, Coords], Term]
_INDEX = (Node, slice, list, type(None))
_SMALL = 1 << 20
"""Most numbers of a constant."""


class ApartError(Exception):
    """Elements come from several tensors; ``group`` says for each which belong together."""

    def __init__(self, group: Tensor) -> None:
        super().__init__("elements go several ways")
        self.group = group


def memory_of(value: Tensor) -> Tensor:
    """The memory of a tensor from its first element on, as one dimension."""
    value = value.detach()
    reach = 1 + sum((n - 1) * by for n, by in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    return value.as_strided((reach,), (1,))


def _source(node: Node, call: Call, at: int = 0) -> Node:
    value = call.args[at] if len(call.args) > at else None
    if not isinstance(value, Node):
        raise UnreadError(node, "has arguments that are not read")
    return value


def _option(call: Call, name: str, at: int, default: Any) -> Any:
    return call.kwargs.get(name, call.args[at] if len(call.args) > at else default)


def _same(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    return elements.of(_source(node, call), coords, node)


def _cast(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    return cast(node, _same(elements, node, call, coords), Strided(node).dtype)


def _reshape(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x = _source(node, call)
    if Strided(x).dtype != Strided(node).dtype:
        raise UnreadError(node, "reads numbers as several, or several as one")
    flat = ravel(coords, Strided(node).sizes, elements.batch.count)
    return elements.of(x, unravel(flat, Strided(x).sizes), node)


def _expand(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x = _source(node, call)
    return elements.of(x, onto(coords, Strided(x).sizes), node)


def _repeat(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x = _source(node, call)
    sizes = Strided(x).sizes
    last = coords[len(coords) - len(sizes) :]
    return elements.of(x, tuple(c % size for c, size in zip(last, sizes, strict=True)), node)


def _repeat_interleave(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x, times, dim = _source(node, call), _option(call, "repeats", 1, None), _option(call, "dim", 2, None)
    sizes = Strided(x).sizes
    if not isinstance(times, int) or not isinstance(dim, int | None):
        raise UnreadError(node, "repeats as often as a tensor says")
    if dim is None:
        return elements.of(x, unravel(coords[0] // times, sizes), node)
    return elements.of(x, tuple(c // times if d == dim % len(sizes) else c for d, c in enumerate(coords)), node)


def _parts(node: Node, call: Call) -> tuple[list[Node], int]:
    parts = _option(call, "tensors", 0, ())
    dim = _option(call, "dim", 1, 0)
    if not isinstance(parts, tuple | list) or not all(isinstance(p, Node) for p in parts) or not isinstance(dim, int) or not parts:
        raise UnreadError(node, "has arguments that are not read")
    return list(parts), dim % len(Strided(node).sizes)


def _together(group: Tensor) -> int:
    first = int(group[0])
    if not (group == first).all():
        raise ApartError(group)
    return first


def _stack(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    parts, dim = _parts(node, call)
    which = _together(coords[dim])
    return cast(node, elements.of(parts[which], (*coords[:dim], *coords[dim + 1 :]), node), Strided(node).dtype)


def _cat(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    parts, dim = _parts(node, call)
    if any(len(Strided(p).sizes) <= dim for p in parts):
        raise UnreadError(node, "puts an empty tensor beside others")
    ends = torch.tensor([Strided(p).sizes[dim] for p in parts]).cumsum(0)
    which = _together(torch.searchsorted(ends, coords[dim].contiguous(), right=True))
    begin = int(ends[which - 1]) if which else 0
    return cast(node, elements.of(parts[which], (*coords[:dim], coords[dim] - begin, *coords[dim + 1 :]), node), Strided(node).dtype)


def _constant(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    own = Strided(node)
    if node.all_input_nodes or torch.Size(own.sizes).numel() > _SMALL:
        raise UnreadError(node, "is no constant")
    kwargs = {**node.kwargs, "device": "cpu"}
    found = call_target(node, node.args, kwargs)
    return Const(found.to(own.dtype)[coords].expand(elements.batch.count))


def _fill(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    if "empty" in call.name:
        raise UnreadError(node, "is read where nothing was written")
    value: Any = 1 if "ones" in call.name else 0
    if "full" in call.name:
        value = _option(call, "fill_value", 2 if call.name == "new_full" else 1, None)
    if not isinstance(value, bool | int | float):
        raise UnreadError(node, "is filled with what is no number")
    return Const(torch.full((elements.batch.count,), value, dtype=Strided(node).dtype))


def _getitem(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x, index = _source(node, call), call.args[1]
    items = list(index) if isinstance(index, tuple | list) else [index]
    return _index(elements, node, x, items, coords)


def _index_select(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x, dim, index = _source(node, call), _option(call, "dim", 1, None), _option(call, "index", 2, None)
    if not isinstance(dim, int):
        raise UnreadError(node, "has arguments that are not read")
    return _index(elements, node, x, [slice(None)] * (dim % len(Strided(x).sizes)) + [index], coords)


def _take(elements: Asked, node: Node, call: Call, coords: Coords) -> Term:
    x = _source(node, call)
    if len(Strided(x).sizes) != 1:
        raise UnreadError(node, "takes elements of several dimensions")
    return _index(elements, node, x, [call.args[1]], coords)


def _index(elements: Asked, node: Node, x: Node, items: list[Any], coords: Coords) -> Term:
    """Elements of ``x[items]``, one of which is a tensor or a list of numbers."""
    sizes, out = Strided(x).sizes, list(coords)
    if sum(isinstance(i, Node | list) for i in items) != 1 or not all(isinstance(i, _INDEX) or i is Ellipsis for i in items):
        raise UnreadError(node, "takes elements by more than one tensor")
    at = next((n for n, i in enumerate(items) if i is Ellipsis), None)
    if at is not None:
        items[at : at + 1] = [slice(None)] * (len(sizes) - sum(i is not None for i in items) + 1)
    items += [slice(None)] * (len(sizes) - sum(i is not None for i in items))
    found: list[Tensor] = []
    for item in items:
        if item is None:
            out.pop(0)
        elif isinstance(item, slice):
            start, _, step = item.indices(sizes[len(found)])
            found.append(out.pop(0) * step + start)
        else:
            term = _numbers(elements, node, item, out)
            if not isinstance(term, Const):
                return _table(elements, node, x, term)
            found.append(torch.where(term.values < 0, term.values + sizes[len(found)], term.values).long())
    return elements.of(x, tuple(found), node)


def _numbers(elements: Asked, node: Node, index: Node | list[Any], out: list[Tensor]) -> Term:
    """The numbers that an index has; their dimensions are the next ones of the result."""
    if isinstance(index, list):
        if not all(type(i) is int for i in index):
            raise UnreadError(node, "takes elements by more than one tensor")
        return Const(torch.tensor(index)[out.pop(0)])
    coords = [out.pop(0) for _ in Strided(index).sizes]
    if Strided(index).dtype in (torch.bool, torch.uint8):
        raise UnreadError(node, "takes what a mask leaves")
    return elements.of(index, tuple(coords), node)


def _table(elements: Asked, node: Node, x: Node, index: Term) -> Term:
    """Elements of a table, by codes."""
    sizes = Strided(x).sizes
    if len(sizes) != 1 or sizes[0] > _SMALL:
        raise UnreadError(node, "takes by codes what is no table of numbers")
    found = elements.every(x, sizes[0], node)
    if not isinstance(found, Const):
        raise UnreadError(node, f"looks codes up in a tensor that may change, {named(x)}", node)
    return looked_up(node, index, found.values)


def slot(node: Node, index: Any, coords: Coords, sizes: tuple[int, ...]) -> tuple[Tensor, Coords]:
    """Which elements an assignment ``x[index] = ...`` writes to, and which of the value's each is."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(i, int | slice | None) or i is Ellipsis for i in items) or any(isinstance(i, bool) for i in items):
        raise UnreadError(node, "writes to places that a tensor says")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(sizes) - sum(i is not None for i in items) + 1)
    items += [slice(None)] * (len(sizes) - sum(i is not None for i in items))
    inside, found, dim = torch.ones_like(coords[0], dtype=torch.bool), [], 0
    for item in items:
        if item is None:
            found.append(torch.zeros_like(coords[0]))
            continue
        here = coords[dim]
        if isinstance(item, int):
            inside &= here == item % sizes[dim]
        else:
            start, stop, step = item.indices(sizes[dim])
            inside &= (here >= start) & (here < stop) & ((here - start) % step == 0)
            found.append((here - start) // step)
        dim += 1
    return inside, tuple(found)


MOVES: dict[str, Move] = {
    **dict.fromkeys(RESHAPES, _reshape),
    **dict.fromkeys(COPIES, _same),
    **dict.fromkeys(("to", "type_as", "_to_copy", "convert_element_type", "contiguous", "cpu", "cuda"), _cast),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    **dict.fromkeys(("getitem", "index"), _getitem),
    **dict.fromkeys(("tensor", "as_tensor", "arange", "linspace", "scalar_tensor"), _constant),
    **dict.fromkeys(FILLS, _fill),
    "repeat_interleave": _repeat_interleave,
    "stack": _stack,
    "cat": _cat,
    "index_select": _index_select,
    "take": _take,
}  # fmt: skip


__all__ = ["MOVES", "ApartError", "memory_of", "slot"]
