"""Lowering a region: one fused op when a template describes the expert, grouped GEMMs around the user's own pointwise code otherwise."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import product, same, same_shape, shape_of
from moefuse.passes.ir.evaluate import function_of
from moefuse.passes.ir.expr import (
    Cast,
    ExpertVector,
    Expr,
    Gate,
    Leaf,
    Linear,
    Op,
    SharedVector,
    Slice,
    SlotWeight,
    Token,
    computed_in,
    held_leaves,
    walk,
)
from moefuse.passes.ir.expr_algebra import factors, is_weight, one_weight
from moefuse.passes.ir.facts import Routing
from moefuse.passes.ir.lowrank import is_number
from moefuse.passes.ir.regions import Region, Weightless
from moefuse.passes.lower import held
from moefuse.passes.lower.layout import in_layout
from moefuse.passes.lower.specs import dtype_of, fused_spec, grouped_spec
from moefuse.passes.lower.terms import bias, terms
from moefuse.passes.match.ids_outside import placed
from moefuse.passes.match.templates import Body, one_op
from moefuse.spec import ExpertsSpec, Tier, op_gating


@dataclass(frozen=True, eq=False)
class Lowered:
    """A region's new value and what it is."""

    result: Node
    spec: ExpertsSpec
    tier: Tier


class Lowering:
    """Builds the replacement of one region in front of the node behind its anchor."""

    def __init__(self, region: Region, emit: Emitter) -> None:
        self.region, self.emit = region, emit
        self.memo: dict[int, Any] = {}

    def run(self) -> Lowered:
        """Insert the new nodes; the graph's old ones are left alone."""
        lowered = self.rows_by_slot() if self.region.by_slot else self.either()
        result = lowered.result
        if self.region.rest is not None:
            result = self.emit(torch.add, result, Everywhere(self.region, self.emit).weightless(self.region.rest, result))
        if self.region.base is not None:
            result = (self.over if self.region.replaced else self.added)(result, self.region.base)
        result = in_layout(self.emit, self.reshaped(result, self.region.value), self.region.value)
        return Lowered(result, lowered.spec, lowered.tier)

    def added(self, result: Node, base: Node) -> Node:
        return self.emit(torch.add, self.reshaped(result, base), base)

    def over(self, result: Node, base: Node) -> Node:
        """The experts' rows where a token chose one, the old ones elsewhere."""
        ids = self.ids()
        chosen = self.emit(torch.bitwise_and, self.emit(torch.ge, ids, 0), self.emit(torch.lt, ids, self.region.all_experts))
        width = shape_of(fake(result))[-1]
        return self.emit(torch.where, self.emit(torch.any, chosen, -1, keepdim=True), result, self.matrix(base, width))

    def either(self) -> Lowered:
        """One op if a template describes the expert, else grouped products around its own code."""
        body = one_op(self.region.expr, fake(self.region.value).device)
        return self.grouped() if body is None or held.is_beside_terms(self, body) else self.fused(body)

    def rows_by_slot(self) -> Lowered:
        """The same with T*K tokens of one slot each; then the sum over the slots of a token, unless each is a result."""
        region, top_k = self.region, self.region.routing.top_k
        if region.rest is not None:
            raise ValueError("some experts have no weights, and each slot has a row of its own")
        ids = self.emit(torch.reshape, self.ids(), (-1, 1))
        routing = replace(
            region.routing,
            node=ids,
            tokens=(region.routing.num_tokens * top_k,),
            top_k=1,
            has_slots=True,
            columns=None,
            shared=(),
            kept=None,
            valid=None,
        )
        lowered = self.by_slot(replace(region, routing=routing, outside=None), top_k).either()
        result = lowered.result
        if not region.per_slot:
            width = shape_of(fake(result))[-1]
            result = self.emit(torch.sum, self.emit(torch.reshape, result, (-1, top_k, width)), 1)
        return Lowered(result, replace(lowered.spec, top_k=top_k), lowered.tier)

    def by_slot(self, region: Region, top_k: int) -> Lowering:
        """The lowering in which every slot is a token."""
        return BySlot(region, self.emit, top_k)

    # -- shared pieces

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
        """[T, K]: the ids, and -1 where the table's entry leaves the slot without expert."""
        ids = self.emit(torch.Tensor.to, self.rows_of_ids(routing), torch.int64)
        entry = self.emit(torch.gather, routing.kept, 1, self.within(ids))
        return self.emit(torch.where, self.emit(torch.gt if routing.above else torch.ne, entry, 0), ids, -1)

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

    def slot_weights(self, weight: Expr | None) -> Node:
        """[T, K] routing weights of the chosen experts."""
        top_k = self.region.routing.top_k
        if isinstance(weight, SlotWeight) or (isinstance(weight, Gate) and weight.slots):
            rows = self.for_each(self.matrix(weight.source, top_k))
            return self.emit(torch.ops.moefuse.own.default, rows) if weight.source in self.region.shown else rows
        if isinstance(weight, Gate) and not weight.ones:
            table = self.for_each(self.matrix(weight.source, self.columns(weight.source)))
            ids = self.emit(torch.Tensor.to, self.ids(), torch.int64)
            return self.emit(torch.gather, table, 1, self.within(ids))
        return self.emit(torch.ones_like, self.ids(), dtype=torch.float32)

    def columns(self, table: Node) -> Any:
        """How many experts a table of routing weights has: a region may be some of them."""
        value = tensor(table)
        return self.region.num_experts if value is None or value.dim() < 2 else shape_of(value)[-1]

    def stack(self, leaf: Leaf) -> list[Node]:
        """A projection as the ops take it: [[E, out, in]] or E times [out, in]; a transposed view where it is stored the other way."""
        sources = self.sources(leaf) if leaf.held is None else held.storages(self, leaf)
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

    # -- tier 1

    def fused(self, body: Body) -> Lowered:
        """One op."""
        dtype = computed_in(self.region.expr) or dtype_of(body.first.weight)
        x = self.tokens(body.token, dtype)
        up = body.up
        op, beside, more = self.call_of(body)
        result = self.emit(
            op,
            x,
            self.ids(),
            self.slot_weights(body.weight),
            self.stack(body.first.weight),
            self.stack(up.weight) if up is not None else [],
            self.stack(body.last.weight),
            bias(self, body.first),
            bias(self, up) if up is not None else [],
            bias(self, body.last),
            *beside,
            activation=body.activation,
            activation_args=list(body.arguments),
            gating=op_gating(body.gating),
            up_first=body.up_first,
            weight_on_input=body.weight_on_input,
            out_dtype=self.out_dtype() if self.out_dtype() != dtype else None,
            **more,
        )
        return Lowered(result, replace(fused_spec(self.region, body), encoding=held.described(body, self.region.unrounded)), "fused")

    def call_of(self, body: Body) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """The fused op, and what it takes behind the lists of ``moefuse::experts`` and by name."""
        found = held.held_call(self, body)
        if found is not None:
            return found
        op, more = self.op()
        factors, scales = terms(self, body)
        return (torch.ops.moefuse.experts_lora.default, factors, {"scales": scales}) if scales else (op, factors, more)

    def op(self) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The fused op, and what it takes beside the arguments of ``moefuse::experts``."""
        return torch.ops.moefuse.experts.default, {}

    # -- tier 2

    def grouped(self) -> Lowered:
        """permute, grouped_linear, the user's own operations, combine."""
        expr, region = self.region.expr, self.region
        found = factors(expr)
        weights = [f for f in found if is_weight(f)]
        single, weight = one_weight(weights)
        rest = [f for f in found if not is_weight(f)]
        outside = bool(single and weights and rest)
        rows = self.product(rest) if outside else self.rows(expr)
        value = tensor(rows)
        if value is not None and shape_of(value)[-1] == 1 and not any(isinstance(e, Linear) for e in walk(expr)):
            raise ValueError("the contribution of an expert has no features")
        order, offsets = self.order()
        result = self.emit(
            torch.ops.moefuse.combine.default,
            rows,
            self.slot_weights(weight) if outside and not (isinstance(weight, Gate) and weight.ones) else None,
            order,
            offsets,
            region.routing.top_k,
            out_dtype=self.out_dtype(),
        )
        spec = grouped_spec(region)
        return Lowered(
            result, replace(spec, encoding=held.listed(held_leaves(expr), region.unrounded)) if held_leaves(expr) else spec, "grouped"
        )

    def product(self, terms: list[Expr]) -> Node:
        out: Node = self.rows(terms[0])
        for t in terms[1:]:
            out = self.emit(torch.mul, out, self.rows(t))
        return out

    def permuted(self) -> Node:
        token = next(e for e in walk(self.region.expr) if isinstance(e, Token))
        return self.once(
            self.region,
            lambda: self.emit(torch.ops.moefuse.permute.default, self.tokens(token, None), self.ids(), self.here()),
        )

    def order(self) -> tuple[Node, Node]:
        pair = self.permuted()
        return (
            self.once("order", lambda: self.emit(operator.getitem, pair, 1)),
            self.once("offsets", lambda: self.emit(operator.getitem, pair, 2)),
        )

    def rows(self, expr: Any) -> Any:
        """The value of an expression for all slots sorted by expert, [S, features]."""
        return self.once(expr, lambda: self._rows(expr)) if isinstance(expr, Expr) else expr

    def _rows(self, expr: Expr) -> Any:
        order, offsets = self.order()
        match expr:
            case Token():
                return self._token_rows(expr, order)
            case SlotWeight() | Gate():
                flat = self.emit(torch.reshape, self.slot_weights(expr), (-1, 1))
                return self.emit(torch.index_select, flat, 0, order)
            case Linear():
                child = self.rows(expr.child)
                value, dtype = tensor(child), computed_in(expr) or dtype_of(expr.weight)
                if value is not None and value.dtype != dtype:
                    child = self.emit(torch.Tensor.to, child, dtype)
                return self.multiplied(child, offsets, expr.weight)
            case ExpertVector():
                count = self.emit(torch.ops.aten.sym_size.int, order, 0)
                return self.emit(torch.ops.moefuse.expert_rows.default, self.vectors(expr.vector), offsets, count)
            case SharedVector():
                return expr.source
            case Slice():
                index = (Ellipsis, slice(expr.start, expr.start + expr.step * (expr.length - 1) + 1, expr.step))
                return self.emit(operator.getitem, self.rows(expr.child), index)
            case Cast():
                return self.emit(torch.Tensor.to, self.rows(expr.child), expr.dtype)
            case Op():
                options = {k: self.rows(v) for k, v in expr.kwargs}
                return self.emit(function_of(expr.name, options), *(self.rows(a) for a in expr.args), **options)
        raise TypeError(f"cannot lower {type(expr).__name__}")

    def multiplied(self, rows: Node, offsets: Node, leaf: Leaf) -> Node:
        """Sorted rows times each expert's weights."""
        if leaf.held is not None:
            return held.multiplied(self, rows, offsets, leaf, leaf.held)
        return self.emit(torch.ops.moefuse.grouped_linear.default, rows, offsets, self.stack(leaf), [])

    def _token_rows(self, token: Token, order: Node) -> Node:
        first = next(e for e in walk(self.region.expr) if isinstance(e, Token))
        if token.source is first.source and token.width == first.width:
            return self.once("rows", lambda: self.emit(operator.getitem, self.permuted(), 0))
        index = self.once("tokens", lambda: self.emit(torch.floor_divide, order, self.region.routing.top_k))
        return self.emit(torch.index_select, self.tokens(token, None), 0, index)


class BySlot(Lowering):
    """A region in which every slot is a token of its own."""

    def __init__(self, region: Region, emit: Emitter, top_k: int) -> None:
        super().__init__(region, emit)
        self.top_k = top_k

    def tokens(self, token: Token, dtype: torch.dtype | None) -> Node:
        """[T*K, width]: rows of the slots, or each token's row once for every slot of it."""
        node = super().tokens(token, dtype)
        return node if token.by_slot else self.repeated(node, self.top_k)

    def slot_weights(self, weight: Expr | None) -> Node:
        if isinstance(weight, Gate) and not weight.ones and not weight.slots:
            raise ValueError("the routing weights are a table, and each slot has a row of its own")
        return super().slot_weights(weight)


class Everywhere(Lowering):
    """Expressions of a token alone, for every token in place."""

    def order(self) -> tuple[Any, Any]:
        return None, None

    def _token_rows(self, token: Token, order: Any) -> Node:
        return self.tokens(token, None)

    def weightless(self, rest: Weightless, like: Node) -> Node:
        """[T, H] in the dtype of ``like``: what experts without weights add. Tokens that chose none of them get an exact zero."""
        ids = self.ids()
        found = self.emit(torch.bitwise_and, self.emit(torch.ge, ids, rest.numbers.start), self.emit(torch.lt, ids, rest.numbers.stop))
        (weight,) = (f for f in factors(rest.expr) if isinstance(f, SlotWeight))
        share = self.emit(torch.sum, self.emit(torch.where, found, self.slot_weights(weight), 0.0), -1, keepdim=True)
        rows = self.emit(torch.mul, self.product([f for f in factors(rest.expr) if f is not weight]), share)
        rows = self.emit(torch.where, self.emit(torch.any, found, -1, keepdim=True), rows, 0.0)
        value, wanted = tensor(rows), tensor(like)
        if value is None or wanted is None or value.dtype == wanted.dtype:
            return rows
        return self.emit(torch.Tensor.to, rows, wanted.dtype)
