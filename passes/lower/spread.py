"""Lowering of a region whose experts are spread over ranks: tokens travel to them, and what they computed travels back.

The same ops on the weights that this rank holds, between ``moefuse::ep_dispatch`` and ``moefuse::ep_combine``. What is proved before is the
region on the full weights (``lower.py``); that the two are one function is the meaning of these ops (``moefuse/ops/parallel.py``), as long
as the weights are views of the sharded ones, expert by expert, which is read from their strides (``passes/graph/sharded.py``).
"""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake, module_path, tensor
from moefuse.passes.graph.sharded import NotLocalError, is_gathered, local_view
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.ir.expr import Expr, Gate, Leaf, SharedVector, SlotWeight, Token, walk, weight_leaves
from moefuse.passes.ir.regions import Region
from moefuse.passes.lower.lower import BySlot, Lowered, Lowering
from moefuse.passes.match.templates import Body


@dataclass(frozen=True)
class Sharding:
    """Where the experts of a region are: arguments of the ops. ``held``: how many of them this rank has."""

    place: Node
    slots: int
    terms: str
    held: int


def sharding(region: Region) -> Sharding | None:
    """Where the experts of a region are; None where no weight of it is sharded.

    Raises:
        NotLocalError: some are, and the region cannot run where they are.
    """
    leaves = weight_leaves(region.expr)
    sources = {n for leaf in leaves for n in (leaf.parts or (leaf.source,))}
    if not any(_reads_sharded(n) for n in sources):
        return None
    if region.rest is not None:
        raise NotLocalError("some of the experts have no weights")
    calls = {local_view(list(leaf.parts or (leaf.source,)), region.num_experts)[0] for leaf in leaves}
    shared = next((e for e in walk(region.expr) if isinstance(e, SharedVector)), None)
    if shared is not None:
        raise NotLocalError(f"`{shared.source.name}` is one tensor for all experts, whose gradient would be that of some ranks")
    places = {call.args[1:] for call in calls}
    held = {int(shape_of(fake(call.args[0]))[0]) for call in calls}
    if len(places) != 1 or len(held) != 1:
        raise NotLocalError("its weights are sharded in different ways")
    place, slots, terms = places.pop()
    return Sharding(place, slots, terms, held.pop())  # type: ignore[arg-type]


def _reads_sharded(node: Node, steps: int = 32) -> bool:
    """Whether gathered weights are among the few operations that make a weight."""
    stack, seen = [node], {node}
    while stack and len(seen) < steps:
        here = stack.pop()
        if is_gathered(here):
            return True
        new = [n for n in here.all_input_nodes if n not in seen]
        seen.update(new)
        stack.extend(new)
    return False


class Spread(Lowering):
    """Builds the replacement of a region whose experts are spread."""

    def __init__(self, region: Region, emit: Emitter, where: Sharding) -> None:
        super().__init__(region, emit)
        self.where = where
        self.layer = module_path(region.anchor) or "the experts"
        self.arrived: dict[Hashable, Node] = {}
        self.handle: list[Node] = []

    def by_slot(self, region: Region, top_k: int) -> Lowering:
        return SpreadBySlot(region, self.emit, self.where, top_k)

    def either(self) -> Lowered:
        lowered = super().either()
        tokens = self.emit(torch.ops.aten.sym_size.int, super().ids(), 0)
        back = self.emit(torch.ops.moefuse.ep_combine.default, lowered.result, self.handle, tokens, self.where.terms, self.layer)
        return replace(lowered, result=back)

    def fused(self, body: Body) -> Lowered:
        weight = body.weight
        self.send([(body.token, self.dtype(body.first.weight))], [weight])
        return super().fused(body)

    def grouped(self) -> Lowered:
        found = list(walk(self.region.expr))
        tokens: list[tuple[Token, torch.dtype | None]] = [(e, None) for e in found if isinstance(e, Token)]
        self.send(tokens, [e for e in found if isinstance(e, SlotWeight | Gate)])
        return super().grouped()

    def send(self, tokens: list[tuple[Token, torch.dtype | None]], weights: list[Expr | None]) -> None:
        """Dispatch all that the experts read of a token, in one op."""
        rows: dict[Hashable, Node] = {}
        for token, dtype in tokens:
            rows.setdefault(_key(token, dtype), super().tokens(token, dtype))
        for weight in filter(_differs, weights):
            rows.setdefault(_key(weight), super().slot_weights(weight))
        ids = super().ids()
        w = self.where
        sent = list(dict.fromkeys(rows.values()))
        out = self.emit(torch.ops.moefuse.ep_dispatch.default, sent, ids, w.place, w.slots, w.terms, self.layer)
        got = {node: self.emit(operator.getitem, out, i) for i, node in enumerate(sent)}
        self.arrived = {key: got[node] for key, node in rows.items()} | {"ids": self.emit(operator.getitem, out, len(sent))}
        handles = range(len(sent) + 1, len(fake(out)))
        self.handle = [self.emit(operator.getitem, out, i) for i in handles]

    def ids(self) -> Node:
        return self.arrived.get("ids") or super().ids()

    def tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        return self.arrived[_key(token, dtype)] if self.arrived else super().tokens(token, dtype)

    def slot_weights(self, weight: Expr | None) -> Node:
        return self.arrived[_key(weight)] if self.arrived and _differs(weight) else super().slot_weights(weight)

    def numbers(self, leaf: Leaf) -> Node:
        return self.sources(leaf)[0]

    def here(self) -> int:
        return self.where.held

    def apart(self, leaf: Leaf) -> bool:
        return False

    def sources(self, leaf: Leaf) -> list[Node]:
        call, sizes, strides, start = local_view(list(leaf.parts or (leaf.source,)), self.region.num_experts)
        local: Any = call.args[0]
        value = tensor(local)
        if (
            value is not None
            and [int(n) for n in value.shape[1:]] == sizes
            and [int(n) for n in value.stride()[1:]] == strides
            and not start
        ):
            return [local]
        step = tensor(call).stride(0)  # type: ignore[union-attr]
        return [self.emit(torch.as_strided, local, (self.where.held, *sizes), (int(step), *strides), start)]

    @staticmethod
    def dtype(leaf: Leaf) -> torch.dtype:
        value = tensor(leaf.source)
        assert value is not None
        return value.dtype


class SpreadBySlot(Spread, BySlot):
    """A region in which every slot is a token of its own."""

    def __init__(self, region: Region, emit: Emitter, where: Sharding, top_k: int) -> None:
        Spread.__init__(self, region, emit, where)
        self.top_k = top_k


def _differs(weight: Expr | None) -> bool:
    """Whether routing weights are anything but ones."""
    return weight is not None and not (isinstance(weight, Gate) and weight.ones and not weight.slots)


def _key(what: Expr | None, dtype: torch.dtype | None = None) -> Hashable:
    if isinstance(what, Token):
        return "token", what.source, what.width, dtype
    return "weight", None if what is None else id(what)
