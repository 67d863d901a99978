"""A computed weight as a linear combination: numbers times stacks that the graph is given, plus numbers times low-rank products ``B @ A``.

Read by what operations mean, from the weight back to the graph's inputs: sums and differences, numbers that multiply or divide, signs,
``alpha`` and ``beta``, casts, turns of the last two dimensions, copies and what is written to a copy, products in any spelling, stacks of
one expert's sum after another. Where gradients end (``detach``, no grad) is part of the meaning. Factors keep their own dtype: what a cast
rounded them to is not what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.op_classes import CASTS, COPIES
from moefuse.passes.graph.sharded import is_gathered
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.anti_unify import DifferError, common_leaf
from moefuse.passes.ir.expr import Leaf
from moefuse.passes.ir.lowrank import is_number

SAME = COPIES | CASTS | {"positive"}
"""Operations that are their first argument, but for its dtype, its memory, or where its gradient ends."""

ONE_TERM = "all experts have one and the same term"
"""Why a sum that is spread over experts is made."""

_PRODUCTS = {"bmm": "bij,bjk->bik", "mm": "ij,jk->ik"}


_OPERANDS = ("other", "mat1", "mat2", "batch1", "batch2")
"""Names of operands, in their order."""

_DEPTH, _READS = 64, 8192
"""Operations of one reading, below each other and together: a sum may have one for each expert, a residual stream is none."""


@dataclass(frozen=True, eq=False)
class Addend:
    """``scale`` times ``by`` times a weight (out, in), or times B (out, r) @ A (r, in).

    ``by``: numbers that the graph computes; several of them in one place are each expert's.
    """

    scale: float
    by: tuple[tuple[Node, ...], ...]
    leaves: tuple[Leaf, ...]


class OtherError(Exception):
    """What is at ``node`` is no linear combination. The text says why, to the user."""

    def __init__(self, node: Node, why: str) -> None:
        super().__init__(why)
        self.node, self.why = node, why


@dataclass(frozen=True)
class _Times:
    """What a part of the combination is multiplied with, and its view: ``order`` holds the dims of its last two that are (out, in)."""

    order: tuple[int, ...]
    scale: float = 1.0
    by: tuple[tuple[Node, ...], ...] = ()
    detached: bool = False
    depth: int = 0

    def times(self, number: Any, node: Node) -> _Times:
        if isinstance(number, int | float):
            return replace(self, scale=self.scale * number)
        if not _is_number(number):
            raise OtherError(node, "it is multiplied with a tensor")
        return replace(self, by=(*self.by, (number,)))

    def turned(self) -> _Times:
        return replace(self, order=(self.order[1], self.order[0]))


def known_rank(value: Any) -> int:
    """Dimensions of a node's tensor; 0 if it is none."""
    known = tensor(value)
    return 0 if known is None else known.dim()


def _is_number(value: Any) -> bool:
    return isinstance(value, Node) and is_number(fake(value))


def combination(ctx: Context, leaf: Leaf, reader: Node) -> list[Addend]:
    """A weight of experts, as ``reader`` finds it; a weight that the graph is given is one addend.

    Raises:
        OtherError: it is anything else.
    """
    if not leaf.parts:
        return _Reading(ctx, reader).read(leaf.source, _Times(leaf.order), reader)
    return _common([_Reading(ctx, reader).read(part, _Times(leaf.order), reader) for part in leaf.parts], reader)


class _Reading:
    """One reading. ``grad``: whether gradients are recorded where the weight is read."""

    def __init__(self, ctx: Context, reader: Node) -> None:
        self.ctx, self.grad = ctx, ctx.mode[reader][0]
        self.left = _READS

    def read(self, value: Any, times: _Times, reader: Node) -> list[Addend]:
        """The combination that a value is, when ``reader`` runs."""
        if not isinstance(value, Node):
            raise OtherError(reader, "a number is added to it")
        self.left -= 1
        if times.depth > _DEPTH or self.left < 0:
            raise OtherError(value, "it has too many terms")
        times = replace(times, depth=times.depth + 1)
        _plain(value)
        node, call = self._made(value, reader)
        if call is None or node is None:
            return [Addend(times.scale, times.by, (_leaf(self.ctx, value, times),))]
        if self.grad and not self.ctx.mode[node][0]:
            if call.inplace:
                raise OtherError(node, "it is written to without gradients")
            times = replace(times, detached=True)
        if call.name in SAME or _turns(call):
            # A view is read with what was written below it by then, a copy with what was there when it was made.
            below = call.args[0]
            views = isinstance(below, Node) and self.ctx.storage[below] is self.ctx.storage[node] and not call.inplace
            inner = times.turned() if _turns(call) else replace(times, detached=times.detached or call.name == "detach")
            return self.read(below, inner, reader if views else node)
        if (row := _row(call)) is not None:
            views = self.ctx.storage[call.args[0]] is self.ctx.storage[node]
            wide = replace(times, order=tuple(d + 1 for d in times.order))
            return [_of(addend, row) for addend in self.read(call.args[0], wide, reader if views else node)]
        return self._operation(node, call, times)

    def _made(self, value: Node, reader: Node) -> tuple[Node | None, Call | None]:
        """The operation whose result a value is when ``reader`` runs: its own, or the last that wrote to all of it."""
        ctx = self.ctx
        call, names = ctx.calls.get(value), ctx.memory.storages(value)
        written = [name for name in names if name in ctx.writes]
        if not written:
            return value, call
        if len(names) != 1 or ctx.memory.outlives(names[0]):
            raise OtherError(ctx.writes[written[0]][0], "it is written to in the graph")
        if call is not None and not call.inplace and _looks_through(call) and _views(ctx, value, call):
            return value, call
        last = ctx.memory.version(names[0], reader)
        if last is None:
            return value, call
        target = ctx.memory.targets[last]
        if len(target) != 1 or not _same_place(target[0], value) or "out" in last.kwargs:
            raise OtherError(last, "a part of it is written to")
        return last, ctx.calls.get(last)

    def _operation(self, node: Node, call: Call, times: _Times) -> list[Addend]:
        name, given = call.name, dict(call.kwargs)
        args = (*call.args, *(given.pop(key) for key in _OPERANDS if key in given))
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
            equation = _PRODUCTS["bmm" if name == "baddbmm" else "mm"]
            return [*base, self._product(node, args[1:], equation, times.times(alpha, node))]
        if name in ("bmm", "mm", "matmul", "einsum") and not given:
            operands, equation = _operands(node, name, args)
            return [self._product(node, operands, equation, times)]
        if name == "stack" and given.get("dim", args[1] if len(args) > 1 else 0) == 0 and isinstance(args[0], tuple | list):
            if known_rank(node) != 3:
                raise OtherError(node, "`stack` makes it")
            flat = replace(times, order=tuple(d - 1 for d in times.order))
            return _common([self.read(item, flat, node) for item in args[0]], node)
        if _given(self.ctx, node):
            return [Addend(times.scale, times.by, (_leaf(self.ctx, node, times),))]
        raise OtherError(node, f"`{name}` computes it")

    def _sum(self, node: Node, name: str, args: Sequence[Any], alpha: Any, times: _Times) -> list[Addend]:
        first, second = args[::-1] if name == "rsub" else args
        other = times.times(1 if name == "add" else -1, node).times(alpha, node)
        return [*self._addend(node, first, times), *self._addend(node, second, other)]

    def _addend(self, node: Node, value: Any, times: _Times) -> list[Addend]:
        """One of two, if it has the shape of the sum: what is spread over experts is another matter."""
        if isinstance(value, int | float) and value == 0:
            return []  # where Python's sum begins
        known, result = tensor(value), tensor(node)
        if known is not None and result is not None and not same_shape(shape_of(known), shape_of(result)):
            raise OtherError(node, ONE_TERM)
        return self.read(value, times, node)

    def _multiple(self, node: Node, name: str, first: Any, second: Any, times: _Times) -> list[Addend]:
        if name == "div":
            if not isinstance(second, int | float) or not second:
                raise OtherError(node, "it is divided by a tensor")
            return self.read(first, times.times(1 / second, node), node)
        if isinstance(first, int | float) or _is_number(first):
            first, second = second, first
        return self.read(first, times.times(second, node), node)

    def _product(self, node: Node, operands: Sequence[Any], equation: str, times: _Times) -> Addend:
        """B (out, r) @ A (r, in) of each expert. In the equation the expert comes first, where an operand has one."""
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
            if sorted(part.removeprefix(expert)) != sorted(wanted):
                raise OtherError(node, f"`{equation}` computes it")
            order = tuple(part.index(c) for c in wanted)
            found[wanted[0]] = self._factor(node, value, replace(times, order=order))
        experts = {shape_of(fake(leaf.source))[0] for leaf in found.values() if leaf.stacked} if rank == 3 else set()
        if found.keys() != {outer, inside[0]} or len(experts) > 1 or (rank == 3 and not experts):
            raise OtherError(node, ONE_TERM)
        if times.detached and any(tensor(number) is not None for (number,) in times.by):
            raise OtherError(node, "a tensor scales it behind `detach`")
        leaves = tuple(self._for_all(found[c], next(iter(experts), 0)) for c in (outer, inside[0]))
        return Addend(times.scale, times.by, leaves)

    def _factor(self, node: Node, value: Any, times: _Times) -> Leaf:
        """The stack behind casts and turns; what else the graph computes of a factor is computed."""
        while isinstance(value, Node):
            call = self.ctx.calls.get(value)
            _plain(value)
            if any(name in self.ctx.writes for name in self.ctx.memory.storages(value)):
                raise OtherError(node, f"`{value.name}` is written to in the graph")
            if call is not None and (call.name in CASTS or _turns(call)) and not call.inplace and self._records(value):
                value, times = call.args[0], times.turned() if _turns(call) else times
                continue
            if known_rank(node) == 3 and known_rank(value) == 2:
                return Leaf(value, False, None, times.order, detached=times.detached)
            return _leaf(self.ctx, value, times)
        raise OtherError(node, "a number is a factor of it")

    def _records(self, node: Node) -> bool:
        """Whether gradients go through an operation as they do where the weight is read."""
        return not self.grad or self.ctx.mode[node][0]

    def _for_all(self, leaf: Leaf, experts: int) -> Leaf:
        """One matrix for all experts, as a list of it."""
        shared = bool(experts) and not leaf.stacked
        return replace(leaf, parts=(leaf.source,) * experts) if shared else leaf


def _operands(node: Node, name: str, args: Sequence[Any]) -> tuple[Sequence[Any], str]:
    """The operands of a product of two, and its equation."""
    given = args[1:] if name == "einsum" else args
    given = tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    ranks = [known_rank(a) for a in given]
    equation = args[0] if name == "einsum" else _PRODUCTS.get(name)
    if name == "matmul" and not set(ranks) - {2, 3}:
        left, right = ("bij" if ranks[0] == 3 else "ij"), ("bjk" if ranks[-1] == 3 else "jk")
        equation = f"{left},{right}->{'bik' if 3 in ranks else 'ik'}"
    if len(given) != 2 or not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise OtherError(node, f"`{name}` computes it")
    return given, equation


def _plain(node: Node) -> None:
    """Refuse what is no matrix of floats for each expert, or of one."""
    known = tensor(node)
    if known is None or known.dim() not in (2, 3) or not known.dtype.is_floating_point or known.dtype.itemsize < 2:
        raise OtherError(node, f"`{node.name}` is no weight")
    if is_gathered(node):
        raise OtherError(node, "it is sharded over processes")


def _leaf(ctx: Context, node: Node, times: _Times) -> Leaf:
    """A stack as it is, or one expert's matrix: of its own, or out of a stack."""
    if known_rank(node) == 3:
        return Leaf(node, True, None, times.order, detached=times.detached)
    call = ctx.calls.get(node)
    row = None if call is None else _row(call)
    if call is None or row is None:
        return Leaf(node, False, None, times.order, detached=times.detached)
    return Leaf(call.args[0], True, row, tuple(d + 1 for d in times.order), detached=times.detached)


def _row(call: Call) -> int | None:
    """The expert whose matrix an operation takes out of a stack; None for any other."""
    if call.name not in ("getitem", "select") or known_rank(call.args[0]) != 3:
        return None
    index = call.args[1] if call.name == "getitem" else call.args[2] if call.args[1] == 0 else None
    count = shape_of(fake(call.args[0]))[0]
    if not isinstance(index, int) or isinstance(index, bool) or not isinstance(count, int):
        return None
    return index % count


def _of(addend: Addend, expert: int) -> Addend:
    """One expert's part of a combination of stacks."""
    by = tuple(n if len(n) == 1 else (n[expert],) for n in addend.by)
    return replace(addend, leaves=tuple(_one(leaf, expert) for leaf in addend.leaves), by=by)


def _one(leaf: Leaf, expert: int) -> Leaf:
    if leaf.parts:
        return replace(leaf, source=leaf.parts[expert], parts=())
    return replace(leaf, expert=expert)


def _given(ctx: Context, node: Node) -> bool:
    """Whether a computed node is a view of what the graph is given."""
    return all(ctx.memory.outlives(name) for name in ctx.memory.storages(node))


def _common(found: list[list[Addend]], node: Node) -> list[Addend]:
    """One combination of stacks, of the combinations of the single experts."""
    first = found[0]
    if any(len(other) != len(first) for other in found):
        raise OtherError(node, "experts have several numbers of terms")
    out = []
    for addends in zip(*found, strict=True):
        one = addends[0]
        if any((a.scale, len(a.by), len(a.leaves)) != (one.scale, len(one.by), len(one.leaves)) for a in addends):
            raise OtherError(node, "experts have terms of several scales")
        try:
            leaves = tuple(_stacked([a.leaves[i] for a in addends], node) for i in range(len(one.leaves)))
        except DifferError as differ:
            raise OtherError(node, differ.detail) from differ
        by = tuple(tuple(n for (n,) in numbers) for numbers in zip(*(a.by for a in addends), strict=True))
        out.append(replace(one, leaves=leaves, by=tuple(n[:1] if len(set(n)) == 1 else n for n in by)))
    return out


def _stacked(leaves: list[Leaf], node: Node) -> Leaf:
    """The experts' matrices in the order of the experts; all of a stack, where they come out of one."""
    found = common_leaf(leaves, list(range(len(leaves))))
    if len({leaf.detached for leaf in leaves}) != 1:
        raise OtherError(node, "gradients end at some experts")
    if found.stacked and shape_of(fake(found.source))[0] != len(leaves):
        raise OtherError(node, f"it has some experts of `{found.source.name}`")
    return replace(found, detached=leaves[0].detached)


def _looks_through(call: Call) -> bool:
    return call.name in SAME or _turns(call) or _row(call) is not None


def _views(ctx: Context, value: Node, call: Call) -> bool:
    return isinstance(call.args[0], Node) and ctx.storage[call.args[0]] is ctx.storage[value]


def _same_place(first: Node, second: Node) -> bool:
    """Whether two tensors of one storage are the same elements in the same order."""
    one, two = tensor(first), tensor(second)
    if one is None or two is None or not same_shape(shape_of(one), shape_of(two)) or one.dtype != two.dtype:
        return False
    return one.stride() == two.stride() and one.storage_offset() == two.storage_offset()


def _turns(call: Call) -> bool:
    """Whether an operation exchanges the last two dimensions, of two or three."""
    rank = known_rank(call.args[0]) if call.args else 0
    if rank not in (2, 3) or call.inplace:
        return False
    args = (*call.args, *(call.kwargs[key] for key in ("dim0", "dim1", "dims") if key in call.kwargs))
    if call.name == "transpose" and len(args) == 3:
        return {d % rank for d in args[1:]} == {rank - 2, rank - 1}
    if call.name == "permute":
        dims = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        return [d % rank for d in dims] == [*range(rank - 2), rank - 1, rank - 2]
    return call.name == "mT" or (call.name in ("t", "T") and rank == 2)


def stack_of_sums(ctx: Context, node: Node, reader: Node) -> bool:
    """Whether a computed tensor is a stack of weights that the graph is given, and low-rank terms."""
    if known_rank(node) != 3:
        return False
    try:
        found = combination(ctx, Leaf(node, True, None, (1, 2)), reader)
    except OtherError:
        return False
    bases = [a.leaves[0].source for a in found if len(a.leaves) == 1]
    if not low_rank(found) or len(bases) != 1 or not _given(ctx, bases[0]):
        return False
    # Rows [batch, length, features] that an adapter was added to look the same, but for the batch that their A has not.
    return all(leaf.stacked for a in found for leaf in a.leaves) or isinstance(fake(bases[0]), torch.nn.Parameter)


def low_rank(found: Sequence[Addend]) -> bool:
    """Whether anything of a combination is a product."""
    return any(len(a.leaves) == 2 for a in found)
