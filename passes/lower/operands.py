"""What the ops of a replacement are given: ids, tokens, routing weights and expert weights, in the shapes that they take."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import product, same, same_shape, shape_of
from moefuse.passes.ir.evaluate import flat_shapes
from moefuse.passes.ir.expr import Expr, Gate, Leaf, SlotWeight, Token
from moefuse.passes.ir.facts import Routing
from moefuse.passes.ir.lowrank import is_number
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.ids_outside import placed


class Operands:
    """Puts what one region reads in front of the node behind its anchor; each value once."""

    def __init__(self, region: Region, emit: Emitter) -> None:
        self.region, self.emit = region, emit
        self.memo: dict[int, Any] = {}

    def ids(self) -> Node:
        """[T, K]."""
        routing = self.region.routing
        if routing.columns is not None:
            return self.once(routing, lambda: self.for_each(self.left(routing.node, routing.columns, routing.top_k)))
        if routing.kept is not None:
            return self.once(routing, lambda: self.for_each(self.weighted(routing)))
        if routing.valid is not None:
            return self.once(routing, lambda: self.for_each(self.allowed(routing)))
        return self.once(routing, lambda: self.for_each(self.rows_of_ids(routing)))

    def rows_of_ids(self, routing: Routing) -> Node:
        """[T, K]: the ids as the program has them, those of no expert where the ops leave them out as it does."""
        value, means = tensor(routing.node), self.region.outside
        plain = value is not None and value.dim() == 2 and routing.has_slots and len(routing.tokens) == 1
        ids = routing.node if plain else self.emit(torch.reshape, routing.node, (-1, routing.top_k))
        return ids if means is None else placed(self.emit, ids, means, routing.bounds, self.region.all_experts)

    def for_each(self, rows: Node) -> Node:
        """Rows for every token, where tokens share one."""
        shared, result = self.region.routing.shared, tensor(self.region.value)
        if not shared or result is None:
            return rows
        lead = shape_of(result)[:-1]
        if not same_shape(lead[-len(shared) :], shared):
            raise ValueError(f"{shared} tokens share ids, and the result has tokens {lead}")
        return self.repeated(rows, self.product_of(self.sizes(lead)[-len(shared) :]))

    def repeated(self, rows: Node, count: Any) -> Node:
        """[n * count, width]: every row so many times."""
        width = shape_of(fake(rows))[1]
        wide = self.emit(torch.Tensor.expand, self.emit(torch.unsqueeze, rows, 1), -1, count, -1)
        return self.emit(torch.reshape, wide, (-1, width))

    def product_of(self, sizes: list[Any]) -> Any:
        """The product of sizes that are numbers or nodes."""
        known = math.prod(s for s in sizes if isinstance(s, int))
        rest = [s for s in sizes if not isinstance(s, int)]
        out: Any = known if known != 1 or not rest else rest.pop()
        for s in rest:
            out = self.emit(operator.mul, out, s)
        return out

    def left(self, mask: Node, columns: int | None, top_k: int) -> Node:
        """[T, K]: where each slot's 1 stands in a mask, -1 where it has none."""
        mask = self.emit(torch.Tensor.to, self.emit(torch.reshape, mask, (-1, top_k, columns)), torch.int64)
        return self.emit(torch.where, self.emit(torch.any, mask, -1), self.emit(torch.argmax, mask, -1), -1)

    def weighted(self, routing: Routing) -> Node:
        """[T, K]: the ids, and -1 where an entry of the table leaves the slot without expert."""
        ids = self.emit(torch.Tensor.to, self.rows_of_ids(routing), torch.int64)
        assert routing.kept is not None
        by_slot = routing.by_slot
        width = routing.top_k if by_slot else shape_of(fake(routing.kept))[-1]
        entry = self.matrix(routing.kept, width)
        entry = entry if by_slot else self.emit(torch.gather, entry, 1, self.within(ids))
        left = self.emit(torch.ne, entry, 0) if routing.above is None else self.emit(torch.gt, entry, routing.above)
        return self.emit(torch.where, left, ids, -1)

    def allowed(self, routing: Routing) -> Node:
        """[T, K]: the ids, and -1 where the token or the slot is not valid."""
        ids, valid = self.rows_of_ids(routing), tensor(routing.valid)
        slots = valid is not None and same(product(shape_of(valid)), routing.num_tokens * routing.top_k)
        return self.emit(torch.where, self.emit(torch.reshape, routing.valid, (-1, routing.top_k if slots else 1)), ids, -1)

    def within(self, ids: Node) -> Node:
        """Ids to read a table by; what a slot without expert reads there is weighted nowhere."""
        count = self.region.num_experts
        known = self.region.routing.whole and self.region.routing.within(count)
        return ids if known else self.emit(torch.clamp, ids, min=0, max=count - 1)

    def once(self, key: Any, build: Callable[[], Node]) -> Node:
        if id(key) not in self.memo:
            self.memo[id(key)] = (build(), key)
        return self.memo[id(key)][0]  # type: ignore[no-any-return]

    def matrix(self, node: Node, width: int) -> Node:
        """A tensor as [tokens, width]."""
        value = tensor(node)
        flat = value is not None and value.dim() == 2 and shape_of(value)[-1] == width
        return node if flat else self.emit(torch.reshape, node, (-1, width))

    def tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        """[T, width] in ``dtype``."""
        node = self.matrix(token.source, token.width)
        value = tensor(node)
        return self.emit(torch.Tensor.to, node, dtype) if dtype is not None and value is not None and value.dtype != dtype else node

    def kept_tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        """The same for an op that keeps them for backward, where the program keeps rows that it gathered of them."""
        rows = self.tokens(token, dtype)
        theirs = token.source in self.region.shown and self.region.domain not in ("masked", "dense")
        return self.emit(torch.ops.moefuse.own.default, rows) if theirs and self.region.trained else rows

    def slot_weights(self, weight: Expr | None) -> Node:
        """[T, K] routing weights of the chosen experts."""
        top_k = self.region.routing.top_k
        if isinstance(weight, SlotWeight) or (isinstance(weight, Gate) and weight.slots):
            rows = self.for_each(self.matrix(weight.source, top_k))
            return self.emit(torch.ops.moefuse.own.default, rows) if weight.source in self.region.shown else rows
        if isinstance(weight, Gate) and not weight.ones:
            table = self.for_each(self.table(weight))
            ids = self.emit(torch.Tensor.to, self.ids(), torch.int64)
            return self.emit(torch.gather, table, 1, self.within(ids))
        return self.emit(torch.ones_like, self.ids(), dtype=torch.float32)

    def table(self, weight: Gate) -> Node:
        """[T, E] of routing weights, E of the table: a region may be some of its experts."""
        value = tensor(weight.source)
        shape = shape_of(value) if value is not None and value.dim() > 1 else (self.region.num_experts,)
        if not weight.turned:
            return self.matrix(weight.source, shape[-1])
        rows = weight.source if len(shape) == 2 else self.emit(torch.reshape, weight.source, (shape[0], -1))
        return self.emit(torch.transpose, rows, 0, 1)

    def stack(self, leaf: Leaf) -> list[Node]:
        """A projection as the ops take it: [[E, out, in]] or E times [out, in]; a transposed view where it is stored the other way."""
        sources = self.sources(leaf) if leaf.held is None else self.storages(leaf)
        if leaf.stacked and leaf.along and not leaf.zeros:
            return [self.emit(torch.permute, s, (leaf.along, *leaf.order)) for s in sources]
        if list(leaf.order) == sorted(leaf.order):
            return sources
        return [self.emit(torch.transpose, s, -2, -1) for s in sources]

    def vectors(self, leaf: Leaf | None) -> list[Node]:
        """[[E, n]] or E times [n]; dimensions of size one between them, which a batched product needs, are left out."""
        if leaf is None:
            return []
        if leaf.parts and all(is_number(fake(part)) for part in leaf.parts):
            return [self.emit(torch.unsqueeze, self.numbers(leaf), 1)]
        lead = () if self.apart(leaf) else (self.here(),)
        return [self.flat(source, lead) for source in self.sources(leaf)]

    def numbers(self, leaf: Leaf, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Node:
        """[E]: a number for each expert, in a dtype and on a device if these are given."""
        if tensor(leaf.parts[0]) is None:
            value = fake(self.region.value)
            how = {"dtype": dtype or value.dtype, "device": device or value.device}
            return self.emit(torch.stack, [self.emit(torch.scalar_tensor, part, **how) for part in leaf.parts])
        found = self.emit(torch.stack, list(leaf.parts))
        return found if dtype in (None, fake(found).dtype) else self.emit(torch.Tensor.to, found, dtype)

    def shared(self, source: Node) -> Node:
        """One tensor, or number, for all experts."""
        return source

    def apart(self, leaf: Leaf) -> bool:
        """Whether there is a tensor for each expert."""
        return bool(leaf.parts)

    def here(self) -> int:
        """Experts whose weights the ops are given."""
        return self.region.num_experts

    def flat(self, source: Node, lead: tuple[int, ...]) -> Node:
        """[*lead, n]."""
        value = tensor(source)
        if value is None or value.dim() <= len(lead) + 1:
            return source
        return self.emit(torch.reshape, source, (*lead, shape_of(value)[-1]))

    def sources(self, leaf: Leaf) -> list[Node]:
        """What a leaf reads: one stack, or a tensor for each expert."""
        found = self.attached(leaf)
        return [self.emit(torch.detach, source) for source in found] if leaf.detached else found

    def attached(self, leaf: Leaf) -> list[Node]:
        if leaf.zeros:
            return self.with_zeros(leaf)
        if leaf.parts:
            return list(leaf.parts)
        value, count, along = tensor(leaf.source), self.region.num_experts, leaf.along
        longer = self.region.rest is not None and value is not None and shape_of(value)[along] != count
        return [self.emit(torch.narrow, leaf.source, along, 0, count) if longer else leaf.source]

    def with_zeros(self, leaf: Leaf) -> list[Node]:
        """A tensor for each expert, one and the same of zeros for those that have none."""
        there = {e: leaf.parts[e] for e in range(len(leaf.parts)) if e not in leaf.zeros}
        if leaf.stacked:
            there = {e: self.emit(torch.select, leaf.source, leaf.along, e) for e in range(self.region.num_experts) if e not in leaf.zeros}
        zeros = self.emit(torch.zeros_like, next(iter(there.values())))
        return [there.get(e, zeros) for e in range(self.region.num_experts)]

    def storage(self, nodes: list[Node]) -> list[Node]:
        """What holds weights in few bits has no gradients: nor has it in the program, whose operator has none."""
        return [self.emit(torch.detach, n) if fake(n).requires_grad else n for n in nodes]

    def storages(self, leaf: Leaf) -> list[Node]:
        """What holds the weights, in two dimensions (and one of experts): a view where the program has it in one."""
        nodes = self.storage(self.sources(leaf))
        if leaf.held is None or leaf.held.shape is None:
            return nodes
        return [self.emit(torch.reshape, n, flat_shapes(leaf.held)[0]) for n in nodes]

    def reshaped(self, node: Node, like: Node) -> Node:
        """``node`` in the shape of ``like``."""
        mine, theirs = tensor(node), tensor(like)
        if mine is None or theirs is None or same_shape(shape_of(mine), shape_of(theirs)):
            return node
        return self.emit(torch.reshape, node, tuple(self.sizes(shape_of(theirs))))

    def sizes(self, wanted: tuple[Any, ...]) -> list[Any]:
        """Leading sizes as arguments: numbers, or sizes of a leaf."""
        return [s if isinstance(s, int) else self.size(s) for s in wanted]

    def size(self, wanted: Any) -> Node:
        for source in self.region.leaves:
            value = tensor(source)
            for i, size in enumerate(shape_of(value) if value is not None else ()):
                if same(size, wanted):
                    return self.emit(torch.ops.aten.sym_size.int, source, i)
        raise ValueError(f"no input of the region has a dimension of the size {wanted}")

    def out_dtype(self) -> torch.dtype | None:
        value = tensor(self.region.value)
        return value.dtype if value is not None else None
