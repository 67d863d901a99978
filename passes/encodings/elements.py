"""Following single elements of a tensor back through the graph, to the numbers of its inputs that they are computed from.

Nothing here compares shapes or knows how a library unpacks: a view says by its strides where its elements stand, a copy (``stack``,
``repeat_interleave``) which elements of what it copies, and an operation that is pointwise is left as it is. So the cost goes by how many
elements are asked for, not by how large the weights are, and what an element is made of can be computed for it alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings import moves
from moefuse.passes.encodings.batch import Batch
from moefuse.passes.encodings.memory import Coords, Strided, onto, ravel
from moefuse.passes.encodings.pointwise import POINTWISE, applied
from moefuse.passes.encodings.terms import Const, Read, Term, UnreadError, bits, cast
from moefuse.passes.graph.calls import Call, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import RowNumber

_STEPS, _PIECES = 400, 64
"""Most operations on the way of one element, and most ways that elements of one tensor go."""


class Elements:
    """The trees of a batch of elements, all of which go the same way.

    Raises:
        UnreadError: of every method, where an operation is not read.
        moves.ApartError: of every method, where they go several ways.
    """

    def __init__(self, ctx: Context, batch: Batch) -> None:
        self.ctx, self.batch, self.steps = ctx, batch, 0

    def term(self, node: Node, coords: Coords, at: int) -> Term:
        """What elements of a node's tensor are, as a reader at position ``at`` finds them."""
        self.steps += 1
        if self.steps > _STEPS:
            raise UnreadError(node, "is one of too many operations")
        own, root = Strided(node), self.ctx.storage[node]
        if root in self.ctx.memory.reshaped:
            raise UnreadError(node, "changes its sizes in place")
        shown = self._by_row(node)
        if shown is not None:
            row = row_of(self.ctx, shown, self.batch.rows)
            assert row is not None
            there = coords if shown is node else self._there(Strided(shown), own.place(coords))
            return bits(node, self.indexed(shown, *row, there), own.dtype)
        if root.op in ("placeholder", "get_attr") or root in self.batch.given:
            return self._input(node, own, root, coords)
        writes = [w for w in self.ctx.writes.get(root, ()) if self.ctx.position[w] < at]
        if writes:
            return self._written(own, root, coords, writes)
        if root is node or not isinstance(tensor(root), Tensor):
            return self.made(node, self.call(node), coords)
        base = Strided(root)
        return bits(node, self.made(root, self.call(root), self._there(base, own.place(coords))), own.dtype)

    def call(self, node: Node) -> Call:
        """The operation of a node."""
        call = self.ctx.calls[node]
        if call is None:
            raise UnreadError(node, "is no operation")
        return call

    def of(self, node: Node, coords: Coords, user: Node) -> Term:
        """Elements of an argument, as the operation ``user`` finds them."""
        return self.term(node, coords, self.ctx.position[user])

    def made(self, node: Node, call: Call, coords: Coords) -> Term:
        """What elements of the result of an operation are."""
        if call.name in POINTWISE:
            return applied(self, node, call, coords)
        move = moves.MOVES.get(call.name)
        if move is None:
            raise UnreadError(node, "is none of the operations that are read")
        return move(self, node, call, coords)

    def indexed(self, node: Node, x: Node, row: Node, coords: Coords) -> Term:
        """Elements of the matrix that a program takes out of a stack for the expert that stands for all, or that a slot chose."""
        if self.batch.expert is None:
            raise UnreadError(node, f"takes an expert's weights by `{row}`")
        lead = len(coords) - len(Strided(x).sizes) + 1
        if self.batch.slots is not None and not torch.equal(ravel(coords[:lead], Strided(row).sizes, self.batch.count), self.batch.slots):
            raise UnreadError(node, "takes weights that another slot chose")
        return self.of(x, (self.batch.expert, *coords[lead:]), node)

    def every(self, node: Node, count: int, user: Node) -> Term:
        """All elements of a tensor of one dimension."""
        return Elements(self.ctx, Batch(count, fixed=self.batch.fixed)).of(node, (torch.arange(count),), user)

    def _by_row(self, node: Node) -> Node | None:
        """The nearest of the views that a node is one of, the node included, that is one expert's part of a stack."""
        while row_of(self.ctx, node, self.batch.rows) is None:
            before = [n for n in node.all_input_nodes if self.ctx.storage[n] is self.ctx.storage[node]]
            if len(before) != 1:
                return None
            node = before[0]
        return node

    def _input(self, node: Node, own: Strided, root: Node, coords: Coords) -> Term:
        writes = self.ctx.writes.get(root)
        if writes:
            raise UnreadError(writes[0], f"writes to {named(root)}, which holds weights")
        base = Strided(root)
        places = self._wide(own.place(coords)) - base.first
        fixed = self.batch.fixed(root)
        if fixed is not None:
            return bits(node, Const(moves.memory_of(fixed)[places]), own.dtype)
        return bits(node, Read(root, places, base.dtype), own.dtype)

    def _written(self, own: Strided, root: Node, coords: Coords, writes: list[Node]) -> Term:
        """What was written last where elements stand."""
        places = self._wide(own.place(coords))
        for write in reversed(writes):
            targets = [t for t in self.ctx.memory.targets[write] if root in self.ctx.memory.storages(t)]
            if len(targets) != 1:
                raise UnreadError(write, "writes to several tensors")
            inside, there = Strided(targets[0]).at(places)
            call = self.call(write)
            if call.name == "setitem":
                within, there = moves.slot(write, call.args[1], there, Strided(targets[0]).sizes)
                inside = inside & within
            if inside.all():
                return bits(write, self._value(write, call, targets[0], there), own.dtype)
            if inside.any():
                raise moves.ApartError(inside.long())
        return bits(root, self.made(root, self.call(root), self._there(Strided(root), places)), own.dtype)

    def _value(self, write: Node, call: Call, target: Node, coords: Coords) -> Term:
        """What a write puts at ``coords``."""
        dtype = Strided(target).dtype
        if call.name in ("setitem", "copy", "fill"):
            value = call.args[2 if call.name == "setitem" else 1]
            if isinstance(value, bool | int | float):
                return Const(torch.full((self.batch.count,), value, dtype=dtype))
            if not isinstance(value, Node):
                raise UnreadError(write, "writes what is no tensor")
            return cast(write, self.of(value, onto(coords, Strided(value).sizes), write), dtype)
        if call.name == "zero":
            return Const(torch.zeros(self.batch.count, dtype=dtype))
        if call.name not in POINTWISE:
            raise UnreadError(write, "is no write that is read")
        return applied(self, write, call, coords)

    def _there(self, base: Strided, places: Tensor) -> Coords:
        inside, coords = base.at(self._wide(places))
        if not inside.all():
            raise UnreadError(base.node, "is read beside what it holds")
        return coords

    def _wide(self, places: Tensor) -> Tensor:
        return places.expand(self.batch.count)


def ways(ctx: Context, node: Node, coords: Coords, batch: Batch, at: int) -> list[tuple[Tensor, Term]]:
    """The elements of a batch by the ways that they go: (their numbers in the batch, their tree).

    Raises:
        UnreadError: an operation on the way is not read.
    """
    found: list[tuple[Tensor, Term]] = []
    open_ = [torch.arange(batch.count)]
    while open_:
        which = open_.pop(0)
        expert, slots = (None if of is None else of[which] for of in (batch.expert, batch.slots))
        part = replace(batch, count=len(which), expert=expert, slots=slots)
        try:
            found.append((which, Elements(ctx, part).term(node, tuple(c[which] for c in coords), at)))
        except moves.ApartError as apart:
            if len(found) + len(open_) > _PIECES:
                raise UnreadError(node, "is put together of too many pieces") from apart
            open_ += [which[apart.group == g] for g in apart.group.unique()]
    return found


def row_of(ctx: Context, node: Node, rows: frozenset[Node]) -> tuple[Node, Node] | None:
    """The stack and the number, where a node is one expert's part of a stack, by a number that stands for every expert's."""
    call = ctx.calls[node]
    if call is None or call.name not in ("getitem", "select", "index_select") or not isinstance(call.args[0], Node):
        return None
    if call.name != "getitem" and call.args[1] != 0:
        return None
    index = call.args[1 if call.name == "getitem" else 2]
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, Node) and is_number(ctx, index, rows):
        return call.args[0], index
    return None


def is_number(ctx: Context, node: Node, rows: frozenset[Node]) -> bool:
    """Whether a tensor is the number of an expert that stands for all."""
    return node in rows or isinstance(ctx.number(node), RowNumber)


def expert_stack(ctx: Context, node: Node, rows: frozenset[Node]) -> int | None:
    """How many experts there are, where a node is computed from one expert's part of stacks; None where it is not."""
    seen, open_ = {node}, [node]
    while open_ and len(seen) < _STEPS:
        here = open_.pop()
        found = row_of(ctx, here, rows)
        if found is not None:
            return Strided(found[0]).sizes[0]
        new = [n for n in here.all_input_nodes if n not in seen]
        new += [w for w in ctx.writes.get(ctx.storage[here], ()) if w not in seen and w is not here]
        seen.update(new)
        open_ += new
    return None


__all__ = ["Elements", "expert_stack", "is_number", "row_of", "ways"]
