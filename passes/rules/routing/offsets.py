"""Numbers of slots: ``counts[e].item()``, running offsets, and what they say when they are compared."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.calls import fake, tensor
from moefuse.passes.graph.sizes import same, shape_of, size_of
from moefuse.passes.infer.ranges import counts
from moefuse.passes.infer.state import Context, as_size, normalize
from moefuse.passes.ir.axes import Atom
from moefuse.passes.ir.facts import Counts, Fill, Hit, Index, IndexMatrix, Routing, RowNumber, Rows, Span
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing.nonempty import compared, hit_of


def picked(fact: Counts, at: int, size: Any) -> Hit | Span | None:
    """``counts[e]``, ``counts.cumsum(0)[e]``."""
    if not isinstance(size, int):
        return None
    number = at + size if at < 0 else at
    if fact.ends:
        return None if isinstance(number, RowNumber) else Span((), fact.routing, 0, int(number) + fact.first)
    # A row that stands for other experts has no place among them.
    return Hit((), fact.routing, number) if isinstance(number, RowNumber) else Span((), fact.routing, int(number), int(number) + 1)


def total(ctx: Context, *terms: Any) -> Span | None:
    """The sum of numbers of slots whose experts follow each other."""
    spans = sorted((f for f in map(ctx.fact, terms) if isinstance(f, Span)), key=lambda s: (s.start, s.stop))
    if not spans or any(not isinstance(ctx.fact(t), Span) and not _zero(ctx, t) for t in terms):
        return None
    first = spans[0]
    for before, after in itertools.pairwise(spans):
        if after.routing is not first.routing or after.start != before.stop:
            return None
    return Span((), first.routing, first.start, spans[-1].stop)


def difference(ctx: Context, a: Any, b: Any) -> Span | Counts | None:
    """``ends[e] - counts[e]``, ``end - start``; of whole tensors, where each expert's slots begin."""
    x, y = ctx.fact(a), ctx.fact(b)
    if isinstance(x, Span) and _zero(ctx, b):
        return x
    if isinstance(x, Counts) and isinstance(y, Counts) and x.routing is y.routing:
        return Counts(x.axes, x.routing, True, first=0) if x.ends and x.first == 1 and not y.ends and x.axes == y.axes else None
    if isinstance(y, Span) and y.start == 0 and y.routing.within(y.stop) and _every_slot(a, y):
        return Span((), y.routing, y.stop, y.stop)
    if not isinstance(x, Span) or not isinstance(y, Span) or x.routing is not y.routing:
        return None
    if x.start == y.start and y.stop <= x.stop:
        return Span((), x.routing, y.stop, x.stop)
    return Span((), x.routing, x.start, y.start) if x.stop == y.stop and x.start <= y.start else None


def _every_slot(size: Any, span: Span) -> bool:
    """Whether a size is the number of all slots."""
    known = as_size(size) if isinstance(size, Node) else size
    return not isinstance(known, bool | None) and same(known, span.routing.num_tokens * span.routing.top_k)


def compared_spans(ctx: Context, name: str, a: Any, b: Any) -> Hit | None:
    """``start == end``, ``end > start``: whether the slots between two offsets are none."""
    for first, second, what in ((a, b, name), (b, a, _TURNED.get(name, name))):
        between = difference(ctx, first, second) if isinstance(second, Node) else None
        if isinstance(between, Span):
            return compared(hit_of(between), what, 0)
    return None


_TURNED = {"gt": "lt", "lt": "gt", "ge": "le", "le": "ge"}


def bound(ctx: Context, value: Any) -> tuple[Any, int] | None:
    """(routing, number of experts before it) of an offset into the sorted slots, or of what is known of one; no routing for 0."""
    if value is None or _zero(ctx, value):
        return None, 0
    fact = value if isinstance(value, Span) else ctx.fact(value)
    return (fact.routing, fact.stop) if isinstance(fact, Span) and fact.start == 0 else None


def _zero(ctx: Context, value: Any) -> bool:
    """Whether a number is zero, or a tensor of integers without dimensions."""
    fact = ctx.fact(value) if isinstance(value, Node) else None
    if isinstance(fact, Fill):
        held = tensor(value)
        return not fact.axes and fact.value == 0.0 and (held is None or held.dtype in (torch.int32, torch.int64))
    return isinstance(value, int) and not isinstance(value, bool | RowNumber) and value == 0


@rule("sym_size", "sym_numel", "size", "numel", "len")
def on_size(ctx: Context, node: Node, x: Any, dim: Any = None) -> Span | None:
    """``len(token)`` of ``token, slot = torch.where(ids == e)``: how many slots the expert has."""
    rows, number, held = ctx.facts.get(x), fake(node), tensor(x)
    chosen = rows.selection if isinstance(rows, Index | IndexMatrix) else rows.domain.selection if isinstance(rows, Rows) else None
    at = 1 if isinstance(rows, IndexMatrix) and rows.transposed else 0
    if chosen is None or held is None or not isinstance(number, torch.SymInt) or isinstance(chosen.expert, RowNumber):
        return None
    if dim is not None and normalize(dim, held.dim()) != at:
        return None
    # A token with one expert twice has two slots of it and one row.
    by_slot = chosen.slot is None and (not chosen.by_token or chosen.routing.distinct)
    return Span((), chosen.routing, chosen.expert, chosen.expert + 1) if by_slot and size_of(number) == shape_of(held)[at] else None


@rule("sym_sum")
def on_sym_sum(ctx: Context, node: Node, terms: Any) -> Span | None:
    return total(ctx, *terms) if isinstance(terms, tuple | list) else None


def listed(ctx: Context, items: Any) -> Counts | None:
    """``torch.stack([(ids == e).sum() for e in range(E)])``: numbers of slots of one expert after another, or of all up to it."""
    found = [ctx.fact(i) for i in items] if isinstance(items, tuple | list) else []
    if not found or not all(isinstance(f, Span) and f.routing is found[0].routing for f in found):
        return None
    axes = ((Atom("e", 0, len(found)),),)
    if all((f.start, f.stop) == (e, e + 1) for e, f in enumerate(found)):
        return Counts(axes, found[0].routing, ends=False)
    first = found[0].stop
    ends = first in (0, 1) and all((f.start, f.stop) == (0, e + first) for e, f in enumerate(found))
    return Counts(axes, found[0].routing, ends=True, first=first) if ends else None


@rule("tensor", "new_tensor", "as_tensor", shown=("dtype", "device", "requires_grad", "pin_memory"))
def on_tensor(ctx: Context, node: Node, *given: Any, data: Any = None) -> Counts | Fill | None:
    """``torch.tensor([n0, n1, ..])`` of numbers of slots; ``torch.tensor(0)``."""
    value = data if data is not None else given[-1] if given else None
    if type(value) is int:
        return Fill((), float(value))
    found = listed(ctx, value)
    return found if found is not None and exact(node, found.routing) else None


def exact(node: Node, routing: Routing) -> bool:
    """Whether the dtype of a result has room for numbers of slots."""
    value = tensor(node)
    return value is not None and counts(value.dtype, routing.num_tokens * routing.top_k)


def with_zero(ctx: Context, tensors: Any) -> Counts | None:
    """``cat((zeros(1), counts.cumsum(0)))``: the offsets with a zero in front."""
    if len(tensors) != 2:
        return None
    zero, ends = ctx.fact(tensors[0]), ctx.fact(tensors[1])
    if not isinstance(zero, Fill) or zero.value != 0.0 or len(zero.axes) != 1 or not same(zero.axes[0][0].size if zero.axes[0] else 1, 1):
        return None
    return padded_front(ends)


def padded_front(ends: Any) -> Counts | None:
    """The running sum of counts with one zero in front."""
    if not isinstance(ends, Counts) or not ends.ends or ends.first != 1 or len(ends.axes) != 1 or len(ends.axes[0]) != 1:
        return None
    only = ends.axes[0][0]
    return Counts(((only._replace(size=only.size + 1),),), ends.routing, True, first=0)


@rule("pad")
def on_pad(ctx: Context, node: Node, x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Counts | None:
    """``F.pad(counts.cumsum(0), (1, 0))``."""
    front = tuple(pad) == (1, 0) if isinstance(pad, tuple | list) else False
    return padded_front(ctx.fact(x)) if front and mode == "constant" and value in (None, 0) else None
