"""Operators of libraries that multiply quantised weights: rows times an expert weight, as any product, whose leaf is the storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.ops.meaning.encoding import Encoding
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import counted
from moefuse.passes.graph.sizes import same, same_shape, shape_of
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context, as_size, out_shape
from moefuse.passes.ir.axes import Atom, Axes
from moefuse.passes.ir.expr import Expr, Held, Leaf, Linear
from moefuse.passes.ir.facts import Counts, Finding, Lost, Rows, View, Weight
from moefuse.passes.rules import ANY, rule
from moefuse.passes.rules.routing.absent import unwritten
from moefuse.passes.rules.routing.ids import is_integer, role_axes
from moefuse.passes.rules.rows.contraction import expert_weight, project
from moefuse.passes.rules.rows.foreign_ops import OPERATORS, Operator

_STACK, _MATRIX = 3, 2


@rule(*(ANY + name for name in OPERATORS))
def on_operator(ctx: Context, node: Node, *args: Any, **kwargs: Any) -> Finding:
    """An operator of the table, where it has rows of experts; else it is any operator."""
    call = ctx.calls[node]
    assert call is not None
    name = call.name.rpartition("::")[2]
    operator = OPERATORS[name]
    given = operator.arguments(node.target, args, kwargs)
    return None if given is None else _Product(ctx, node, name, operator, given).fact()


class _Product:
    """One call of an operator."""

    def __init__(self, ctx: Context, node: Node, name: str, operator: Operator, given: dict[str, Any]) -> None:
        self.ctx, self.node, self.name, self.operator, self.given = ctx, node, name, operator, given
        self.rows, self.storage, self.scale = given["A"], given["B"], given["Bs"]

    def fact(self) -> Any:
        """Rows of experts, why they are lost, or None where there are none."""
        found = {"one": self.by_one, "ids": self.by_ids, "ends": self.by_ends}[self.operator.by]()
        if not isinstance(found, Rows) or not isinstance(found.expr, Linear):
            return found
        if not self.ctx.given.packed:
            return self.unread("`quantised` is off")
        scale = self.scales(found.expr.weight)
        encoding = self.encoding(found.expr.weight) if isinstance(scale, Leaf) else scale
        if not isinstance(scale, Leaf) or not isinstance(encoding, Encoding):
            return encoding
        if self.operator.beyond:
            held = replace(encoding, activation=None).describe()
            return self.ctx.lost("encoding-unsupported", self.node, dtype=held, detail=f"`{self.name}`: {self.operator.beyond}")
        weight = replace(found.expr.weight, held=Held(encoding, scale))
        return replace(found, expr=replace(found.expr, weight=weight))

    def by_one(self) -> Finding:
        """Each row times the one weight that is given, a row of a stack or an expert's own."""
        rows, weight = self.ctx.fact(self.rows), self.ctx.fact(self.storage)
        lead = "abcdgh"[: len(out_shape(self.rows)) - 1]
        names = lead + "i", "oi", lead + "o"
        if not isinstance(rows, Rows | View):
            return None
        own = expert_weight(self.ctx, weight, rows, names[1], names[0], names[2], False)
        if own is None or len(own.axes) != _MATRIX or own.routing is not None or own.expert is None:
            return None
        return project(self.ctx, self.node, rows, own, *names, out_shape(self.node))

    def by_ids(self) -> Any:
        """Each row times the weight of its id."""
        rows, stack, ids = self.ctx.fact(self.rows), self.ctx.fact(self.storage), self.ctx.fact(self.given["expert_ids"])
        routing = routing_of(self.ctx, ids) if isinstance(ids, View) and is_integer(self.given["expert_ids"]) else None
        roles = role_axes(ids, routing) if routing is not None else None
        dims = _dims(stack, _STACK)
        if not isinstance(rows, Rows | View) or routing is None or roles is None or dims is None or len(roles) != 1:
            return None
        if not routing.within(_size(stack, 0)):
            if routing.bounds is None or routing.bounds[0] < 0:
                return self.ctx.lost("ids-out-of-range", self.node, detail=f"`{self.name}` leaves rows of other ids as they are in memory")
            unwritten(self.ctx, self.node)
        axes = (*roles, *((Atom("w", d, a[0].size),) for d, a in zip(dims[1:], stack.axes[1:], strict=True)))
        weight = Weight(axes, stack.root, None, routing)
        return project(self.ctx, self.node, rows, weight, "si", "soi", "so", out_shape(self.node))

    def by_ends(self) -> Finding:
        """Rows sorted by expert, of which those of an expert end where the operator is told."""
        rows, stack = self.ctx.fact(self.rows), self.ctx.fact(self.storage)
        ends, counts = (self.ctx.fact(self.given[name]) for name in ("offsets", "tokens_per_expert"))
        dims = _dims(stack, _STACK)
        if not isinstance(rows, Rows) or dims is None:
            return None
        mine = [c for c in (ends, counts) if isinstance(c, Counts) and c.first == 1 and c.routing is rows.domain.routing]
        if rows.domain.name != "sorted" or [c.ends for c in mine] != [True, False]:
            return self.ctx.lost("tokens-differ", self.node, detail="the ends are not those of the experts these rows are sorted by")
        if any(not same(c.axes[0][0].size, _size(stack, 0)) for c in mine):
            return self.ctx.lost(
                "missing-experts", self.node, detail=f"the counts are not of {counted(_size(stack, 0))} experts, as the weights are"
            )
        axes: Axes = (rows.axes[0], (Atom("f", 0, out_shape(self.node)[-1]),))
        expr: Expr = Linear(self.node, rows.expr, Leaf(stack.root, True, None, (dims[1], dims[2])))
        return Rows(axes, rows.domain, expr)

    def scales(self, weight: Leaf) -> Leaf | Lost:
        """The scales of the same experts, in their own order."""
        fact = self.ctx.fact(self.scale)
        if weight.stacked and weight.expert is not None:
            known = isinstance(fact, Weight) and fact.routing is None and fact.expert == weight.expert
            dims = [a[0].index for a in fact.axes if a] if known and all(len(a) < _MATRIX for a in fact.axes) else None
        else:
            rank = len(out_shape(self.scale)) if isinstance(self.scale, Node) else 0
            own = _dims(fact, rank)
            dims = own if own is None or not weight.stacked else list(own[1:]) if own[:1] == [0] else None
        if dims is None or (root := tensor(fact.root)) is None:
            return self.unread(f"`{self.name}` is given scales that are not of these experts")
        count, held = out_shape(weight.source)[:1], shape_of(root)[:1]
        if weight.stacked and not same_shape(count, held):
            return self.unread(f"`{self.name}` is given scales of {held[0] if held else 0} experts for {count[0]}")
        return Leaf(fact.root, weight.stacked, weight.expert, tuple(dims))

    def encoding(self, weight: Leaf) -> Encoding | Lost:
        """How the weight is held, if sizes and dtypes are what the operator takes."""
        rows, storage, scale, out = (tensor(n) for n in (self.rows, self.storage, self.scale, self.node))
        block = [as_size(size) if isinstance(size, Node) else size for size in self.given.get("block_size", ())]
        if rows is None or storage is None or scale is None or out is None or not all(isinstance(b, int) for b in block):
            return self.unread(f"`{self.name}` is given what is no tensor")
        if rows.dtype != out.dtype or self.given["output_dtype"] not in (None, out.dtype):
            return self.unread(f"`{self.name}` makes {_named(out.dtype)} of rows in {_named(rows.dtype)}")
        found = self.operator.scheme(storage, scale, block)
        if found is None:
            held = f"{_named(storage.dtype)} with scales in {_named(scale.dtype)} by blocks of {block}"
            return self.unread(f"`{self.name}` has no known meaning for {held}")
        features, inputs = found.logical(tuple(shape_of(storage)[-2:]))
        sizes, needed = shape_of(scale)[1 if self.operator.by != "one" else 0 :], found.scales(features, inputs)
        whole = not any(f % b for f, b in zip((features, inputs), found.block, strict=True) if b)
        one = found.block == (0, 0) and all(same(s, 1) for s in sizes)
        if not whole or not same(shape_of(rows)[-1], inputs) or not (one or same_shape(sizes, needed)):
            text = f"scales {list(sizes)} of blocks {list(found.block)} for weights [{features}, {inputs}]"
            return self.unread(f"`{self.name}` is given {text} and rows of {shape_of(rows)[-1]}")
        return found

    def unread(self, detail: str) -> Lost:
        """A refusal that says what is not read."""
        value = tensor(self.storage)
        return self.ctx.lost("encoding-unknown", self.node, dtype="few bits" if value is None else _named(value.dtype), detail=detail)


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dims(fact: Any, rank: int) -> list[int] | None:
    """The dimensions of the plain tensor that a view of it shows, of a stack the experts first; None if it is not all of it."""
    if not isinstance(fact, View) or len(fact.axes) != rank or any(len(a) != 1 or a[0].kind != "d" for a in fact.axes):
        return None
    dims = [axis[0].index for axis in fact.axes]
    value = tensor(fact.root)
    whole = value is not None and sorted(dims) == list(range(value.dim())) and same_shape([shape_of(value)[d] for d in dims], _sizes(fact))
    return dims if whole and (rank < _STACK or dims[0] == 0) else None


def _sizes(fact: View) -> list[Any]:
    return [axis[0].size for axis in fact.axes]


def _size(fact: View, dim: int) -> Any:
    return fact.axes[dim][0].size


__all__ = ["on_operator"]
