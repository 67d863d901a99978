"""A computed weight as a linear combination: numbers times stacks that the graph is given, or unpacks from few bits that are not trained,
plus numbers times low-rank products ``B @ A``.

Read by what operations mean, from the weight back to the graph's inputs: sums and differences, numbers that multiply or divide, signs,
``alpha`` and ``beta``, casts, turns of the last two dimensions, copies and what is written to a copy, products in any spelling, stacks of
one expert's sum after another. Where gradients end (``detach``, no grad) is part of the meaning. Factors keep their own dtype: what a cast
rounded them to is not what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import CASTS
from moefuse.passes.graph.sharded import is_gathered, is_parameter
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.graph.stacks import row_of
from moefuse.passes.infer.state import Context
from moefuse.passes.infer.unpacking import is_unpacked
from moefuse.passes.infer.weight_parts import (
    ONE_TERM,
    OPERANDS,
    PRODUCTS_OF,
    SAME,
    Addend,
    OtherError,
    Times,
    check_plain,
    is_given,
    is_scalar,
    is_view,
    known_rank,
    leaf_of,
    looks_through,
    of_all,
    of_expert,
    operands_of,
    same_place,
    turns,
)  # fmt: skip
from moefuse.passes.ir.expr import Leaf

_DEPTH, _READS = 64, 8192
"""Operations of one reading, below each other and together: a sum may have one for each expert, a residual stream is none."""


def combination(ctx: Context, leaf: Leaf, reader: Node) -> list[Addend]:
    """A weight of experts, as ``reader`` finds it; a weight that the graph is given is one addend.

    Raises:
        OtherError: it is anything else.
    """
    if not leaf.parts:
        return _Reading(ctx, reader).read(leaf.source, Times(leaf.order), reader)
    return of_all([_Reading(ctx, reader).read(part, Times(leaf.order), reader) for part in leaf.parts], reader)


class _Reading:
    """One reading. ``grad``: whether gradients are recorded where the weight is read."""

    def __init__(self, ctx: Context, reader: Node) -> None:
        self.ctx, self.grad = ctx, ctx.mode[reader].grad
        self.left = _READS

    def read(self, value: Any, times: Times, reader: Node) -> list[Addend]:
        """The combination that a value is, when ``reader`` runs."""
        if not isinstance(value, Node):
            raise OtherError(reader, "a number is added to it")
        self.left -= 1
        if times.depth > _DEPTH or self.left < 0:
            raise OtherError(value, "it has too many terms")
        times = replace(times, depth=times.depth + 1)
        check_plain(value)
        node, call = self._made(value, reader)
        if call is None or node is None or is_gathered(node):
            return [Addend(times.scale, times.by, (leaf_of(self.ctx, value, times),))]
        if self.grad and not self.ctx.mode[node].grad:
            if call.inplace:
                raise OtherError(node, "it is written to without gradients")
            times = replace(times, detached=True)
        if call.name in SAME or turns(call):
            # A view is read with what was written below it by then, a copy with what was there when it was made.
            below = call.args[0]
            views = isinstance(below, Node) and self.ctx.storage[below] is self.ctx.storage[node] and not call.inplace
            inner = times.turned() if turns(call) else replace(times, detached=times.detached or call.name == "detach")
            return self.read(below, inner, reader if views else node)
        if (row := row_of(call)) is not None:
            views = self.ctx.storage[call.args[0]] is self.ctx.storage[node]
            wide = replace(times, order=tuple(d + 1 for d in times.order))
            return [part for addend in self.read(call.args[0], wide, reader if views else node) for part in of_expert(addend, row)]
        try:
            return self._operation(node, call, times)
        except OtherError:
            if not _is_frozen(self.ctx, node):
                raise
            return [Addend(times.scale, times.by, (leaf_of(self.ctx, node, times),))]

    def _made(self, value: Node, reader: Node) -> tuple[Node | None, Call | None]:
        """The operation whose result a value is when ``reader`` runs: its own, or the last that wrote to all of it."""
        ctx = self.ctx
        call, names = ctx.calls.get(value), ctx.memory.storages(value)
        written = [name for name in names if name in ctx.writes]
        if not written:
            return value, call
        if len(names) != 1 or ctx.memory.outlives(names[0]):
            raise OtherError(ctx.writes[written[0]][0], "it is written to in the graph")
        if call is not None and not call.inplace and looks_through(call) and is_view(ctx, value, call):
            return value, call
        last = ctx.memory.version(names[0], reader)
        if last is None:
            return value, call
        target, write = ctx.memory.targets[last], ctx.calls.get(last)
        if write is None or write.name == "setitem" or len(target) != 1 or not same_place(target[0], value) or "out" in last.kwargs:
            raise OtherError(last, "a part of it is written to, or all of it in another shape")
        return last, write

    def _operation(self, node: Node, call: Call, times: Times) -> list[Addend]:
        name, given = call.name, dict(call.kwargs)
        args = (*call.args, *(given.pop(key) for key in OPERANDS if key in given))
        if name == "copy" and call.inplace and len(args) == 2:
            return self.read(args[1], times, node)
        if name in ("add", "sub", "rsub") and len(args) == 2 and given.keys() <= {"alpha"}:
            return self._sum(node, name, args, given.get("alpha", 1), times)
        if name == "neg":
            return self.read(args[0], times.times(-1, node), node)
        if name in ("mul", "div") and len(args) == 2 and not given:
            return self._multiple(node, name, *args, times)
        if name in ("baddbmm", "addmm") and len(args) == 3 and given.keys() <= {"alpha", "beta"}:
            beta, alpha = given.get("beta", 1), given.get("alpha", 1)
            unread = isinstance(beta, int | float) and beta == 0
            base = [] if unread else self._addend(node, args[0], times.times(beta, node))
            equation = PRODUCTS_OF["bmm" if name == "baddbmm" else "mm"]
            return [*base, self._product(node, args[1:], equation, times.times(alpha, node))]
        if name in ("bmm", "mm", "matmul", "einsum") and not given:
            operands, equation = operands_of(node, name, args)
            return [self._product(node, operands, equation, times)]
        if name == "stack" and given.get("dim", args[1] if len(args) > 1 else 0) == 0 and isinstance(args[0], tuple | list):
            if known_rank(node) != 3:
                raise OtherError(node, "`stack` makes it")
            flat = replace(times, order=tuple(d - 1 for d in times.order))
            return of_all([self.read(item, flat, node) for item in args[0]], node)
        if is_given(self.ctx, node):
            return [Addend(times.scale, times.by, (leaf_of(self.ctx, node, times),))]
        raise OtherError(node, "a hook observes it" if name == "register_hook" else f"`{name}` computes it")

    def _sum(self, node: Node, name: str, args: Sequence[Any], alpha: Any, times: Times) -> list[Addend]:
        first, second = args[::-1] if name == "rsub" else args
        other = times.times(1 if name == "add" else -1, node).times(alpha, node)
        return [*self._addend(node, first, times), *self._addend(node, second, other)]

    def _addend(self, node: Node, value: Any, times: Times) -> list[Addend]:
        """One of two, if it has the shape of the sum: what is spread over experts is another matter."""
        if isinstance(value, int | float) and value == 0:
            return []  # where Python's sum begins
        known, result = tensor(value), tensor(node)
        if known is not None and result is not None and not same_shape(shape_of(known), shape_of(result)):
            raise OtherError(node, ONE_TERM)
        return self.read(value, times, node)

    def _multiple(self, node: Node, name: str, first: Any, second: Any, times: Times) -> list[Addend]:
        if name == "div":
            if not isinstance(second, int | float) or not second:
                raise OtherError(node, "it is divided by a tensor")
            return self.read(first, times.times(1 / second, node), node)
        if isinstance(first, int | float) or is_scalar(first):
            first, second = second, first
        return self.read(first, times.times(second, node), node)

    def _product(self, node: Node, operands: Sequence[Any], equation: str, times: Times) -> Addend:
        """B (out, r) @ A (r, in) of each expert, which the result has first, and an operand anywhere or not at all."""
        inputs, _, out = equation.replace(" ", "").partition("->")
        labels, rank = inputs.split(","), known_rank(node)
        expert = out[0] if rank == 3 else ""
        if len(labels) != 2 or len(out) != rank or any(len(set(part)) != len(part) for part in (*labels, out)):
            raise OtherError(node, f"`{equation}` computes it")
        outer, inner = out[times.order[0]], out[times.order[1]]
        inside = [c for c in labels[0] if c in labels[1] and c != expert]
        if len(inside) != 1 or inside[0] in out:
            raise OtherError(node, f"`{equation}` computes it")
        found: dict[str, Leaf] = {}
        for value, part in zip(operands, labels, strict=True):
            wanted = (outer, inside[0]) if outer in part else (inside[0], inner)
            if sorted(c for c in part if c != expert) != sorted(wanted):
                raise OtherError(node, f"`{equation}` computes it")
            order = tuple(part.index(c) for c in wanted)
            found[wanted[0]] = self._factor(node, value, replace(times, order=order))
        experts = {shape_of(fake(leaf.source))[leaf.along] for leaf in found.values() if leaf.stacked} if rank == 3 else set()
        if found.keys() != {outer, inside[0]} or len(experts) > 1 or (rank == 3 and not experts):
            raise OtherError(node, ONE_TERM)
        if times.detached and any(tensor(number) is not None for (number,) in times.by):
            raise OtherError(node, "a tensor scales it behind `detach`")
        leaves = tuple(self._for_all(found[c], next(iter(experts), 0)) for c in (outer, inside[0]))
        return Addend(times.scale, times.by, leaves)

    def _factor(self, node: Node, value: Any, times: Times) -> Leaf:
        """The stack behind casts and turns; what else the graph computes of a factor is computed."""
        while isinstance(value, Node):
            call = self.ctx.calls.get(value)
            check_plain(value)
            if any(name in self.ctx.writes for name in self.ctx.memory.storages(value)):
                raise OtherError(node, f"{named(value)} is written to in the graph")
            may_turn = call is not None and turns(call) and min(times.order) == known_rank(value) - 2
            if call is not None and (call.name in CASTS or may_turn) and not call.inplace and self._records(value):
                value, times = call.args[0], times.turned() if may_turn else times
                continue
            if known_rank(node) == 3 and known_rank(value) == 2:
                return Leaf(value, False, None, times.order, detached=times.detached)
            return leaf_of(self.ctx, value, times)
        raise OtherError(node, "a number is a factor of it")

    def _records(self, node: Node) -> bool:
        """Whether gradients go through an operation as they do where the weight is read."""
        return not self.grad or self.ctx.mode[node].grad

    def _for_all(self, leaf: Leaf, experts: int) -> Leaf:
        """One matrix for all experts, as a list of it."""
        shared = bool(experts) and not leaf.stacked
        return replace(leaf, parts=(leaf.source,) * experts) if shared else leaf


def stack_of_sums(ctx: Context, node: Node, reader: Node) -> bool:
    """Whether a computed tensor is a stack of weights that the graph is given, and low-rank terms."""
    if known_rank(node) != 3:
        return False
    try:
        found = combination(ctx, Leaf(node, True, None, (1, 2)), reader)
    except OtherError:
        return False
    bases = [a.leaves[0].source for a in found if len(a.leaves) == 1]
    if not low_rank(found) or len(bases) != 1 or not (is_parameter(bases[0]) or is_given(ctx, bases[0]) or _is_frozen(ctx, bases[0])):
        return False
    # Rows [batch, length, features] that an adapter was added to look the same, but for the batch that their A has not.
    return all(leaf.stacked for a in found for leaf in a.leaves) or is_parameter(bases[0])


def _is_frozen(ctx: Context, node: Node) -> bool:
    """Whether a weight is unpacked from few bits that nobody trains."""
    known = tensor(node)
    return known is not None and not known.requires_grad and is_unpacked(ctx, node)


def low_rank(found: Sequence[Addend]) -> bool:
    """Whether anything of a combination is a product."""
    return any(len(a.leaves) == 2 for a in found)
