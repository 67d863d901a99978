"""The refusals of sums that are without some experts, or some choices of a token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.named import counted
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import Lost, Part
from moefuse.passes.match.families import Families


def experts(ctx: Context, parts: Sequence[Part], numbers: Sequence[int], anchor: Node, count: int) -> Lost:
    """The refusal of a sum without some experts."""
    twice = next((n for n in numbers if numbers.count(n) > 1), None)
    numbers = sorted(set(numbers))
    total = max(count, numbers[-1] + 1, _choices(parts))
    absent = next((n for n in range(total) if n not in numbers), None)
    have = _have(ctx, parts)
    if twice is not None and absent is not None:
        detail = f"several experts run on the tokens that chose expert {twice}, and none on those that chose expert {absent}"
        return ctx.lost("missing-experts", anchor, detail=detail, have=have)
    run = numbers == list(range(numbers[0], numbers[-1] + 1))
    present = f"{numbers[0]}..{numbers[-1]}" if run and len(numbers) > 1 else ", ".join(map(str, numbers))
    return ctx.lost("missing-experts", anchor, present=present, count=str(total), have=have)


def slots(ctx: Context, found: Collection[int | None], count: Any, anchor: Node) -> Lost:
    """The refusal of a sum that has not each of a token's choices."""
    numbers = sorted(slot for slot in found if slot is not None)
    if len(numbers) < len(found):
        detail = "some of them run for all slots of a token, and some for one slot"
    else:
        detail = f"only slot{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} of the {counted(count)} that a token has"
    return ctx.lost("missing-experts", anchor, detail=detail, have=frozenset((None, slot) for slot in found))


def others_elsewhere(ctx: Context, parts: Sequence[Part], count: int) -> bool:
    """Whether a sum has one of several experts, or some, and the way of the others is lost: such a part of a layer is no layer."""
    routing = next((p.rows.domain.routing for p in parts if p.rows.domain.routing is not None), None)
    if routing is None or not count < _choices(parts):
        return False
    return count == 1 or Families(ctx).lost_of_others(routing, _have(ctx, parts)) is not None


def _have(ctx: Context, parts: Sequence[Part]) -> frozenset[tuple[int | None, int | None]]:
    return frozenset((n, p.rows.domain.slot) for p in parts for n in ctx.members(p.rows.domain.expert or 0))


def _choices(parts: Sequence[Part]) -> int:
    """The most experts that a routing of some parts may choose; 0 if nothing says how many."""
    return max((p.rows.domain.routing.choices or 0 for p in parts if p.rows.domain.routing is not None), default=0)


__all__ = ["experts", "others_elsewhere", "slots"]
