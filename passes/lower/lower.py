"""Lowering a region: one fused op when a template describes the expert, grouped GEMMs around the user's own pointwise code otherwise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.builder import Emitter
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.sizes import same, shape_of
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
from moefuse.passes.ir.regions import Region, Weightless
from moefuse.passes.lower import held
from moefuse.passes.lower.layout import in_layout
from moefuse.passes.lower.operands import Operands
from moefuse.passes.lower.specs import dtype_of, fused_spec, grouped_spec
from moefuse.passes.lower.terms import bias, terms
from moefuse.passes.match.templates import Body, one_op
from moefuse.spec import ExpertsSpec, Tier, op_gating


@dataclass(frozen=True, eq=False)
class Lowered:
    """A region's new value and what it is."""

    result: Node
    spec: ExpertsSpec
    tier: Tier


class Lowering(Operands):
    """Builds the replacement of one region in front of the node behind its anchor."""

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
        mine, theirs = shape_of(fake(result)), shape_of(fake(base))
        if len(mine) == len(theirs) == 2 and same(mine[1], theirs[1]) and not same(mine[0], theirs[0]):
            # Behind a graph break nobody knows that there are as many rows as tokens: those behind the last token stay as they are.
            rows, tokens = (self.emit(torch.ops.aten.sym_size.int, node, 0) for node in (base, result))
            rest = self.emit(torch.Tensor.new_zeros, result, (self.emit(operator.sub, rows, tokens), mine[1]))
            return self.emit(torch.add, self.emit(torch.cat, [result, rest]), base)
        return self.emit(torch.add, self.reshaped(result, base), base)

    def over(self, result: Node, base: Node) -> Node:
        """The experts' rows where a token chose one, the old ones elsewhere."""
        ids = self.ids()
        chosen = self.emit(torch.bitwise_and, self.emit(torch.ge, ids, 0), self.emit(torch.lt, ids, self.region.all_experts))
        width = shape_of(fake(result))[-1]
        return self.emit(torch.where, self.emit(torch.any, chosen, -1, keepdim=True), result, self.matrix(base, width))

    def either(self) -> Lowered:
        """One op if a template describes the expert, else grouped products around its own code."""
        body = one_op(self.region.expr, fake(self.region.value).device, self.region.trained)
        return self.fused(body) if body is not None and self.takes(body) else self.grouped()

    def takes(self, body: Body) -> bool:
        """Whether one op takes an expert: what its low-rank terms are made of is in floating point."""
        return not any(self.is_coded(leaf) for p in body.projections if p is not None for t in p.terms for leaf in (t.a, t.b))

    def is_coded(self, leaf: Leaf) -> bool:
        """Whether weights are read as they are held, in few bits."""
        return leaf.held is not None

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

    # -- tier 1

    def fused(self, body: Body) -> Lowered:
        """One op."""
        dtype = computed_in(self.region.expr) or dtype_of(body.first.weight)
        x = self.kept_tokens(body.token, dtype)
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
        op, more = self.op()
        factors, scales = terms(self, body)
        codes, encodings = self.codes(body)
        if encodings and op is not torch.ops.moefuse.experts.default:
            raise held.UnsupportedError("they are on several ranks")
        if not scales and not encodings:
            return op, [], more
        given = {"scales": scales, "encodings": encodings}
        beside = [*(factors or [[]] * 6), codes]
        return torch.ops.moefuse.experts_extended.default, beside, {name: value for name, value in given.items() if value}

    def codes(self, body: Body) -> tuple[list[Node], list[str]]:
        """What belongs to the storage of each projection, and how each is held; nothing where all are weights in floating point."""
        return held.codes(self, body)

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
                return self.multiplied(self._input(expr), offsets, expr.weight)
            case ExpertVector():
                count = self.emit(torch.ops.aten.sym_size.int, order, 0)
                return self.emit(torch.ops.moefuse.expert_rows.default, self.vectors(expr.vector), offsets, count)
            case SharedVector():
                return self.shared(expr.source)
            case Slice():
                index = (Ellipsis, slice(expr.start, expr.start + expr.step * (expr.length - 1) + 1, expr.step))
                return self.emit(operator.getitem, self.rows(expr.child), index)
            case Cast():
                return self.emit(torch.Tensor.to, self.rows(expr.child), expr.dtype)
            case Op(name="add", args=(Linear() as product, ExpertVector() as vector), kwargs=()) if self._has_bias(product, vector):
                return self.multiplied(self._input(product), offsets, product.weight, self.vectors(vector.vector))
            case Op(name="dropout", args=(child, probability, True)):
                return self.dropped(self.rows(child), float(probability))
            case Op():
                options = {k: self.rows(v) for k, v in expr.kwargs}
                return self.emit(function_of(expr.name, options), *(self.rows(a) for a in expr.args), **options)
        raise TypeError(f"cannot lower {type(expr).__name__}")

    def dropped(self, rows: Node, probability: float) -> Node:
        """Sorted rows, each element of which is dropped or kept."""
        return self.emit(torch.dropout, rows, probability, True)

    def _input(self, product: Linear) -> Node:
        """What a product is of, in the dtype that it computes in."""
        child: Node = self.rows(product.child)
        value, dtype = tensor(child), computed_in(product) or dtype_of(product.weight)
        return self.emit(torch.Tensor.to, child, dtype) if value is not None and value.dtype != dtype else child

    def _has_bias(self, product: Linear, vector: ExpertVector) -> bool:
        """Whether a product and what is added to it are one operation in the program, and can be one here."""
        call, bias = call_of(product.node), [tensor(v) for v in (vector.vector.parts or (vector.vector.source,))]
        dtype = computed_in(product) or dtype_of(product.weight)
        plain = product.weight.held is None and product.weight.stacked is vector.vector.stacked
        return plain and call is not None and call.name == "linear" and all(b is not None and b.dtype == dtype for b in bias)

    def multiplied(self, rows: Node, offsets: Node, leaf: Leaf, bias: Sequence[Node] = ()) -> Node:
        """Sorted rows times each expert's weights."""
        if leaf.held is not None:
            return held.multiplied(self, rows, offsets, leaf, leaf.held)
        return self.emit(torch.ops.moefuse.grouped_linear.default, rows, offsets, self.stack(leaf), list(bias))

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
