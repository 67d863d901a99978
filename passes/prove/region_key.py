"""When two regions are the same but for the values of their weights: then one verification speaks for both.

The same are their slices, node by node: operations, constants, and which node reads which, replacement included. What a slice reads counts
by size, dtype, strides and shared storage; integers and masks, which the verification takes as they are, by their values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sharded import is_root
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.backward_slice import SMALL, Older
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import Cast, ExpertVector, Expr, Gate, Leaf, Linear, Op, SharedVector, Slice, SlotWeight, Token, computed_in
from moefuse.passes.ir.regions import Region
from moefuse.passes.prove.surroundings import Around

_SMALL_BYTES = 2**20
"""Integers of more bytes are equal to themselves only."""


def signature(
    ctx: Context,
    region: Region,
    new_nodes: Sequence[Node],
    tier: str,
    known: Mapping[Node, Any] | None = None,
    assumptions: Sequence[Assumption] = (),
) -> Hashable:
    """Equal for regions with equal structure, sizes, dtypes and spelling. Arguments as of :func:`moefuse.passes.prove.verify.verify`."""
    around, form, routing = Around(ctx, region, new_nodes), _Form(ctx, region, known or {}), region.routing
    for node in (*around.before, *new_nodes):
        form.add(node)
    rest = None if region.rest is None else (region.rest.numbers, form.of(region.rest.expr))
    bodies = [a for a in assumptions if a.row_node is not None and not a.nodes.isdisjoint(region.nodes)]
    return (
        tier,
        region.domain,
        (
            routing.top_k,
            routing.columns,
            routing.above,
            routing.by_slot,
            routing.has_slots,
            tuple(map(str, routing.shared)),
            form.number(routing.node),
        ),
        tuple(None if node is None else form.number(node) for node in (routing.kept, routing.valid)),
        region.per_slot,
        region.replaced,
        region.trained,
        region.num_experts,
        None if region.base is None else form.number(region.base),
        form.of(region.expr),
        rest,
        tuple(form.number(n) for n in (region.anchor, *around.holders, *around.kept)),
        tuple(form.body(a) for a in bodies),
        tuple(form.entries),
    )


class _Form:
    """Nodes by numbers, in the order in which they are met. ``entries``: what each of them is."""

    def __init__(self, ctx: Context, region: Region, known: Mapping[Node, Any]) -> None:
        self.ctx, self.known, self._older = ctx, known, Older(ctx, region)
        self._drawn = {*region.routing.sources, *((region.base,) if region.base is not None else ())}
        self.numbers: dict[Node, int] = {}
        self.storages: dict[Node, int] = {}
        self.entries: list[Hashable] = []
        self._memo: dict[int, int] = {}

    def add(self, node: Node) -> None:
        """A node of the region or of its replacement."""
        entry = node.target, self._value(node.args), self._value(node.kwargs), self.ctx.mode.get(node)
        self.numbers[node] = len(self.numbers)
        self.entries.append(entry)

    def number(self, node: Node) -> int:
        """The number of a node; one from outside of the region is described when it is met first."""
        if node not in self.numbers:
            # Another name of one value: an equal view, or the result of an earlier layer in place of what it replaced.
            node = self.ctx.now(node)
        if node not in self.numbers:
            entry = self._outside(node)
            self.numbers[node] = len(self.numbers)
            self.entries.append(entry)
        return self.numbers[node]

    def _outside(self, node: Node) -> Hashable:
        value = tensor(node)
        if value is None:
            held = fake(node)
            # A size that only the run knows has another name in every layer.
            return type(held).__name__, str(getattr(getattr(held, "node", None), "hint", held))
        storage = self.ctx.storage.get(node, node)
        shared = self.storages.setdefault(storage, len(self.storages))
        facts = _tensor(node), tuple(str(s) for s in value.stride()), shared
        counts = not value.dtype.is_floating_point and node not in self._drawn
        return (*facts, self._integers(node)) if counts else facts

    def _integers(self, node: Node) -> Hashable:
        """The values of integers, or the steps that make them."""
        if is_root(node):
            return _digest(self.known.get(node))
        steps = self._older.steps(node, SMALL)
        if steps is None:
            return None
        place = {n: f"%{i}" for i, n in enumerate(steps)}
        return tuple(
            _digest(self.known.get(n)) if is_root(n) else (n.target, str(torch.fx.node.map_arg((n.args, n.kwargs), place.__getitem__)))
            for n in steps
        )

    def _value(self, value: Any) -> Hashable:
        """An argument: nodes by their numbers, constants by value."""
        if isinstance(value, Node):
            return "node", self.number(value)
        if isinstance(value, tuple | list):
            return type(value).__name__, tuple(map(self._value, value))
        if isinstance(value, dict):
            return tuple((k, self._value(v)) for k, v in value.items())
        if isinstance(value, slice):
            return "slice", self._value((value.start, value.stop, value.step))
        return type(value).__name__, str(value)

    def body(self, a: Assumption) -> Hashable:
        """The body of a loop that stands for several experts."""
        inside = tuple(sorted(self.numbers[n] for n in a.nodes if n in self.numbers))
        siblings = tuple((self.number(n), m, self.number(s)) for n, same in a.siblings.items() for m, s in same.items())
        carried = tuple(self.numbers.get(n, -1) if isinstance(n, Node) else str(n) for _, *pair in a.carried for n in pair)
        return a.members, a.row, inside, siblings, carried

    def _leaf(self, leaf: Leaf) -> Hashable:
        held = None if leaf.held is None else (leaf.held.how, *map(self._leaf, leaf.held.leaves))
        return leaf.stacked, leaf.order, leaf.zeros, held, tuple(self.number(n) for n in leaf.nodes)

    def of(self, expr: Any) -> Hashable:
        """An expression."""
        if not isinstance(expr, Expr):
            return type(expr).__name__, str(expr)
        if id(expr) in self._memo:
            return "again", self._memo[id(expr)]
        self._memo[id(expr)] = len(self._memo)
        children = tuple(self.of(c) for c in expr.children)
        match expr:
            case Token():
                return "token", expr.width, expr.by_slot, self.number(expr.source)
            case SlotWeight():
                return "slot", self.number(expr.source)
            case SharedVector():
                return "shared", self.number(expr.source)
            case Gate():
                return "gate", expr.slots, expr.ones, expr.turned, self.number(expr.source)
            case Linear():
                return "linear", computed_in(expr), self._leaf(expr.weight), children
            case ExpertVector():
                return "vector", self._leaf(expr.vector)
            case Slice():
                return "slice", expr.start, expr.step, expr.length, expr.of, children
            case Cast():
                return "cast", expr.dtype, children
            case Op():
                constants = tuple(str(a) for a in (*expr.args, *expr.kwargs) if not isinstance(a, Expr) and not isinstance(a, tuple))
                options = tuple((k, None if isinstance(v, Expr) else str(v)) for k, v in expr.kwargs)
                return "op", expr.name, constants, options, children
        return type(expr).__name__


def _digest(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        return str(value)
    if value.dtype.is_floating_point:
        return value.dtype
    if value.numel() * value.element_size() > _SMALL_BYTES:
        return id(value)
    return hashlib.sha256(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _tensor(node: Node) -> Hashable:
    value = tensor(node)
    return (tuple(str(s) for s in shape_of(value)), value.dtype, value.device) if value is not None else None
