"""A weight as a node of a graph: which dimensions are what, who reads it, and everything that it is computed by."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor
from torch.fx import Node

from moefuse.passes.encodings.elements import expert_stack, is_number
from moefuse.passes.encodings.memory import Coords, Strided, unravel
from moefuse.passes.encodings.places import Sample
from moefuse.passes.encodings.terms import UnreadError
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import shape_of, size_of
from moefuse.passes.infer.state import Context

_MOST = 96
"""Most operations that a weight is computed by, its inputs included."""
_PRIMES = (5, 9)
"""Where the primes begin that stand for unknown sizes."""


@dataclass(frozen=True)
class Weight:
    """A node that is a weight, and how it is asked for.

    Attributes:
        order: the dimensions that are features and inputs, in front of them that of the experts where it has all.
        reader: who reads it, where it is written to in place; else its first reader.
        rows: index tensors that hold the number of an expert for each slot. The other dimensions of the node are the slots, in their order.
        fixed: the values of inputs of the graph that never change: tables of levels, orders of groups.
        given: scales and zeros that are taken as the program computes them, as if they were inputs.
    """

    node: Node
    order: tuple[int, ...]
    reader: Node | None = None
    rows: frozenset[Node] = frozenset()
    fixed: Callable[[Node], Tensor | None] = lambda _: None
    given: frozenset[Node] = frozenset()

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions in which the slots are that choose weights."""
        return tuple(d for d in range(len(Strided(self.node).sizes)) if d not in self.order) if self.rows else ()

    def slots(self, of: Sample) -> Tensor | None:
        """Whose weights the elements of a sample are taken of: any slot's, in no order."""
        if not self.lead:
            return None
        count = torch.Size(Strided(self.node).sizes[d] for d in self.lead).numel()
        return torch.randint(max(count, 1), (len(of.e),), generator=torch.Generator("cpu").manual_seed(count))

    def coords(self, of: Sample) -> Coords:
        """The elements of the node that are in a sample of the weight."""
        sizes = Strided(self.node).sizes
        found = [torch.zeros_like(of.e)] * len(sizes)
        slots = self.slots(of)
        for dim, index in zip(self.lead, () if slots is None else unravel(slots, tuple(sizes[d] for d in self.lead)), strict=True):
            found[dim] = index
        for dim, index in zip(self.order, (of.e, of.n, of.k)[-len(self.order) :], strict=True):
            found[dim] = index
        return tuple(found)


def sizes_of(ctx: Context, weight: Weight) -> tuple[int, int, int]:
    """E, N and K; E is 1 for a matrix of one expert."""
    sizes = Strided(weight.node).sizes
    features, inputs = (sizes[d] for d in weight.order[-2:])
    if len(weight.order) == 3:
        return sizes[weight.order[0]], features, inputs
    return expert_stack(ctx, weight.node, weight.rows) or 1, features, inputs


def is_stack(ctx: Context, weight: Weight) -> bool:
    """Whether the weights of all experts are read, and not of one."""
    return len(weight.order) == 3 or expert_stack(ctx, weight.node, weight.rows) is not None


def moment(ctx: Context, weight: Weight) -> int:
    """When a weight is read: at its first reader that neither writes to it nor is a view of it."""
    if weight.reader is not None:
        return ctx.position[weight.reader]
    name = ctx.storage[weight.node]
    readers = [u for n in ctx.aliases.get(name, ()) for u in n.users if ctx.storage[u] is not name and name not in _written(ctx, u)]
    behind = [ctx.position[u] for u in readers if u in ctx.position and ctx.position[u] > ctx.position[weight.node]]
    return min(behind, default=len(ctx.position))


def _written(ctx: Context, node: Node) -> set[Node]:
    return {name for target in ctx.memory.targets.get(node, ()) for name in ctx.memory.storages(target)}


def cone(ctx: Context, weight: Weight) -> list[Node]:
    """What a weight is computed by, in the order of the program, writes in place included.

    Raises:
        UnreadError: it is a lot.
    """
    until = moment(ctx, weight)
    seen, open_ = {weight.node}, [weight.node]
    while open_:
        here = open_.pop()
        if here not in ctx.position:
            raise UnreadError(here, "is none of the program's operations")
        if here.op in ("placeholder", "get_attr") or here in weight.given or is_number(ctx, here, weight.rows):
            continue
        writes = [w for w in ctx.writes.get(ctx.storage[here], ()) if ctx.position[w] < until]
        new = [n for n in (*here.all_input_nodes, *writes) if n not in seen]
        seen.update(new)
        if len(seen) > _MOST:
            raise UnreadError(here, "is one of too many operations that the weights are computed by")
        open_ += new
    return sorted(seen, key=ctx.position.__getitem__)


def supposed(ctx: Context, weight: Weight) -> list[dict[sympy.Symbol, sympy.Symbol]]:
    """Numbers to read sizes as which the run alone knows, such as how many tokens choose a weight: what is read must not depend on them."""
    values = [value for value in map(tensor, cone(ctx, weight)) if value is not None]
    sizes = [s for value in values for s in (*shape_of(value), *map(size_of, value.stride()), size_of(value.storage_offset()))]
    unknown = sorted({symbol for size in sizes if isinstance(size, sympy.Expr) for symbol in size.free_symbols}, key=str)
    return [{symbol: sympy.Integer(sympy.prime(at + i)) for i, symbol in enumerate(unknown)} for at in _PRIMES] if unknown else [{}]


def inputs_of(nodes: list[Node], given: Collection[Node] = ()) -> list[Node]:
    """The inputs of the graph among nodes, and what counts as such."""
    return [n for n in nodes if n.op in ("placeholder", "get_attr") or n in given]


__all__ = ["Weight", "cone", "inputs_of", "is_stack", "moment", "sizes_of", "supposed"]
