"""Whether an expert was chosen at all: ``counts > 0``, ``mask.any()``, ``(ids == e).sum() == 0``. What capture's assumptions are about."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.infer.state import Context, normalize
from moefuse.passes.ir.facts import Counts, Fill, Hit, Mask, Span, Table
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.ids import is_integer

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "gt": operator.gt, "ge": operator.ge, "lt": operator.lt, "le": operator.le, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_MANY = (1, 2, 3, 1 << 40)


def compared(fact: Any, name: str, bound: Any) -> Hit | None:
    """A number of tokens compared with a constant, where that tells none from some."""
    if isinstance(bound, bool) or not isinstance(bound, int | float):
        return None
    if isinstance(fact, Counts) and not fact.ends:
        fact = Hit(fact.axes, fact.routing, None)
    fact = hit_of(fact)
    # A hit is a number of which only zero is known; a count is one, and so is any True.
    if not isinstance(fact, Hit) or fact.negated:
        return None
    some = {bool(_COMPARE[name](n, bound)) for n in _MANY}
    none = bool(_COMPARE[name](0, bound))
    if len(some) != 1 or none in some:
        return None
    return replace(fact, negated=none)


def any_of(fact: Any, dims: set[int]) -> Hit | None:
    """A mask reduced over everything but experts, by ``any``, ``sum`` or ``max``."""
    if isinstance(fact, Mask) and fact.weight is None and not fact.negated:
        slot = None
    elif isinstance(fact, Table) and fact.ones and not fact.negated:
        slot = fact.slot
    else:
        return None
    left = tuple(axis for i, axis in enumerate(fact.axes) if i not in dims)
    kinds = [a.kind for axis in left for a in axis]
    if any(kind != "e" for kind in kinds) or any("e" in {a.kind for a in fact.axes[i]} for i in dims):
        return None
    return Hit(left, fact.routing, fact.expert, slot=slot)


def all_dims(fact: Any, dim: Any) -> set[int]:
    """The dimensions a reduction goes over."""
    rank = len(fact.axes)
    if dim is None:
        return set(range(rank))
    return {normalize(d, rank) for d in (dim if isinstance(dim, tuple | list) else (dim,))}


@rule("item")
def on_item(ctx: Context, node: Node, x: Node) -> Hit | Span | Fill | None:
    fact = ctx.fact(x)
    if isinstance(fact, Span) or (isinstance(fact, Fill) and not fact.axes and is_integer(x)):
        return fact
    return fact if isinstance(fact, Hit) and fact.expert is not None else None


def rows_of(fact: Hit) -> bool:
    """Whether a mask has one position for each expert, from 0 on."""
    return fact.expert is None and not fact.negated and len(fact.axes) == 1 and [a.kind for a in fact.axes[0]] == ["e"]


__all__ = ["all_dims", "any_of", "compared", "rows_of"]


def hit_of(fact: Any) -> Any:
    """A number of slots as what it says about one expert: whether there are any."""
    if isinstance(fact, Span) and fact.stop == fact.start + 1:
        return Hit(fact.axes, fact.routing, fact.start)
    return fact
