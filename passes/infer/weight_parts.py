"""What a linear combination of weights is made of: its addends, what they are multiplied with, and single steps of reading one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import CASTS, COPIES
from moefuse.passes.graph.sizes import same_shape, shape_of
from moefuse.passes.graph.stacks import row_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.anti_unify import DifferError, common_leaf
from moefuse.passes.ir.expr import Leaf
from moefuse.passes.ir.expr_algebra import size
from moefuse.passes.ir.lowrank import is_number

SAME = COPIES | CASTS | {"positive"}
"""Operations that are their first argument, but for its dtype, its memory, or where its gradient ends."""

ONE_TERM = "all experts have one and the same term"
"""Why a sum that is spread over experts is made."""

PRODUCTS_OF = {"bmm": "bij,bjk->bik", "mm": "ij,jk->ik"}


OPERANDS = ("other", "mat1", "mat2", "batch1", "batch2")
"""Names of operands, in their order."""


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
class Times:
    """What a part of the combination is multiplied with, and its view: ``order`` holds the dims of its last two that are (out, in)."""

    order: tuple[int, ...]
    scale: float = 1.0
    by: tuple[tuple[Node, ...], ...] = ()
    detached: bool = False
    depth: int = 0

    def times(self, number: Any, node: Node) -> Times:
        if isinstance(number, int | float):
            return replace(self, scale=self.scale * number)
        if not is_scalar(number):
            raise OtherError(node, "it is multiplied with a tensor")
        return replace(self, by=(*self.by, (number,)))

    def turned(self) -> Times:
        return replace(self, order=(self.order[1], self.order[0]))


def known_rank(value: Any) -> int:
    """Dimensions of a node's tensor; 0 if it is none."""
    known = tensor(value)
    return 0 if known is None else known.dim()


def is_scalar(value: Any) -> bool:
    return isinstance(value, Node) and is_number(fake(value))


def operands_of(node: Node, name: str, args: Sequence[Any]) -> tuple[Sequence[Any], str]:
    """The operands of a product of two, and its equation."""
    given = args[1:] if name == "einsum" else args
    given = tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given
    ranks = [known_rank(a) for a in given]
    equation = args[0] if name == "einsum" else PRODUCTS_OF.get(name)
    if name == "matmul" and not set(ranks) - {2, 3}:
        left, right = ("bij" if ranks[0] == 3 else "ij"), ("bjk" if ranks[-1] == 3 else "jk")
        equation = f"{left},{right}->{'bik' if 3 in ranks else 'ik'}"
    if len(given) != 2 or not isinstance(equation, str) or "->" not in equation or "." in equation:
        raise OtherError(node, f"`{name}` computes it")
    return given, equation


def check_plain(node: Node) -> None:
    """Refuse what is no matrix of floats for each expert, or of one."""
    known = tensor(node)
    if known is None or known.dim() not in (2, 3) or not known.dtype.is_floating_point or known.dtype.itemsize < 2:
        raise OtherError(node, f"{named(node)} is no weight")


def leaf_of(ctx: Context, node: Node, times: Times) -> Leaf:
    """A stack as it is, or one expert's matrix: of its own, or out of a stack."""
    if known_rank(node) == 3:
        return Leaf(node, True, None, times.order, detached=times.detached)
    call = ctx.calls.get(node)
    row = None if call is None else row_of(call)
    if call is None or row is None:
        return Leaf(node, False, None, times.order, detached=times.detached)
    return Leaf(call.args[0], True, row, tuple(d + 1 for d in times.order), detached=times.detached)


def of_expert(addend: Addend, expert: int) -> list[Addend]:
    """One expert's part of a combination of stacks; nothing where it has none of this addend."""
    if any(expert in leaf.zeros for leaf in addend.leaves):
        return []
    by = tuple(n if len(n) == 1 else (n[expert],) for n in addend.by)
    return [replace(addend, leaves=tuple(_one(leaf, expert) for leaf in addend.leaves), by=by)]


def _one(leaf: Leaf, expert: int) -> Leaf:
    if leaf.parts:
        return replace(leaf, source=leaf.parts[expert], parts=(), zeros=frozenset())
    return replace(leaf, expert=expert, zeros=frozenset())


def is_given(ctx: Context, node: Node) -> bool:
    """Whether a computed node is a view of what the graph is given."""
    return all(ctx.memory.outlives(name) for name in ctx.memory.storages(node))


def of_all(found: list[list[Addend]], node: Node) -> list[Addend]:
    """One combination of stacks, of the combinations of the single experts, their weights first.

    An expert may have fewer terms than others: those that it lacks are zeros.
    """
    if len({sum(len(a.leaves) == 1 for a in addends) for addends in found}) > 1:
        raise OtherError(node, "experts have several numbers of weights of this size")
    ordered = [sorted(addends, key=lambda a: len(a.leaves)) for addends in found]
    most = max(map(len, ordered))
    return [_of_experts({e: a[i] for e, a in enumerate(ordered) if i < len(a)}, len(found), node) for i in range(most)]


def _of_experts(addends: dict[int, Addend], count: int, node: Node) -> Addend:
    """The addend that the experts of ``addends`` have, for ``count`` experts."""
    one = next(iter(addends.values()))
    if any((a.scale, len(a.by)) != (one.scale, len(one.by)) for a in addends.values()):
        raise OtherError(node, "experts have terms of several scales")
    ranks = {size(a.leaves[1], 0) for a in addends.values() if len(a.leaves) == 2}
    if len(ranks) > 1:
        raise OtherError(node, f"experts have adapters of several ranks, {' and '.join(map(str, sorted(ranks)))}")
    leaves = tuple(_stacked({e: a.leaves[i] for e, a in addends.items()}, count, node) for i in range(len(one.leaves)))
    by = tuple(tuple(n for (n,) in numbers) for numbers in zip(*(addends.get(e, one).by for e in range(count)), strict=True))
    return replace(one, leaves=leaves, by=tuple(n[:1] if len(set(n)) == 1 else n for n in by))


def _stacked(leaves: dict[int, Leaf], count: int, node: Node) -> Leaf:
    """The experts' matrices in the order of the experts; all of a stack, where they come out of one."""
    if len({leaf.detached for leaf in leaves.values()}) != 1:
        raise OtherError(node, "gradients end at some experts")
    try:
        found = common_leaf([*leaves.values()], [*leaves])
    except DifferError as differ:
        raise OtherError(node, f"expert {differ.expert} differs: {differ.detail}") from differ
    if found.stacked and shape_of(fake(found.source))[found.along] != count:
        raise OtherError(node, f"it has some experts of {named(found.source)}")
    parts = () if found.stacked else tuple(leaves[e].source if e in leaves else found.source for e in range(count))
    zeros = frozenset(range(count)).difference(leaves)
    return replace(found, parts=parts, detached=next(iter(leaves.values())).detached, zeros=zeros)


def looks_through(call: Call) -> bool:
    return call.name in SAME or turns(call) or row_of(call) is not None


def is_view(ctx: Context, value: Node, call: Call) -> bool:
    return isinstance(call.args[0], Node) and ctx.storage[call.args[0]] is ctx.storage[value]


def same_place(first: Node, second: Node) -> bool:
    """Whether two tensors of one storage are the same elements in the same order."""
    one, two = tensor(first), tensor(second)
    if one is None or two is None or not same_shape(shape_of(one), shape_of(two)) or one.dtype != two.dtype:
        return False
    return one.stride() == two.stride() and one.storage_offset() == two.storage_offset()


def turns(call: Call) -> bool:
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
    name = call.args[1] if call.name == "getattr" else call.name
    return name == "mT" or (name in ("t", "T") and rank == 2)
