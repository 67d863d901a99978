"""Which numbers an integer tensor can hold, read from how it was computed; and which dtypes keep such numbers apart.

Interval analysis: each operation gives an interval from those of its arguments. What is not known is all that the dtype can hold, and so is
what could overflow, or is written to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.op_classes import VALUES_AND_INDICES
from moefuse.passes.infer.choices import from_topk, positions
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import View

Interval = tuple[int, int]  # both ends included


@dataclass
class _Ranges:
    of: dict[Node, Interval | None] = field(default_factory=dict)


def whole(dtype: torch.dtype) -> Interval | None:
    """All numbers of an integer dtype; None for any other."""
    if dtype == torch.bool:
        return 0, 1
    if dtype.is_floating_point or dtype.is_complex:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def holds(dtype: torch.dtype, interval: Interval) -> bool:
    """Whether every integer of an interval is a value of ``dtype``, so that a cast there and back changes none and makes no two equal."""
    low, high = interval
    if dtype.is_floating_point:
        exact = int(2 / torch.finfo(dtype).eps)
        return -exact <= low and high <= min(exact, int(torch.finfo(dtype).max))
    known = whole(dtype)
    return known is not None and known[0] <= low and high <= known[1]


def counts(dtype: torch.dtype, most: Any) -> bool:
    """Whether numbers of rows up to ``most`` are exact in ``dtype``. A number that only the run knows is taken to be below 2**24."""
    return holds(dtype, (0, most if isinstance(most, int) else 1 << 24))


def tells_none(dtype: torch.dtype) -> bool:
    """Whether a number of rows is zero in ``dtype`` only if there are none: narrow integers wrap around."""
    return dtype == torch.bool or dtype.is_floating_point or dtype.itemsize >= 4


def interval(ctx: Context, value: Any) -> Interval | None:
    """What an integer tensor, or a number, can hold; None if it is no integer."""
    if isinstance(value, bool | int):
        return int(value), int(value)
    known = tensor(value)
    if known is None:
        return None
    seen = ctx.scratch(_Ranges).of
    if value not in seen:
        limits = whole(known.dtype)
        found = _computed(ctx, value) if limits is not None and ctx.storage[value] not in ctx.writes else None
        seen[value] = found if found is not None and limits is not None and holds(known.dtype, found) else limits
    return seen[value]


def distinct(ctx: Context, node: Node) -> bool:
    """Whether the last dimension of ids holds no number twice: indices of a top-k or of part of a sorted dimension, perhaps shifted."""
    if ctx.storage.get(node) in ctx.writes:
        return False
    if from_topk(ctx, node):
        return True
    call = ctx.calls.get(node)
    if call is None or call.inplace or call.kwargs or call.name not in ("add", "sub") or len(call.args) != 2:
        return False
    source, shift = call.args
    if not isinstance(source, Node) or type(shift) is not int or interval(ctx, source) is None:
        return False
    after = _FUNCTIONS[call.name](ctx, call)
    return after is not None and holds(tensor(node).dtype, after) and distinct(ctx, source)  # type: ignore[union-attr]


def _computed(ctx: Context, node: Node) -> Interval | None:
    number = ctx.number(node)
    if number is not None:
        return (int(number), int(number)) if type(number) is int else None
    size = positions(ctx, node)
    if size is not None:
        return 0, size - 1
    fact, call = ctx.facts.get(node), ctx.calls.get(node)
    if type(fact) is View and fact.root is not node:
        return interval(ctx, fact.root)
    function = _FUNCTIONS.get(call.name) if call is not None and not call.inplace else None
    return function(ctx, call) if function is not None and call is not None and call.args else None


def _join(*parts: Interval | None) -> Interval | None:
    known = [p for p in parts if p is not None]
    return (min(p[0] for p in known), max(p[1] for p in known)) if known and len(known) == len(parts) else None


def _same(ctx: Context, call: Call) -> Interval | None:
    """Some of the elements of the first argument, or all."""
    source = call.args[0]
    if isinstance(fake(source), torch.Tensor):
        return interval(ctx, source)
    pair = ctx.calls.get(source)  # ``ids.sort()[0]``
    values = pair is not None and pair.name in VALUES_AND_INDICES and call.name == "getitem" and call.args[1] == 0
    return interval(ctx, pair.args[0]) if values and pair is not None else None


def _cast(ctx: Context, call: Call) -> Interval | None:
    source = call.args[0]
    value, before = tensor(source), ctx.calls.get(source) if isinstance(source, Node) else None
    if value is None or not value.dtype.is_floating_point:
        return interval(ctx, source)  # whether it fits is asked behind every operation
    if before is None or before.name != "to" or before.inplace or ctx.storage[source] in ctx.writes:
        return None
    found = _cast(ctx, before)  # ``ids.half().long()``
    return found if found is not None and holds(value.dtype, found) else None


def _pair(ctx: Context, call: Call) -> tuple[Interval, Interval] | None:
    """The intervals of two operands and no options."""
    both = [interval(ctx, a) for a in call.args]
    return (both[0], both[1]) if len(both) == 2 and None not in both and not call.kwargs else None  # type: ignore[return-value]


def _of_corners(what: Callable[[int, int], int]) -> Callable[[Context, Call], Interval | None]:
    """The interval of a function that goes one way along each of its two arguments."""

    def function(ctx: Context, call: Call) -> Interval | None:
        both = _pair(ctx, call)
        if both is None:
            return None
        corners = [what(a, b) for a in both[0] for b in both[1]]
        return min(corners), max(corners)

    return function


def _clamp(ctx: Context, call: Call) -> Interval | None:
    names = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = names.get("min"), names.get("max")
    found = interval(ctx, call.args[0])
    if found is None or any(b is not None and type(b) is not int for b in (low, high)):
        return None
    least, most = (max(v, low) if low is not None else v for v in found)
    return (least, most) if high is None else (min(least, high), min(most, high))


def _remainder(ctx: Context, call: Call) -> Interval | None:
    both = _pair(ctx, call)
    if both is None or both[1][0] != both[1][1] or both[1][0] == 0:
        return None
    (low, high), n = both[0], both[1][0]
    return (low, high) if low >= 0 and high < n else (0, n - 1) if n > 0 else (n + 1, 0)


def _fmod(ctx: Context, call: Call) -> Interval | None:
    both = _pair(ctx, call)
    if both is None or both[1][0] != both[1][1] or both[1][0] == 0:
        return None
    most = abs(both[1][0]) - 1  # with the sign of what is divided
    return max(both[0][0], -most) if both[0][0] < 0 else 0, min(both[0][1], most) if both[0][1] > 0 else 0


def _floor_divide(ctx: Context, call: Call) -> Interval | None:
    both = _pair(ctx, call)
    return None if both is None or both[1][0] != both[1][1] or both[1][0] < 1 else (both[0][0] // both[1][0], both[0][1] // both[1][0])


def _bits(ctx: Context, call: Call) -> Interval | None:
    """Of two numbers that are not negative, ``a & b`` is no more than either; one of them is enough."""
    both = _pair(ctx, call)
    highest = [high for low, high in both or () if low >= 0]
    return (0, min(highest)) if highest else None


def _where(ctx: Context, call: Call) -> Interval | None:
    if len(call.args) != 3:
        return None
    condition, chosen, other = call.args
    return _join(_if(ctx, chosen, condition, True), _if(ctx, other, condition, False))


def _filled(ctx: Context, call: Call) -> Interval | None:
    condition, value = (call.kwargs.get(k, call.args[i] if len(call.args) > i else None) for i, k in ((1, "mask"), (2, "value")))
    return _join(interval(ctx, value), _if(ctx, call.args[0], condition, False))


_WHERE: dict[str, Callable[[int, int, int], Interval]] = {
    "lt": lambda low, high, n: (low, min(high, n - 1)), "le": lambda low, high, n: (low, min(high, n)),
    "gt": lambda low, high, n: (max(low, n + 1), high), "ge": lambda low, high, n: (max(low, n), high),
    "eq": lambda low, high, n: (max(low, n), min(high, n)), "ne": lambda low, high, n: (low + (low == n), high - (high == n)),
}  # fmt: skip
_NOT = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}


def _if(ctx: Context, value: Any, condition: Any, outcome: bool) -> Interval | None:
    """What a tensor holds where a condition is true (or false): ``ids`` where ``ids < 0``."""
    found = interval(ctx, value)
    call = ctx.calls.get(condition) if isinstance(condition, Node) else None
    asked = call is not None and call.name in _WHERE and not call.inplace and call.args[0] is value and type(call.args[-1]) is int
    if found is None or call is None or not asked or ctx.storage[condition] in ctx.writes:
        return found
    low, high = _WHERE[call.name if outcome else _NOT[call.name]](*found, call.args[1])
    return (low, high) if low <= high else found  # it is nowhere so


def _all_of(ctx: Context, call: Call) -> Interval | None:
    parts = call.args[0]
    return _join(*(interval(ctx, p) for p in parts)) if isinstance(parts, tuple | list) else None


def _randint(ctx: Context, call: Call) -> Interval | None:
    given = [*(a for a in call.args if type(a) is int), *(call.kwargs[k] for k in ("low", "high") if k in call.kwargs)]
    ends = [0, *given] if len(given) == 1 else given
    return (ends[0], ends[1] - 1) if len(ends) == 2 and all(type(e) is int for e in ends) else None


_FUNCTIONS: dict[str, Callable[[Any, Call], Interval | None]] = {
    **dict.fromkeys(("getitem", "index_select", "gather", "clone", "contiguous", "select", "masked_select"), _same),
    **dict.fromkeys(("remainder", "mod"), _remainder), "fmod": _fmod, **dict.fromkeys(("cat", "stack", "tensor"), _all_of),
    "add": _of_corners(lambda a, b: a + b), "sub": _of_corners(lambda a, b: a - b), "mul": _of_corners(lambda a, b: a * b),
    "minimum": _of_corners(min), "maximum": _of_corners(max), "floor_divide": _floor_divide, "bitwise_and": _bits,
    "to": _cast, "clamp": _clamp, "where": _where, "masked_fill": _filled, "randint": _randint,
}  # fmt: skip


__all__ = ["Interval", "counts", "distinct", "holds", "interval", "tells_none", "whole"]
