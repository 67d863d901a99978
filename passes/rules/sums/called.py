"""A program that calls moefuse's ops itself (``experts_implementation="moefuse"``): what they compute, as any program's layer.

So it is in the report as the others are, and adapters of its weights go beside the projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from moefuse.ops.meaning.encoding import parse
from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.routings import routing_of
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Atom
from moefuse.passes.ir.expr import ExpertVector, Expr, Held, Leaf, Linear, Op, Slice, SlotWeight, Token
from moefuse.passes.ir.facts import Combined, Counts, Domain, Many, Order, Routing, Rows, Sorted, View
from moefuse.passes.rules import rule

_ONE: dict[str, Callable[[Node, Expr], Expr]] = {
    "identity": lambda _, x: x,
    "gelu_tanh": lambda node, x: Op(node, "gelu", (x,), (("approximate", "tanh"),)),
    "relu2": lambda node, x: Op(node, "square", (Op(node, "relu", (x,), ()),), ()),
    **{name: lambda node, x, name=name: Op(node, name, (x,), ()) for name in ("silu", "gelu", "relu", "sigmoid", "tanh", "mish")},  # type: ignore[misc]
}


@rule("moefuse::experts", shown=("out_dtype",))
def on_experts(
    ctx: Context,
    node: Node,
    x: Node,
    ids: Node,
    weights: Node,
    w_in: Sequence[Node],
    w_up: Sequence[Node],
    w_out: Sequence[Node],
    b_in: Sequence[Node],
    b_up: Sequence[Node],
    b_out: Sequence[Node],
    *,
    activation: str = "silu",
    gating: str = "merged",
) -> Combined | None:
    """Stacked weights in one dtype, gate and up merged or no gate, and no more options than that."""
    routing = _routing(ctx, ids)
    one = len(w_in) == len(w_out) == 1 and not w_up and not b_up and max(len(b_in), len(b_out)) < 2
    if routing is None or not one or activation not in _ONE or gating not in ("merged", "plain"):
        return None
    values = [tensor(n) for n in (node, x, *w_in, *w_out, *b_in, *b_out)]
    if len({None if v is None else v.dtype for v in values}) != 1:
        return None
    body, hidden = _Body(node, x, weights, activation, gating), shape_of(values[2])[1]  # type: ignore[arg-type]
    return body.summed(routing, hidden, lambda h: _projected(node, h, w_in[0], b_in), lambda a: _projected(node, a, w_out[0], b_out))


@rule("moefuse::experts_extended", shown=("out_dtype",))
def on_experts_extended(
    ctx: Context,
    node: Node,
    x: Node,
    ids: Node,
    weights: Node,
    w_in: Sequence[Node],
    w_up: Sequence[Node],
    w_out: Sequence[Node],
    b_in: Sequence[Node],
    b_up: Sequence[Node],
    b_out: Sequence[Node],
    a_in: Sequence[Node],
    l_in: Sequence[Node],
    a_up: Sequence[Node],
    l_up: Sequence[Node],
    a_out: Sequence[Node],
    l_out: Sequence[Node],
    codes: Sequence[Node],
    *,
    encodings: Sequence[str] | None = None,
    activation: str = "silu",
    gating: str = "merged",
) -> Combined | None:
    """As ``moefuse::experts``, of stacks that are both in few bits and have scales alone, without biases."""
    if encodings is None or any((a_in, l_in, a_up, l_up, a_out, l_out)):
        return None
    routing, first, last = _routing(ctx, ids), *(parse(text) if text else None for text in (encodings[0], encodings[2]))
    one = len(w_in) == len(w_out) == 1 and not (w_up or b_in or b_up or b_out) and len(codes) == len((w_in, w_out))
    if routing is None or not one or first is None or last is None or activation not in _ONE or gating not in ("merged", "plain"):
        return None
    storage, made, rows = tensor(w_in[0]), tensor(node), tensor(x)
    plain = made is not None and rows is not None and made.dtype == rows.dtype and not (first.zero or last.zero)
    if storage is None or not plain or not ctx.given.packed:
        return None
    held = (Held(how, Leaf(scale, True, None, (1, 2))) for how, scale in zip((first, last), codes, strict=True))
    inner, outer = (Leaf(w, True, None, (1, 2), held=by) for w, by in zip((w_in[0], w_out[0]), held, strict=True))
    body, hidden = _Body(node, x, weights, activation, gating), first.logical(tuple(shape_of(storage)))[1]
    return body.summed(routing, hidden, lambda h: Linear(node, h, inner), lambda a: Linear(node, a, outer))


@dataclass(frozen=True)
class _Body:
    """What a call computes between its projections."""

    node: Node
    x: Node
    weights: Node
    activation: str
    gating: str

    def summed(self, routing: Routing, hidden: Any, first: Callable[[Expr], Expr], last: Callable[[Expr], Expr]) -> Combined | None:
        """The sum over a token's slots, of experts with ``hidden`` features between two projections."""
        node, made, tokens = self.node, tensor(self.node), tensor(self.x)
        assert made is not None
        assert tokens is not None
        features, width = shape_of(made)[-1], shape_of(tokens)[1]
        if not all(isinstance(size, int) for size in (features, width, hidden)):
            return None
        rows = first(Token(node, self.x, width))
        gate, up = rows, None
        if self.gating == "merged":
            gate, up = (Slice(node, rows, start, 1, hidden // 2, hidden) for start in (0, hidden // 2))
        rows = _ONE[self.activation](node, gate)
        rows = rows if up is None else Op(node, "mul", (rows, up), ())
        return _summed(routing, Op(node, "mul", (last(rows), SlotWeight(node, self.weights)), ()), features)


@rule("moefuse::permute")
def on_permute(ctx: Context, node: Node, x: Node, ids: Node, num_experts: int) -> Many | None:
    """Each slot's token in the order of its expert, that order, and where the experts' rows begin and end."""
    routing, known = _routing(ctx, ids), tensor(x)
    if routing is None or known is None or not isinstance(width := shape_of(known)[-1], int):
        return None
    order = Order(routing, node)
    slots = (Atom("r", 0, routing.num_tokens * routing.top_k),)
    rows = Rows((slots, (Atom("f", 0, width),)), Domain("sorted", routing, order=order), Token(node, x, width))
    return Many((rows, Sorted((slots,), order, "slot"), Counts(((Atom("e", 0, num_experts + 1),),), routing, True, first=0)))


@rule("moefuse::grouped_linear")
def on_grouped_linear(ctx: Context, node: Node, x: Node, offsets: Node, w: Sequence[Node], b: Sequence[Node]) -> Rows | None:
    """Rows sorted by expert times a stack of weights."""
    rows, ends, known = ctx.fact(x), ctx.fact(offsets), tensor(node)
    sorted_rows = isinstance(rows, Rows) and rows.domain.name == "sorted" and isinstance(ends, Counts)
    if not sorted_rows or not ends.ends or ends.first != 0 or ends.routing is not rows.domain.routing or len(w) != 1 or known is None:
        return None
    return Rows((rows.axes[0], (Atom("f", 0, shape_of(known)[-1]),)), rows.domain, _projected(node, rows.expr, w[0], b))


@rule("moefuse::combine", shown=("out_dtype",))
def on_combine(ctx: Context, node: Node, rows: Node, weights: Node | None, order: Node, offsets: Node, top_k: int) -> Combined | None:
    """Sorted rows back at their tokens, times the weights of their slots, summed."""
    found, at, known, before = ctx.fact(rows), ctx.fact(order), tensor(node), tensor(rows)
    if not isinstance(found, Rows) or not isinstance(at, Sorted) or found.domain.order is not at.order or known is None or before is None:
        return None
    routing, features = at.order.routing, shape_of(known)[-1]
    ends = ctx.fact(offsets)
    if not isinstance(ends, Counts) or not ends.ends or ends.first != 0 or ends.routing is not routing:
        return None
    if at.of != "slot" or routing.top_k != top_k or known.dtype != before.dtype or not isinstance(features, int):
        return None
    expr = found.expr if weights is None else Op(node, "mul", (found.expr, SlotWeight(node, weights)), ())
    return _summed(routing, expr, features)


def _routing(ctx: Context, ids: Node) -> Routing | None:
    """The routing of ids [T, K]."""
    chosen = ctx.fact(ids)
    return routing_of(ctx, chosen) if isinstance(chosen, View) else None


def _summed(routing: Routing, rows: Expr, features: int) -> Combined:
    """What each slot gives, summed over the slots of each token."""
    tokens = tuple(Atom("t", i, size) for i, size in enumerate(routing.tokens))
    last = (Atom("f", 0, features),)
    return Combined((tokens, last), Rows(((*tokens, Atom("k", 0, routing.top_k)), last), Domain("slots", routing), rows))


def _projected(node: Node, x: Expr, weight: Node, bias: Sequence[Node]) -> Expr:
    """``linear(x, W, b)`` of the row's expert."""
    found = Linear(node, x, Leaf(weight, True, None, (1, 2)))
    return Op(node, "add", (found, ExpertVector(node, Leaf(bias[0], True, None, (1,)))), ()) if bias else found
