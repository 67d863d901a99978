"""Routings of tensors of ids: one object for each, so that facts of one routing can be told by identity."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.sizes import shape_of
from moefuse.passes.infer.choices import one_for_each
from moefuse.passes.infer.ranges import distinct, interval
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.axes import Atom
from moefuse.passes.ir.facts import Column, Routing, View


@dataclass
class _Routings:
    by_ids: dict[Node, Routing] = field(default_factory=dict)
    derived: dict[tuple[Routing, tuple[str, ...], int], Routing] = field(default_factory=dict)
    symbols: set[Any] = field(default_factory=set)


def routing_of(ctx: Context, ids: View) -> Routing | None:
    """The routing that an integer view belongs to; one object per tensor of ids."""
    root = ids.root
    known = ctx.scratch(_Routings)
    if root in known.by_ids:
        return known.by_ids[root]
    value = tensor(root)
    if value is None or value.dtype not in (torch.int64, torch.int32):
        return None
    dims = root_atoms(ids)
    if dims is None:
        return None
    slots = len(dims) > 1 and not isinstance(ids, Column) and not one_for_each(ctx, root)
    if slots and not isinstance(dims[-1].size, int):
        known.symbols.add(dims[-1].size)
        return None
    tokens = tuple(a.size for a in (dims[:-1] if slots else dims))
    top_k = int(dims[-1].size) if slots else 1
    found = Routing(root, tokens, top_k, slots, distinct=top_k == 1 or distinct(ctx, root), bounds=interval(ctx, root))
    known.by_ids[root] = found
    return found


def unknown_slots(ctx: Context) -> set[Any]:
    """Sizes for which tensors are no ids, because nobody knows how many experts a token has."""
    return set(ctx.scratch(_Routings).symbols)


def shared_routing(ctx: Context, routing: Routing, more: tuple[Any, ...]) -> Routing:
    """The routing of tokens [*tokens, *more], where all with the same first numbers go where ``routing`` says; one object for each."""
    return _with_tokens(ctx, routing, (*routing.tokens, *more), more)


def split_routing(ctx: Context, routing: Routing, tokens: tuple[Any, ...]) -> Routing:
    """The same routing with its tokens in so many dimensions; one object for each."""
    return _with_tokens(ctx, routing, tokens, routing.shared)


def _with_tokens(ctx: Context, routing: Routing, tokens: tuple[Any, ...], shared: tuple[Any, ...]) -> Routing:
    key = (routing, tuple(map(str, tokens)), len(shared))
    return ctx.scratch(_Routings).derived.setdefault(key, replace(routing, tokens=tokens, shared=shared))


def root_atoms(view: View) -> tuple[Atom, ...] | None:
    """The dimensions a view's root is taken apart into (all of them, also those the view no longer shows)."""
    shown = {a.index: a for axis in view.axes for a in axis if a.kind == "d"}
    value = tensor(view.root)
    if value is None:
        return None
    own = shape_of(value)
    if all(i < len(own) and a.size == own[i] for i, a in shown.items()):
        return tuple(Atom("d", i, s) for i, s in enumerate(own))
    return tuple(shown[i] for i in sorted(shown))
