"""One expression for all experts: their trees, compared position by position, may differ only in which expert's weight they use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.named import counted, named
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.graph.stacks import row_behind
from moefuse.passes.ir.expr import (
    Cast,
    ExpertVector,
    Expr,
    Gate,
    Held,
    Leaf,
    Linear,
    Op,
    SharedVector,
    Slice,
    SlotWeight,
    Token,
    rewritten,
    walk,
    weight_leaves,
)  # fmt: skip
from moefuse.passes.ir.facts import Lost
from moefuse.passes.ir.lowrank import low_rank_products


class DifferError(Exception):
    """Two experts that are no one tree. ``unread``: what an expert computes there is nothing that a rule knows."""

    def __init__(self, expert: int, detail: str, unread: Expr | None = None) -> None:
        super().__init__(detail)
        self.expert, self.detail, self.unread = expert, detail, unread


def generalise(exprs: list[Expr], experts: list[int], node: Node) -> Expr | Lost:
    """The common tree, with stacked leaves indexed by the row's expert and separate Parameters listed; Lost where experts differ."""
    try:
        return _Merge(experts).run(exprs)
    except DifferError as differ:
        lost = None if differ.unread is None else no_rule(differ.unread)
        other = differ if lost is not None else _adapted(exprs, experts) or differ
        return lost or Lost("experts-differ", node, {"expert": str(other.expert), "detail": other.detail})


def _adapted(exprs: list[Expr], experts: list[int]) -> DifferError | None:
    """The first expert with more or fewer low-rank adapters than the first one: then that is what differs, and no operation."""
    counts = [low_rank_products(expr) for expr in exprs]
    other = next((i for i, count in enumerate(counts) if count != counts[0]), None)
    if other is None:
        return None
    return DifferError(experts[other], f"it has {counts[other]} low-rank adapter{'s' * (counts[other] != 1)} instead of {counts[0]}")


def no_rule(expr: Expr) -> Lost | None:
    """The first operation in an expression that no rule knows; None where every one is known."""
    unread = (e.source for e in walk(expr) if isinstance(e, Token) and e.unread)
    calls = ((node, call_of(node)) for node in unread)
    return next((Lost("no-rule", node, {"op": call.name}) for node, call in calls if call is not None), None)


def specialise(expr: Expr, expert: int) -> Expr | None:
    """What an expression for all experts is for one of them, the opposite of :func:`generalise`; None if it has no such expert."""
    if any(leaf.parts and expert >= len(leaf.parts) for leaf in weight_leaves(expr)):
        return None

    def leaf(old: Leaf) -> Leaf:
        if old.parts:
            return Leaf(old.parts[expert], False, None, old.order)
        return replace(old, expert=expert) if old.stacked and old.expert is None else old

    return rewritten(expr, lambda source: source, leaf, lambda number: expert if number is None else number)


def for_all(expr: Expr) -> Expr:
    """The tree with each matrix that all experts share as a list of it, of as many as stacked weights have rows."""
    leaves = [leaf for leaf in weight_leaves(expr) if not leaf.stacked and not leaf.parts]
    sizes = {shape_of(value)[leaf.along] for leaf in weight_leaves(expr) if leaf.stacked and (value := tensor(leaf.source)) is not None}
    count = next(iter(sizes), None)
    if not leaves or len(sizes) != 1 or not isinstance(count, int):
        return expr

    def leaf(old: Leaf) -> Leaf:
        return old if old.stacked or old.parts else replace(old, parts=(old.source,) * count)

    return rewritten(expr, lambda source: source, leaf, lambda number: number)


class _Merge:
    """One generalisation: what is one node of every tree stays one, so that a random draw inside stays one draw."""

    def __init__(self, experts: list[int]) -> None:
        self.experts = experts
        self.memo: dict[tuple[int, ...], Expr] = {}

    def run(self, exprs: list[Expr]) -> Expr:
        key = tuple(map(id, exprs))
        if key not in self.memo:
            self.memo[key] = _own_columns(exprs, self.experts) or _merge(exprs, self)
        return self.memo[key]


def _merge(exprs: list[Expr], merge: _Merge) -> Expr:
    first, experts = exprs[0], merge.experts
    for e, other in zip(experts[1:], exprs[1:], strict=True):
        if type(other) is not type(first):
            detail = f"{_kind(other)} where expert {experts[0]} has {_kind(first)}"
            raise DifferError(e, detail, next((x for x in (first, other) if isinstance(x, Token)), None))
    match first:
        case Token() | SlotWeight():
            _same(exprs, experts, "source", "input" if isinstance(first, Token) else "the routing weight")
            return first
        case SharedVector():
            return _vector(exprs, experts)
        case Gate():
            return _gate(exprs, experts)
        case Linear():
            child = merge.run([e.child for e in exprs])  # type: ignore[attr-defined]
            return Linear(first.node, child, common_leaf(_weights(exprs), experts))
        case ExpertVector():
            return ExpertVector(first.node, common_leaf(_own([(e.node, e.vector) for e in exprs]), experts))  # type: ignore[attr-defined]
        case Slice():
            for name in ("start", "step", "length", "of"):
                _same(exprs, experts, name, f"slice {name}")
            child = merge.run([e.child for e in exprs])  # type: ignore[attr-defined]
            return Slice(first.node, child, first.start, first.step, first.length, first.of)
        case Cast():
            _same(exprs, experts, "dtype", "dtype")
            return Cast(first.node, merge.run([e.child for e in exprs]), first.dtype)  # type: ignore[attr-defined]
        case Op():
            return _op(exprs, merge)
    raise DifferError(experts[0], f"unknown expression {type(first).__name__}")


_KINDS: dict[type[Expr], str] = {
    Token: "its token or another input", SlotWeight: "a routing weight", Gate: "a routing weight", Linear: "a product with a weight",
    ExpertVector: "a tensor of its own", SharedVector: "a tensor", Slice: "some of the features", Cast: "another dtype",
}  # fmt: skip


def _kind(expr: Expr) -> str:
    """What an expert computes at some place, for a reader."""
    return f"`{expr.name}`" if isinstance(expr, Op) else _KINDS.get(type(expr), "something else")


def _own_columns(exprs: list[Expr], experts: list[int]) -> Gate | None:
    """What each expert reads of a table in the column with its number is its weight."""
    first = _column(exprs[0])
    own = first is not None and len(exprs) > 1 and [_column(e) for e in exprs] == [(first[0], e) for e in experts]
    return Gate(exprs[0].node, first[0], False, False, None) if own and first is not None else None


def _column(expr: Expr) -> tuple[Node, int] | None:
    """Of which table [tokens..., n] an expression is which column."""
    match expr:
        case Slice(child=Token() as table, length=1) if not table.by_slot and table.width == expr.of:
            return table.source, expr.start
        case Token() | SlotWeight():
            return expr.column
    return None


def _same(exprs: list[Any], experts: list[int], name: str, what: str) -> None:
    first = getattr(exprs[0], name)
    for e, other in zip(experts[1:], exprs[1:], strict=True):
        value = getattr(other, name)
        if value is not first and (isinstance(first, Node) or value != first):
            raise DifferError(e, _apart_from(what, value, first), exprs[0] if isinstance(exprs[0], Token) else None)


def _apart_from(what: str, value: Any, first: Any) -> str:
    """What an expert has, and not the first one, as the user wrote it."""
    mine, theirs = (named(v) if isinstance(v, Node) else str(v) for v in (value, first))
    if mine != theirs:
        return f"{what} {mine} instead of {theirs}"
    return f"{'' if what == 'uses' else f'{what} '}{mine} is computed for each expert by itself"


def _op(exprs: list[Any], merge: _Merge) -> Expr:
    first, experts = exprs[0], merge.experts
    _same(exprs, experts, "name", "operation")
    for e, other in zip(experts[1:], exprs[1:], strict=True):
        if len(other.args) != len(first.args) or [k for k, _ in other.kwargs] != [k for k, _ in first.kwargs]:
            raise DifferError(e, f"`{first.name}` with other arguments")
    args = tuple(_argument([x.args[i] for x in exprs], merge, first.name) for i in range(len(first.args)))
    kwargs = tuple((k, _argument([x.kwargs[i][1] for x in exprs], merge, first.name)) for i, (k, _) in enumerate(first.kwargs))
    return _apart(Op(first.node, first.name, args, kwargs))


def _apart(op: Op) -> Expr:
    """A norm whose weight or bias is each expert's own: the norm without them, times the one, plus the other, in the norm's precision."""
    options, value = op.options, tensor(op.node)
    if not op.name.endswith("_norm") or value is None or not any(isinstance(options.get(k), ExpertVector) for k in ("weight", "bias")):
        return op
    weight, bias = options.pop("weight", None), options.pop("bias", None)
    # Without a number, rms_norm takes the eps of the dtype that it computes in.
    wide = value.dtype in (torch.bfloat16, torch.float16) and (op.name == "layer_norm" or options.get("eps") is not None)
    inner = Cast(op.node, op.args[0], torch.float32) if wide else op.args[0]
    out: Expr = Op(op.node, op.name, (inner, *op.args[1:]), tuple(options.items()))
    out = out if weight is None else Op(op.node, "mul", (out, weight))
    out = out if bias is None else Op(op.node, "add", (out, bias))
    return Cast(op.node, out, value.dtype) if wide else out


def _argument(values: list[Any], merge: _Merge, name: str) -> Any:
    if all(isinstance(v, Expr) for v in values):
        return merge.run(values)
    for e, v in zip(merge.experts[1:], values[1:], strict=True):
        if isinstance(v, Expr) or isinstance(values[0], Expr) or type(v) is not type(values[0]) or v != values[0]:
            raise DifferError(e, f"`{name}` with {_shown(v)} instead of {_shown(values[0])}")
    return values[0]


def _shown(value: Any) -> str:
    """An argument as the user knows it."""
    if not isinstance(value, Expr):
        return str(value)
    number = isinstance(value, SharedVector) and tensor(value.source) is None
    return "a number that may change from call to call" if number else "a tensor"


def _gate(exprs: list[Any], experts: list[int]) -> Gate:
    for name in ("source", "slots", "ones", "turned"):
        if name in ("source", "turned") and exprs[0].ones:
            continue
        _same(exprs, experts, name, "routing weights")
    for e, gate in zip(experts, exprs, strict=True):
        if gate.expert is not None and gate.expert != e:
            raise DifferError(e, f"weighted by the column of expert {gate.expert}")
    first: Gate = exprs[0]
    return replace(first, expert=None)


def _vector(exprs: list[Any], experts: list[int]) -> Expr:
    first: SharedVector = exprs[0]
    if all(e.source is first.source for e in exprs):
        return first
    if all(isinstance(fake(e.source), torch.SymFloat) for e in exprs):
        return ExpertVector(first.node, Leaf(first.source, False, None, (), tuple(e.source for e in exprs)))
    for expert, e in zip(experts[1:], exprs[1:], strict=True):
        if tensor(e.source) is None:
            raise DifferError(expert, f"it computes with a number of its own, {named(e.source)}: how many tokens it has, perhaps")
    return ExpertVector(first.node, common_leaf([Leaf(e.source, False, None, (0,)) for e in exprs], experts))


def common_leaf(leaves: list[Leaf], experts: list[int]) -> Leaf:
    """One leaf for all experts, of theirs.

    Raises:
        DifferError: they are not of one stack, or not of one shape.
    """
    first, held = leaves[0], _common_held(leaves, experts)
    for e, leaf in zip(experts, leaves, strict=True):
        if leaf.parts != first.parts:
            raise DifferError(e, "it has a list of weights of its own")
        if leaf.stacked != first.stacked or leaf.order != first.order:
            raise DifferError(e, "its weight is stored in another layout")
        if leaf.stacked and leaf.source is not first.source:
            raise DifferError(e, _apart_from("uses", leaf.source, first.source))
        if leaf.stacked and leaf.expert is not None and leaf.expert != e:
            raise DifferError(e, f"uses the weight of expert {leaf.expert}")
        _check_shape(e, leaf, first)
    if first.parts:  # the same list of all experts, as each slot of a token has it
        return first
    if first.stacked:
        return Leaf(first.source, True, None, first.order, held=held)
    return Leaf(first.source, False, None, first.order, tuple(leaf.source for leaf in leaves), held=held)


def _common_held(leaves: list[Leaf], experts: list[int]) -> Held | None:
    """How the weights of all experts are held, if an operation of the program multiplies them so."""
    first = leaves[0].held
    for e, leaf in zip(experts, leaves, strict=True):
        if (leaf.held is None) != (first is None) or (leaf.held is not None and first is not None and leaf.held.how != first.how):
            raise DifferError(e, "its weight is held in another way")
    if first is None:
        return None
    scale, *nested = (common_leaf(list(of), experts) for of in zip(*(leaf.held.leaves for leaf in leaves if leaf.held), strict=True))
    return replace(first, scale=scale, nested=tuple(nested))


def _weights(linears: list[Any]) -> list[Leaf]:
    return _own([(e.node, e.weight) for e in linears])


def _own(read: list[tuple[Node, Leaf]]) -> list[Leaf]:
    """Each expert's, and what reads it. A row of a stack is a tensor of its own where others have such, or one of another stack."""
    leaves = [leaf for _, leaf in read]
    alike = len({leaf.source if leaf.stacked else None for leaf in leaves}) == 1
    return leaves if alike else [_by_itself(reader, leaf) for reader, leaf in read]


def _by_itself(reader: Node, leaf: Leaf) -> Leaf:
    node = row_behind(reader, leaf.source, leaf.expert) if leaf.stacked and isinstance(leaf.expert, int) and 0 not in leaf.order else None
    return leaf if node is None else Leaf(node, False, None, tuple(d - 1 for d in leaf.order))


def _check_shape(expert: int, leaf: Leaf, first: Leaf) -> None:
    mine, theirs = tensor(leaf.source), tensor(first.source)
    if mine is None or theirs is None or leaf.stacked:
        return
    if shape_of(mine) != shape_of(theirs) or mine.dtype != theirs.dtype or mine.device != theirs.device:
        raise DifferError(expert, f"weight {_size(mine)} instead of {_size(theirs)}")


def _size(weight: torch.Tensor) -> str:
    return f"[{', '.join(map(counted, weight.shape))}] {str(weight.dtype).removeprefix('torch.')}"
