"""Sums over what a mask picks out of a tensor, as sums under the mask: ``importance[e] += w[t, k].sum()`` with ``t, k = where(ids == e)``.

To the rules such a sum mixes the rows of an expert. It is no part of what the expert computes, and no gathered row is needed for it. The
gathered one is put back where nothing of a graph is fused (:meth:`Totals.undo`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.op_classes import COPIES, KEEPS, RESHAPES
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.graph.storage import Memory
from moefuse.passes.graph.values import is_boolean

_TOTALS = ("sum", "mean")
STATISTIC = "moefuse_statistic"
"""Key of the meta of nodes that compute a sum under a mask: no rule is asked about them."""


@dataclass
class Totals:
    """Sums that read what is under a mask: (the sum of what was gathered, what stands in its place, the nodes written for that)."""

    found: list[tuple[Node, Node, list[Node]]] = field(default_factory=list)

    def undo(self) -> None:
        """Have the sums as they were."""
        for old, new, nodes in self.found:
            if old._erased:  # with the rows of a captured loop: what stands there is worth the same
                continue
            new.replace_all_uses_with(old)
            old.meta.pop(STATISTIC, None)
            for node in reversed(nodes):
                node.graph.erase_node(node)
        self.found = []


def under_masks(graph: Graph, assumptions: Sequence[Assumption] = ()) -> Totals:
    """Put sums under masks in place of sums of what masks pick; the nodes that were there stay, without users.

    Args:
        graph: a graph as Dynamo has written it.
        assumptions: what capture assumed; a sum is recorded under those of what it stands for.
    """
    totals = Totals()
    ends = [(node, found) for node in graph.nodes if (found := _gathered(node)) is not None]
    if not ends:
        return totals
    memory = Memory(graph)
    for node, found in ends:
        read = (found.source, found.mask, *found.chain, node)
        if any(memory.writes.get(name) for n in read for name in memory.storages(n)):
            continue
        emit = Emitter(graph, node.next, node, {})
        new = _total(emit, node, found)
        node.replace_all_uses_with(new, lambda user, own=tuple(emit.nodes): user not in own)
        for made in (*emit.nodes, *_alone(node, found)):
            made.meta[STATISTIC] = True
        for scope in (a.nodes for a in assumptions if node in a.nodes):
            scope.update(emit.nodes)
        totals.found.append((node, new, emit.nodes))
    return totals


def _alone(node: Node, found: _Gathered) -> list[Node]:
    """A sum that nobody reads any longer, and those of the operations in front of it that nobody else reads."""
    out = [node]
    for step in (*found.chain, found.picked):
        if set(step.users) - set(out):
            break
        out.append(step)
    return out


@dataclass
class _Gathered:
    """What a mask picks out of a tensor, or of that at some numbers of its dimensions, and the operations behind."""

    picked: Node
    source: Node
    mask: Node
    at: dict[int, int]
    chain: list[Node] = field(default_factory=list)


def _gathered(node: Node) -> _Gathered | None:
    """What a sum or a mean is of, where that is all that a mask picks."""
    value = tensor(node)
    call = None if value is None or value.dim() or not value.dtype.is_floating_point else call_of(node)
    if call is None or call.name not in _TOTALS or set(call.kwargs) - {"dtype", "dim", "axis"}:
        return None
    chain: list[Node] = []
    here: Any = call.args[0]
    while isinstance(here, Node) and (before := _kept(here)) is not None:
        chain.append(here)
        here = before
    picked = _picked(here) if isinstance(here, Node) else None
    if picked is not None:
        picked.chain = chain
    return picked


def _kept(node: Node) -> Node | None:
    """What an operation is given that changes no value but by a cast, and no number of values."""
    call, value = call_of(node), tensor(node)
    before = call.args[0] if call is not None and call.args else None
    if call is None or value is None or not isinstance(before, Node) or (given := tensor(before)) is None:
        return None
    same = call.name in RESHAPES | COPIES and value.dtype == given.dtype  # `view(dtype)` reads other numbers out of the same bytes
    return before if same or call.name in KEEPS else None


def _picked(node: Node) -> _Gathered | None:
    """``w[where(mask)]``, ``w[mask]``, ``masked_select(w, mask)`` and ``w[where(mask)[0], 1]``, where tensor and mask have one shape."""
    call = call_of(node)
    if call is None or call.name not in ("getitem", "masked_select") or len(call.args) != 2 or call.kwargs:
        return None
    source, index = call.args
    index = [i for i in (index if isinstance(index, tuple | list) else (index,)) if i is not None]
    places = [i for i in index if isinstance(i, Node)]
    at = {dim: i for dim, i in enumerate(index) if type(i) is int}
    if not isinstance(source, Node) or len(places) + len(at) != len(index) or not places:
        return None
    mask = places[0] if len(places) == 1 and is_boolean(places[0]) else _mask_of(places)
    value, chosen = tensor(source), tensor(mask)
    if mask is None or value is None or chosen is None or not value.dtype.is_floating_point or (at and is_boolean(places[0])):
        return None
    left = tuple(size for dim, size in enumerate(shape_of(value)) if dim not in at)
    return _Gathered(node, source, mask, at) if same_shape(left, shape_of(chosen)) else None


def _mask_of(places: Sequence[Any]) -> Node | None:
    """The mask of which index tensors are all that ``where`` or ``nonzero`` gives, in their order."""
    found: set[Node] = set()
    for at, place in enumerate(places):
        call = call_of(place)
        if call is None or call.name != "getitem" or not isinstance(call.args[0], Node):
            return None
        maker, index = call.args[0], call.args[1]
        made = call_of(maker)
        if made is None or made.name not in ("where", "nonzero") or len(made.args) != 1 or not isinstance(made.args[0], Node):
            return None
        columns = isinstance(fake(maker), torch.Tensor)
        if index != ((slice(None), at) if columns else at) or not is_boolean(made.args[0]):
            return None
        if fake(made.args[0]).dim() != len(places):
            return None
        found.add(made.args[0])
    return found.pop() if len(found) == 1 else None


def _total(emit: Emitter, node: Node, found: _Gathered) -> Node:
    """The sum, or the mean, in the dtype that it has."""
    wanted, call, value = fake(node).dtype, call_of(node), found.source
    if fake(value).requires_grad and not fake(node).requires_grad:  # it was detached on the way, or computed without gradients
        value = emit(torch.detach, value)
    for dim in sorted(found.at, reverse=True):
        value = emit(torch.select, value, dim, found.at[dim])
    for step in reversed(found.chain):  # a view of what was gathered is none of all values
        value = value if fake(step).dtype == fake(value).dtype else emit(torch.Tensor.to, value, fake(step).dtype)
    wide = torch.promote_types(torch.float32, torch.promote_types(fake(value).dtype, wanted))
    total = emit(torch.sum, emit(torch.where, found.mask, value, 0.0), dtype=wide)
    if call is not None and call.name == "mean":
        total = emit(operator.truediv, total, emit(torch.count_nonzero, found.mask))
    return total if fake(total).dtype == wanted else emit(torch.Tensor.to, total, wanted)


__all__ = ["Totals", "under_masks"]
