"""What a row of an expert reads of plain tensors: its token, its routing weight, the weight that a table has for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import counted
from moefuse.passes.graph.sizes import same
from moefuse.passes.infer.cone import behind_expert
from moefuse.passes.infer.state import Context, out_shape
from moefuse.passes.ir.axes import Atom, Axis, align, atoms, extent, fresh
from moefuse.passes.ir.expr import Expr, Gate, SlotWeight, Token
from moefuse.passes.ir.facts import Column, Domain, Finding, Routing, Rows, Selection, View
from moefuse.passes.rules.routing.ids import is_slot_weight


def row_domain(chosen: Selection) -> Domain:
    return Domain("selected", chosen.routing, selection=chosen, expert=chosen.expert, slot=chosen.slot)


def slot_gate(node: Node, column: Column, chosen: Selection, rows: Axis) -> Rows:
    """The weights of one slot for the rows that chose an expert in that slot."""
    axes = (rows, *(() for _ in column.axes[1:]))
    return Rows(axes, row_domain(chosen), Gate(node, column.base.root, True, False, chosen.expert))


def take_tokens(ctx: Context, node: Node, x: Node, base: View, chosen: Selection, rows: Axis) -> Finding:
    """Rows of a plain [tokens, H] tensor ``x`` for the tokens of an expert; ``base``: what is known of it."""
    token_axes, features = base.axes[:1], base.axes[1:]
    inner = features[: max((i for i, a in enumerate(features) if a), default=0)]
    if any(inner):
        return _take_sequences(ctx, node, base, chosen, (rows, *inner))
    if not same(extent(token_axes[0]), chosen.routing.num_tokens):
        return ctx.lost(
            "tokens-differ",
            node,
            detail=f"{counted(extent(token_axes[0]))} rows are indexed by {counted(chosen.routing.num_tokens)} tokens",
        )
    spread = any(a.kind == "b" and not same(a.size, 1) for a in token_axes[0])  # one of a sequence for each of its tokens
    expr = None if spread else token(node, base, list(token_axes), list(features))
    if expr is None and type(base) is View:
        # Its tokens are no leading dimensions of what it is a view of (``images.flatten(2).transpose(1, 2)`` of one): read as it is.
        base = View(fresh(out_shape(x)), x)
        expr = token(node, base, list(base.axes[:1]), list(base.axes[1:]))
    if expr is None:
        return ctx.lost("tokens-differ", node, detail="the indexed tensor is not a plain [tokens, features] tensor")
    table = token(node, base.base, list(base.base.axes[:-1]), [base.base.axes[-1]]) if isinstance(base, Column) else None
    column = None if table is None or not isinstance(base, Column) else (table.source, base.slot)
    expr = replace(expr, column=column)
    if chosen.routing.top_k == 1 and not any(features):
        return Rows((rows, *features), row_domain(chosen), SlotWeight(node, base.root, column=column))
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in features))
    return Rows(axes, row_domain(chosen), behind_expert(ctx, node, expr, chosen.expert))


def take_rows(base: Rows, chosen: Selection, rows: Axis) -> Rows | None:
    """``expert(x)[tokens]``: an expert computes each row by itself, so it may as well be given those that chose it."""
    domain, tokens = base.domain, atoms(base.axes[:-1])
    order = [a.index for a in tokens if not same(a.size, 1)]
    whole = same(extent(tokens), chosen.routing.num_tokens) and all(a.kind == "t" for a in tokens) and order == sorted(order)
    same_expert = domain.name == "masked" and domain.expert in (None, chosen.expert) and domain.slot in (None, chosen.slot)
    if not whole or not same_expert or domain.routing not in (None, chosen.routing):
        return None
    return Rows((rows, base.axes[-1]), row_domain(chosen), base.expr)


def _take_sequences(ctx: Context, node: Node, base: View, chosen: Selection, lead: tuple[Axis, ...]) -> Finding:
    """``images[b]`` of [B, S, H] where ids are [B, K]: all tokens of a sequence or an image go to the same experts."""
    count, last = len(lead), base.axes[len(lead) :]
    expr = token(node, base, list(base.axes[:count]), list(last))
    if expr is None or not same(extent(base.axes[0]), chosen.routing.num_tokens):
        return ctx.lost("tokens-differ", node, detail="the indexed tensor is not a plain [tokens, features] tensor")
    tokens = tuple(tuple(Atom("t", i, a.size) for a in axis) for i, axis in enumerate(lead[1:], 1))
    return Rows((lead[0], *tokens, *((Atom("f", 0, extent(a)),) if a else () for a in last)), row_domain(chosen), expr)


def token(node: Node, base: View, token_axes: list[Axis], features: list[Axis]) -> Token | None:
    """The Token leaf of a view whose token dimensions are the leading ones of its root and whose features are the last."""
    if len([a for a in features if a]) > 1:
        return None
    lead = [a for axis in token_axes for a in axis if a.kind == "d" and not same(a.size, 1)]
    last = [a for axis in features for a in axis if a.kind == "d" and not same(a.size, 1)]
    order = [a.index for a in (*lead, *last)]
    if order != sorted(order) or any(a.kind == "b" for axis in features for a in axis if not same(a.size, 1)):
        return None
    value = tensor(base.root)
    width: Any = 1
    for a in last:
        width = width * a.size
    total: Any = width
    for a in lead:
        total = total * a.size
    if value is None or not isinstance(width, int):
        return None
    whole: Any = 1
    for s in out_shape(base.root):
        whole = whole * s
    return Token(node, base.root, width) if same(whole, total) else None


def own_row(node: Node, base: View) -> Token | None:
    """A plain [slots, features] tensor that has a row for each slot."""
    found = token(node, base, [base.axes[0]], list(base.axes[1:]))
    return None if found is None else replace(found, by_slot=True)


def slot_value(node: Node, base: View, routing: Routing) -> Expr | None:
    """What a plain [slots, ...] tensor holds for a slot: its token's features (repeated per slot), or its routing weight."""
    runs = align((*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k)), base.axes[0])
    if runs is None:
        return None
    slots = [cut for run, cut in runs if any(a.kind == "k" for a in run)]
    if slots and all(a.kind == "b" for a in slots[0]) and routing.top_k > 1:
        return token(node, base, [tuple(a for run, cut in runs if all(r.kind == "t" for r in run) for a in cut)], list(base.axes[1:]))
    if any(a for a in base.axes[1:] if not same(extent(a), 1)):
        return token(node, base, [base.axes[0]], list(base.axes[1:])) if routing.top_k == 1 else None
    return SlotWeight(node, base.root) if is_slot_weight(base, routing) else None
