"""Products of packed weights that no rule reads: they are why a layer is refused, or why nothing else speaks of it."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.named import operation
from moefuse.passes.graph.sizes import same, same_shape, shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.unpacking import Use, is_foreign, unpacking
from moefuse.passes.ir.facts import Lost, View
from moefuse.passes.match.encodings import packed
from moefuse.passes.match.unexplained import decided, scores_of

_THERE = frozenset(("no-rule",))
"""What is lost right where a product is."""
_HIDDEN = _THERE | frozenset("not-recognised tokens-differ threshold not-combined experts-differ missing-experts not-weighted".split())
"""What a layer looks like of which one product was not understood."""
_FEWEST = 3
"""So many equal weights are experts; of two, one may be anything."""
_FAR = 256
"""So many operations are looked at between a product and what it is the cause of."""


def told(ctx: Context, losses: Iterable[Lost]) -> Iterator[tuple[Lost, Lost]]:
    """Each refusal, and what says more where it is how weights are unpacked that no rule could read: that once for each product."""
    uses, seen = _unread(ctx), set[Node]()
    for lost in losses:
        hidden = lost.code in _HIDDEN and not _by_its_rule(ctx, lost)
        use = next((use for use in uses if _is_cause(ctx, use, lost)), None) if hidden else None
        if use is None:
            yield lost, lost
        elif use.node not in seen:
            seen.add(use.node)
            yield lost, _of_use(ctx, use)


def silent(ctx: Context, said: Iterable[Node]) -> Iterator[Lost]:
    """Refusals for layers with packed weights of which nothing else speaks, one for each choice of experts.

    Args:
        said: where the graph's other layers are, those that are fused and those that are refused.
    """
    uses = _unread(ctx)
    known = {_choice(ctx, node) for node in said} if uses else set()
    for use in uses:
        choice = _choice(ctx, use.node)
        if choice not in known and (_by_ids(ctx, use) or _is_taken(ctx, use) or (_is_of_some(ctx, use, uses) and decided(ctx, use.node))):
            known.add(choice)
            yield _of_use(ctx, use)


def _is_of_some(ctx: Context, use: Use, uses: list[Use]) -> bool:
    """Whether there are as many experts as scores: in a stack, or one by one in front of the next choice."""
    choice, of = _choice(ctx, use.node), tensor(use.weight.largest)
    count = scores_of(ctx, choice) if choice is not None else None
    if of is None or count is None:
        return False
    if of.dim() >= 3:
        return same(shape_of(of)[0], count)
    like = {u.weight.largest for u in uses if _choice(ctx, u.node) is choice and _is_like(tensor(u.weight.largest), of)}
    return len(like) >= _FEWEST and len(like) % count == 0


def _is_like(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and same_shape(shape_of(one), shape_of(other))


def _unread(ctx: Context) -> list[Use]:
    """What multiplies packed weights, and is no expert's product to any rule."""
    return [use for use in unpacking(ctx).uses if isinstance(ctx.facts.get(use.node), Lost | View | None)]


def _by_its_rule(ctx: Context, lost: Lost) -> bool:
    """Whether the rule of a library's operator says itself what is in the way."""
    call = ctx.calls.get(lost.node)
    return call is not None and is_foreign(call) and lost.code not in _THERE


def _is_cause(ctx: Context, use: Use, lost: Lost) -> bool:
    """Whether a product that no rule reads is why something was lost: it is there, or it stands between there and the choice of experts."""
    if lost.node is use.node:
        return True
    if lost.code in _THERE or _choice(ctx, lost.node) is not _choice(ctx, use.node):
        return False
    first, last = sorted((lost.node, use.node), key=ctx.position.__getitem__)
    return first in _behind(last)


def _behind(node: Node) -> set[Node]:
    """What a value is computed from, nearest first, as far as it is looked at."""
    seen, stack = {node}, [node]
    while stack and len(seen) < _FAR:
        new = [n for n in stack.pop(0).all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return seen


@dataclass
class _Choices:
    """Where a graph chooses by scores, in order."""

    nodes: list[Node] | None = None


def _has_indices(node: Node, call: Call) -> bool:
    """Whether anything reads which scores were chosen: the largest of some values alone is a scale."""
    return call.name not in ("max", "min") or any(u.target is not operator.getitem or u.args[1] != 0 for u in node.users)


def _choice(ctx: Context, node: Node) -> Node | None:
    """The last choice by scores in front of an operation."""
    known = ctx.scratch(_Choices)
    if known.nodes is None:
        known.nodes = [n for n, call in ctx.calls.items() if call is not None and _has_indices(n, call) and scores_of(ctx, n) is not None]
    at = bisect_right(known.nodes, ctx.position[node], key=ctx.position.__getitem__)
    return known.nodes[at - 1] if at else None


def _by_ids(ctx: Context, use: Use) -> bool:
    """Whether a stranger's operation takes a stack of packed matrices, and whole numbers that say which."""
    values = [(n, tensor(n)) for n in use.node.all_input_nodes]
    stacks = any(v is not None and v.dim() >= 3 and v.dtype == use.weight.packed for _, v in values)
    return (
        use.foreign
        and stacks
        and any(
            v is not None and v.dim() and v.dtype in (torch.int32, torch.int64) and unpacking(ctx).of(ctx, n) is None for n, v in values
        )
    )


def _is_taken(ctx: Context, use: Use) -> bool:
    """Whether its weights are taken out of a stack of packed matrices by whole numbers, wherever those are from."""
    made = [n for n in use.node.all_input_nodes if unpacking(ctx).of(ctx, n) is not None]
    return any(_takes_rows(ctx.calls.get(node)) for n in made for node in _behind(n))


def _takes_rows(call: Call | None) -> bool:
    if call is None or call.name not in ("getitem", "index_select", "index") or len(call.args) < 2:
        return False
    stack, rows = tensor(call.args[0]), tensor(call.args[-1])
    packed = stack is not None and stack.dim() >= 3 and stack.dtype.itemsize == 1 and stack.dtype != torch.bool
    return packed and rows is not None and rows.dim() >= 1 and rows.dtype in (torch.int32, torch.int64)


def _of_use(ctx: Context, use: Use) -> Lost:
    call = ctx.calls[use.first]
    name = operation(use.first) if call is None else call.name
    said = "multiplies them, and is an operator that moefuse cannot look into"
    if use.first is not use.node or not use.foreign:
        said = "is the first operation on them that moefuse cannot read"
    return packed(ctx, use.first, use.weight.packed, f"`{name}` {said}")


__all__ = ["silent", "told"]
