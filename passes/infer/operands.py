"""Operands of row-wise operations: what another tensor contributes to each row of a domain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import Call, fake, tensor
from moefuse.passes.graph.op_classes import JOINTS
from moefuse.passes.graph.sizes import same, shape_of
from moefuse.passes.graph.values import is_boolean
from moefuse.passes.infer.gates import gate
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Atom, Axes, Axis, align, atoms, extent, fresh
from moefuse.passes.ir.expr import ExpertVector, Expr, Leaf, SharedVector, SlotWeight, Token
from moefuse.passes.ir.facts import Column, Domain, RowNumber, Rows, Table, View, Weight


def is_condition(node: Node, call: Call) -> bool:
    """Whether an operation gives conditions for elements, as it does when it is run again: not ``logical_and`` of numbers, nor ``gt_``."""
    return is_boolean(node) and (call.name not in JOINTS or all(map(is_boolean, node.all_input_nodes)))


def padded(axes: Axes, rank: int) -> Axes:
    """Axes with broadcast dimensions added in front."""
    return (*((),) * (rank - len(axes)), *axes)


def real(axis: Axis) -> bool:
    """Whether an axis has more than one index (as far as known)."""
    return any(not same(a.size, 1) for a in axis)


def joined(parts: list[Axes], rank: int) -> Axes:
    """The axes of a broadcast result: each dimension from the first operand that has it, rather than from one that was expanded to it."""
    columns = [padded(p, rank) for p in parts]

    def of(i: int) -> Axis:
        mine = sorted((c[i] for c in columns if real(c[i])), key=repeats) or [c[i] for c in columns if c[i]]
        return mine[0] if mine else ()

    return tuple(of(i) for i in range(rank))


def repeats(axis: Axis) -> bool:
    """Whether all along an axis one value is repeated."""
    return all(a.kind == "b" or same(a.size, 1) for a in axis)


def leaf(ctx: Context, node: Node, axes: Axes, domain: Domain, value: Any) -> Expr | None:
    """The expression of an operand for the rows of ``domain`` laid out as ``axes``; None if it is not a value per row."""
    rank = len(axes)
    if isinstance(value, Rows):
        own = value.domain.same(domain) and fits(axes, padded(value.axes, rank))
        return _of_one_slot(value, axes) if own else None
    if isinstance(value, Table):
        if value.root is None and value.slots is None and not value.ones:
            return None
        known = domain.expert is None or value.expert is None or domain.expert == value.expert
        return gate(node, value) if known and not value.negated and value.fill == 0.0 and fits(axes, padded(value.axes, rank)) else None
    if isinstance(value, Weight):
        return _expert_vector(node, axes, domain, value)
    if (
        isinstance(value, Column)
        and domain.name == "masked"
        and not any(real(a) for a in value.axes[len(value.axes) - 1 :] if rank == len(value.axes))
    ):
        return SlotWeight(node, value.base.root, value.slot)
    if isinstance(value, View):
        return _plain(ctx, node, axes, domain, replace(value, axes=padded(value.axes, rank)))
    return None


def beside(ctx: Context, node: Node, axes: Axes, domain: Domain, value: Node) -> Expr | None:
    """As :func:`leaf`, of a value of the graph; it may be the row of a stack that another number than the expert's takes."""
    fact = ctx.fact(value)
    numbers = (fact.expert, domain.expert) if isinstance(fact, Weight) else (None, None)
    if None in numbers or numbers[0] == numbers[1] or any(isinstance(n, RowNumber) for n in numbers):
        return leaf(ctx, node, axes, domain, fact)
    known = tensor(value)
    row = leaf(ctx, node, axes, domain, View(fresh(shape_of(known)), ctx.first[value])) if known is not None and known.dim() == 1 else None
    return ExpertVector(node, Leaf(row.source, False, None, (0,))) if isinstance(row, SharedVector) else None


def _of_one_slot(value: Rows, axes: Axes) -> Expr:
    """What rows are beside others: one number of a token that has one slot, next to features, is a routing weight."""
    expr, routing = value.expr, value.domain.routing
    single = routing is not None and routing.top_k == 1 and value.domain.name == "selected"
    if not single or not isinstance(expr, Token) or expr.width != 1 or not axes or not real(axes[-1]):
        return expr
    return SlotWeight(expr.node, expr.source, column=expr.column)


def fits(rows: Axes, other: Axes) -> bool:
    """Whether another operand of the same domain lines up with the rows, dimension by dimension."""
    for mine, theirs in zip(rows, other, strict=True):
        if not real(theirs):
            continue
        if any(a.kind == "r" for a in mine):
            if not any(a.kind == "r" for a in theirs):
                return False
            continue
        if repeats(theirs) and same(extent(mine), extent(theirs)):
            continue
        runs = align(mine, theirs)
        if runs is None or any({a.kind for a in x if not same(a.size, 1)} != {a.kind for a in y if not same(a.size, 1)} for x, y in runs):
            return False
    return True


def _plain(ctx: Context, node: Node, axes: Axes, domain: Domain, view: View) -> Expr | None:
    """A tensor without routing: per token, per slot, per expert or shared, by the row atoms its own dimensions line up with."""
    dims: dict[str, list[Atom]] = {"t": [], "k": [], "e": [], "f": [], "r": []}
    for mine, theirs in zip(axes, view.axes, strict=True):
        if not real(theirs) or all(a.kind == "b" for a in theirs):
            continue
        runs = align(mine, theirs)
        if runs is None:
            return None
        for run, cut in runs:
            plain = [a for a in cut if a.kind == "d" and not same(a.size, 1)]
            if not plain:
                continue
            names = {a.kind for a in run if not same(a.size, 1)}
            if names == {"t", "k"} and domain.routing is not None:
                dims["t"] += plain
                dims["k"] += [Atom("d", -1, 1)]
            elif len(names) == 1:
                dims[names.pop()] += plain
            else:
                return None
    return _classified(ctx, node, domain, view, dims)


def _classified(ctx: Context, node: Node, domain: Domain, view: View, dims: dict[str, list[Atom]]) -> Expr | None:
    order = [a.index for kind in "tk" for a in dims[kind] if a.index >= 0]
    feature = [a.index for a in dims["f"]]
    if dims["r"] or order != sorted(order) or (order and feature and max(order) > min(feature)):
        return None
    if dims["e"]:
        return _per_expert(node, view, dims) if not order else None
    if not _covers(view.root, [a for kind in "tkf" for a in dims[kind]]):
        return None
    if dims["k"]:
        return SlotWeight(node, view.root) if not feature else None
    if dims["t"]:
        if domain.routing is not None and domain.routing.top_k == 1 and not feature and domain.name in ("slots", "selected"):
            return SlotWeight(node, view.root, column=_table_of(view))
        width: Any = 1
        for a in dims["f"]:
            width = width * a.size
        return Token(node, view.root, width) if isinstance(width, int) else None
    value = tensor(view.root)
    one_token = domain.routing is not None and same(domain.routing.num_tokens, 1) and not isinstance(value, torch.nn.Parameter)
    if feature and one_token and value is not None and value.dim() > 1:
        return Token(node, view.root, int(value.shape[-1]))
    if not feature and _only_slot(domain, view.root):
        return SlotWeight(node, view.root, column=_table_of(view))
    return SharedVector(node, view.root)


def _table_of(view: View) -> tuple[Node, int] | None:
    """Which column a view is of a table [tokens..., n], if it is one."""
    dims = [a.index for a in atoms(view.base.axes)] if isinstance(view, Column) else [1, 0]
    return (view.base.root, view.slot) if dims == sorted(dims) and isinstance(view, Column) else None


def _only_slot(domain: Domain, root: Node) -> bool:
    """Whether there is one slot in all (one token, top-1) and a one-element tensor beside it: its routing weight."""
    value = tensor(root)
    if domain.routing is None or domain.name not in ("slots", "sorted", "selected") or value is None or not value.dim():
        return False
    return same(domain.routing.num_tokens * domain.routing.top_k, 1)


def _covers(root: Node, used: list[Atom]) -> bool:
    """Whether the dimensions used are all the dimensions a tensor has (beyond those of size one)."""
    value = tensor(root)
    if value is None:
        return False
    whole: Any = 1
    for s in shape_of(value):
        whole = whole * s
    total: Any = 1
    for a in used:
        total = total * a.size
    return same(whole, total)


def _per_expert(node: Node, view: View, dims: dict[str, list[Atom]]) -> Expr | None:
    value = tensor(view.root)
    if value is None or not _of_vectors(value) or [a.index for a in dims["e"]] != [0]:
        return None
    last = value.dim() - 1
    return ExpertVector(node, Leaf(view.root, True, None, (last,))) if [a.index for a in dims["f"]] in ([last], []) else None


def _of_vectors(stack: torch.Tensor) -> bool:
    """Whether a tensor is [E, n], or [E, 1, n] as a batched product takes it."""
    return stack.dim() >= 2 and all(same(s, 1) for s in shape_of(stack)[1:-1])


def _expert_vector(node: Node, axes: Axes, domain: Domain, weight: Weight) -> Expr | None:
    """A row of a stacked [E, n] or [E, 1, n] tensor: a bias."""
    value = tensor(weight.root)
    if value is None or not _of_vectors(value):
        return None
    left = [a for axis in weight.axes for a in axis if a.kind == "w" and (a.index == value.dim() - 1 or not same(a.size, 1))]
    rows = [a for axis in weight.axes for a in axis if a.kind != "w"]
    if len(left) > 1 or (weight.axes and left and weight.axes[-1] != (left[0],) and extent(weight.axes[-1]) != 1):
        return None
    if rows and (weight.routing is not domain.routing or weight.order is not domain.order):
        return None
    if weight.expert is not None and domain.expert is not None and weight.expert != domain.expert:
        return None
    if rows and not fits(axes, padded(tuple(tuple(a for a in x if a.kind != "w") for x in weight.axes), len(axes))):
        return None
    return ExpertVector(node, Leaf(weight.root, True, weight.expert, tuple(a.index for a in left)))


def scalar(value: Any) -> bool:
    """Whether an argument is a constant that a rule can compare."""
    return value is None or isinstance(value, bool | int | float | str)


def symbol(node: Node, value: Any) -> Expr | None:
    """A number that only the run knows (a dynamic float): replayed as it is."""
    recorded = fake(value) if isinstance(value, Node) else None
    return SharedVector(node, value) if recorded is not None and not isinstance(recorded, tuple | list) and tensor(value) is None else None
