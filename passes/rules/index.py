"""Indexing: by constants (an expert, a half of the features) and by index tensors (the rows of an expert, the weights of a slot)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.axes import Atom, Axes, Axis, align, extent, fresh
from moefuse.passes.context import Context, normalize, out_shape
from moefuse.passes.expr import Expr, Gate, Slice, SlotWeight, Token
from moefuse.passes.facts import (
    Buffer, Column, Combined, Domain, Fact, Fill, Index, IndexMatrix, Lost, Many, Mask, Order, Range, Routing, Rows, Selection, Sorted, Sum, Table,
    View, Weight,
)  # fmt: skip
from moefuse.passes.ops import tensor
from moefuse.passes.rules import rule
from moefuse.passes.rules.routing import is_integer, role_axes, row_axis, selection
from moefuse.passes.sizes import same

_ALL = slice(None, None, None)


@rule("getitem")
def on_getitem(ctx: Context, node: Node, x: Any, index: Any) -> Any:
    known = ctx.facts.get(x) if isinstance(x, Node) else None
    if isinstance(known, Many):
        return known.items[index] if isinstance(index, int) and -len(known.items) <= index < len(known.items) else None
    if not isinstance(x, Node) or tensor(x) is None:
        return None
    items = list(index) if isinstance(index, tuple) else [index]
    tensors = [i for i in items if isinstance(i, Node) and tensor(i) is not None]
    if tensors:
        return by_tensor(ctx, node, x, items)
    if any(isinstance(i, list | Node) for i in items):
        return None
    fact = ctx.fact(x)
    return basic(ctx, node, x, fact, items) if isinstance(fact, Fact) and not isinstance(fact, Sum | Combined) else None


def basic(ctx: Context, node: Node, x: Node, fact: Fact, items: list[Any]) -> Any:
    """Indexing by integers, slices, None and an ellipsis, one dimension after another."""
    rank, used = len(fact.axes), sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items = [*items[:at], *[_ALL] * (rank - used), *items[at + 1 :]]
    items += [_ALL] * (rank - sum(i is not None for i in items))
    current: Any = fact
    dim = 0
    for item in items:
        if item is None:
            current = current.with_axes((*current.axes[:dim], (), *current.axes[dim:]))
            dim += 1
        elif isinstance(item, int):
            current = pick(ctx, node, x, current, dim, item)
        else:
            current = cut(ctx, node, current, dim, item)
            dim += 1
        if current is None or isinstance(current, Lost):
            return current
    return current


def pick(ctx: Context, node: Node, x: Node, fact: Any, dim: int, at: int) -> Any:
    """One index of a dimension: an expert, a feature half, or a dimension of size one."""
    axis = fact.axes[dim]
    axes: Axes = (*fact.axes[:dim], *fact.axes[dim + 1 :])
    only = axis[0] if len(axis) == 1 else None
    if isinstance(fact, IndexMatrix) and only is not None and only.kind == "d":
        return Index(axes, fact.selection, fact.columns[at])
    if same(extent(axis), 1):
        return fact.with_axes(axes)
    if isinstance(fact, Mask | Table) and only is not None and only.kind == "e":
        expert = at + only.size if at < 0 else at
        return replace(fact, axes=axes, expert=expert)
    if isinstance(fact, Rows) and only is not None and only.kind == "f":
        return feature_pick(node, fact, dim, at)
    if isinstance(fact, Rows) and only is not None and only.kind == "e" and fact.domain.name == "dense":
        return None
    if isinstance(fact, View) and only is not None and only.kind == "d" and only.index == 0:
        return stacked(fact, axes, expert=at + only.size if at < 0 else at)
    if type(fact) is View and only is not None and only.kind == "d" and dim == len(fact.axes) - 1 and isinstance(only.size, int):
        return Column(fresh([extent(a) for a in axes]), ctx.first[node], fact, at + only.size if at < 0 else at)
    return None


def stacked(fact: View, axes: Axes, **index: Any) -> Weight | None:
    """A stacked weight with its expert dimension taken away."""
    value = tensor(fact.root)
    if value is None or not value.dtype.is_floating_point or value.dim() < 2:
        return None
    if any(len(a) != 1 or a[0].kind != "d" for a in axes):
        return None
    return Weight(tuple((Atom("w", a[0].index, a[0].size),) for a in axes), fact.root, index.get("expert"), index.get("routing"), index.get("order"))


def feature_pick(node: Node, fact: Rows, dim: int, at: int) -> Rows | None:
    """One half of features that were viewed as [2, I] or [I, 2]."""
    features = [i for i, a in enumerate(fact.axes) if any(b.kind == "f" for b in a)]
    if len(features) != 2:
        return None
    sizes = [extent(fact.axes[i]) for i in features]
    outer = dim == features[0]
    start, step, length = (at * sizes[1], 1, sizes[1]) if outer else (at, sizes[1], sizes[0])
    expr = Slice(node, fact.expr, start, step, length, sizes[0] * sizes[1])
    axes = [a for i, a in enumerate(fact.axes) if i != dim]
    place = features[0] if not outer else features[1] - 1
    axes[place] = (Atom("f", 0, length),)
    return replace(fact, axes=tuple(axes), expr=expr)


def cut(ctx: Context, node: Node, fact: Any, dim: int, item: slice) -> Any:
    """A slice of a dimension: nothing, one expert's column, or some features."""
    axis = fact.axes[dim]
    if item == _ALL or (same(extent(axis), 1) and item.start in (None, 0) and item.step in (None, 1)):
        return fact
    only = axis[0] if len(axis) == 1 else None
    if only is None or not isinstance(only.size, int) or any(not isinstance(v, int | None) for v in (item.start, item.stop, item.step)):
        return None
    start, stop, step = item.indices(only.size)
    length = max(0, -(-(stop - start) // step))
    if length == only.size:
        return fact
    axes = tuple(((Atom(only.kind, only.index, length),) if i == dim else a) for i, a in enumerate(fact.axes))
    if isinstance(fact, Rows) and only.kind == "f" and step > 0:
        if sum(a.kind == "f" for b in fact.axes for a in b) != 1:
            return None
        return replace(fact, axes=axes, expr=Slice(node, fact.expr, start, step, length, only.size))
    if isinstance(fact, Mask | Table) and only.kind == "e" and length == 1:
        return replace(fact, axes=tuple(() if i == dim else a for i, a in enumerate(fact.axes)), expert=start)
    return None


@rule("select")
def on_select(ctx: Context, node: Node, x: Node, dim: int, index: Any) -> Any:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or not isinstance(index, int):
        return None
    return pick(ctx, node, x, fact, normalize(dim, len(fact.axes)), index)


@rule("narrow")
def on_narrow(ctx: Context, node: Node, x: Node, dim: int, start: Any, length: Any) -> Any:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or not isinstance(start, int) or not isinstance(length, int):
        return None
    return cut(ctx, node, fact, normalize(dim, len(fact.axes)), slice(start, start + length))


@rule("unbind")
def on_unbind(ctx: Context, node: Node, x: Node, dim: int = 0) -> Any:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    at = normalize(dim, len(fact.axes))
    count = extent(fact.axes[at])
    if not isinstance(count, int):
        return None
    return many(pick(ctx, node, x, fact, at, i) for i in range(count))


@rule("chunk", "tensor_split")
def on_chunk(ctx: Context, node: Node, x: Node, chunks: Any, dim: int = 0) -> Any:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum) or not isinstance(chunks, int):
        return None
    size = extent(fact.axes[normalize(dim, len(fact.axes))])
    if not isinstance(size, int) or size % chunks:
        return None
    return _pieces(ctx, node, fact, dim, [size // chunks] * chunks)


@rule("split", "split_with_sizes")
def on_split(ctx: Context, node: Node, x: Node, sizes: Any, dim: int = 0) -> Any:
    fact = ctx.fact(x)
    if not isinstance(fact, Fact) or isinstance(fact, Sum):
        return None
    total = extent(fact.axes[normalize(dim, len(fact.axes))])
    if isinstance(sizes, int) and isinstance(total, int):
        sizes = [min(sizes, total - i) for i in range(0, total, sizes)]
    if not isinstance(sizes, tuple | list) or not all(isinstance(s, int) for s in sizes):
        return None
    return _pieces(ctx, node, fact, dim, list(sizes))


def _pieces(ctx: Context, node: Node, fact: Fact, dim: int, sizes: list[int]) -> Many | None:
    at, start, out = normalize(dim, len(fact.axes)), 0, []
    for size in sizes:
        out.append(cut(ctx, node, fact, at, slice(start, start + size)))
        start += size
    return many(out)


def many(items: Any) -> Many | None:
    """Facts of a tuple, or None if no item has one."""
    found = tuple(items)
    return Many(found) if any(f is not None for f in found) else None


@rule("index_select")
def on_index_select(ctx: Context, node: Node, x: Node, dim: int, index: Node) -> Any:
    return by_tensor(ctx, node, x, [*[_ALL] * normalize(dim, len(out_shape(x))), index])


@rule("embedding")
def on_embedding(ctx: Context, node: Node, ids: Node, table: Node, *_: Any, **__: Any) -> Any:
    return by_tensor(ctx, node, table, [ids])


def by_tensor(ctx: Context, node: Node, x: Node, items: list[Any]) -> Any:
    """Indexing by tensors."""
    added = 0
    while added < len(items) and items[added] is None and tensor(node) is not None:
        added += 1
    if added:
        found = by_tensor(ctx, node, x, items[added:])
        if isinstance(found, Rows) and found.axes and found.axes[0]:
            found = found.with_axes(((found.axes[0][0]._replace(size=out_shape(node)[added]),), *found.axes[1:]))
        return found.with_axes((*((),) * added, *found.axes)) if isinstance(found, Fact) else found
    lead = 0
    while lead < len(items) and items[lead] == _ALL:
        lead += 1
    indices = [ctx.fact(i) if isinstance(i, Node) else i for i in items[lead:]]
    base = ctx.fact(x)
    tail = indices[1:]
    first = indices[0] if indices else None
    if lead == 0 and isinstance(first, Index):
        return by_rows(ctx, node, x, base, first.selection, [first, *tail])
    if lead == 0 and isinstance(first, Mask | Table) and not tail:
        found = selection(first, first.axes)
        return None if found is None else by_mask(ctx, node, x, base, found[0], found[1])
    if lead == 0 and isinstance(first, Table) and len(tail) == 1 and isinstance(tail[0], int) and isinstance(base, View):
        found = selection(first, first.axes)
        return None if found is None else by_mask(ctx, node, x, pick(ctx, node, x, base, len(base.axes) - 1, tail[0]), found[0], found[1])
    if lead == 0 and isinstance(first, Sorted) and not [t for t in tail if t != _ALL]:
        return by_order(ctx, node, base, first)
    if lead == 0 and isinstance(base, Rows) and base.domain.name == "dense" and len([i for i in indices if i != _ALL]) == 2:
        return chosen_outputs(ctx, base, items, indices)
    if lead == 0 and isinstance(first, Range) and isinstance(base, View) and not [t for t in tail if t != _ALL]:
        return by_range(base, first)
    if lead == 0 and isinstance(first, View) and isinstance(base, View) and is_integer(items[0]) and not [t for t in tail if t != _ALL]:
        routing = ctx.routing(first)
        axes = role_axes(first, routing) if routing is not None else None
        rest = stacked(base, base.axes[1:], routing=routing) if axes is not None and base.axes[0] == (Atom("d", 0, base.axes[0][0].size),) else None
        return None if rest is None or axes is None else replace(rest, axes=(*axes, *rest.axes))
    if lead == 1 and isinstance(first, Index) and isinstance(base, Table | View) and not tail and first.of == "token":
        return None
    return None


def chosen_outputs(ctx: Context, base: Rows, items: list[Any], indices: list[Any]) -> Rows | None:
    """``y[arange(T)[:, None], ids]`` (or with the expert dimension first): the outputs of the chosen experts."""
    kinds = ["".join(a.kind for a in axis) for axis in base.axes[:2]]
    if sorted(kinds) != ["e", "t"]:
        return None
    ids, numbers = indices[kinds.index("e")], indices[kinds.index("t")]
    routing = ctx.routing(ids) if isinstance(ids, View) and is_integer(items[kinds.index("e")]) else None
    roles = role_axes(ids, routing) if routing is not None else None
    if routing is None or roles is None or not isinstance(numbers, Range) or not same(numbers.size, routing.num_tokens):
        return None
    if len(roles) != 2 or len(numbers.axes) != 2 or numbers.axes[1] or [a.kind for a in roles[0]] != ["t"] or len(routing.tokens) != 1:
        return None
    if base.domain.routing is not None and base.domain.routing is not routing:
        return None
    return Rows((*roles, *base.axes[2:]), Domain("slots", routing), base.expr)


def by_range(base: View, index: Range) -> View | None:
    """``x[arange(T).repeat_interleave(K)]``: x repeated."""
    axis = index.axes[0] if len(index.axes) == 1 else ()
    if not axis or axis[0].kind != "d" or any(a.kind != "b" for a in axis[1:]) or not same(index.size, extent(base.axes[0])):
        return None
    return base.with_axes(((*base.axes[0], *axis[1:]), *base.axes[1:]))  # type: ignore[no-any-return]


def by_rows(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, indices: list[Any]) -> Any:
    """``x[token_rows]``, ``w[token_rows, slot_rows]``, with None or full slices behind."""
    columns = []
    for i in indices:
        if not isinstance(i, Index):
            break
        if not i.selection.same(chosen):
            return None
        columns.append(i.of)
    rest = indices[len(columns) :]
    if any(r is not None and r != _ALL for r in rest) and isinstance(rest[0], int) is False:
        return None
    rows = row_axis(node)
    if columns == ["token"] and isinstance(base, View) and rest and isinstance(rest[0], int) and chosen.slot == rest[0]:
        return _with_none(Rows((rows,), row_domain(chosen), Gate(node, base.root, True, False, chosen.expert)), rest[1:])
    if columns == ["token"]:
        if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
            base = View(fresh(out_shape(x)), x)
        if isinstance(base, Fill | Sum):
            return Buffer((rows, *((a,) for a in (b[0] for b in base.axes[1:] if b))), x, chosen) if not rest else None
        if isinstance(base, Column) and chosen.slot == base.slot:
            return _with_none(_slot_gate(node, base, chosen, rows), rest)
        if isinstance(base, View) and not rest:
            return take_tokens(ctx, node, base, chosen, rows)
        if isinstance(base, Table) and base.expert == chosen.expert and base.routing is chosen.routing:
            return _with_none(Rows((rows, *base.axes[1:]), row_domain(chosen), gate(node, base)), rest)
        if isinstance(base, View) and chosen.routing.top_k == 1:
            taken = take_tokens(ctx, node, base, chosen, rows)
            return _with_none(taken, rest) if isinstance(taken, Rows) else taken
        if isinstance(base, Table) and rest and rest[0] == chosen.expert and base.routing is chosen.routing:
            column = replace(base, expert=chosen.expert)
            return _with_none(Rows((rows,), row_domain(chosen), gate(node, column)), rest[1:])
        return None
    if columns == ["token", "slot"] and isinstance(base, View):
        if not _is_slot_weight(base, chosen.routing):
            return ctx.lost("tokens-differ", node, detail="the routing weights are not [tokens, slots]")
        return _with_none(Rows((rows,), row_domain(chosen), SlotWeight(node, base.root)), rest)
    return None


def _with_none(rows: Rows, rest: list[Any]) -> Rows | None:
    axes = rows.axes
    for r in rest:
        if r is None:
            axes = (*axes, ())
        elif r != _ALL:
            return None
    return rows.with_axes(axes)  # type: ignore[no-any-return]


def row_domain(chosen: Selection) -> Domain:
    return Domain("selected", chosen.routing, selection=chosen, expert=chosen.expert, slot=chosen.slot)


def _slot_gate(node: Node, column: Column, chosen: Selection, rows: Axis) -> Rows:
    """The weights of one slot for the rows that chose an expert in that slot."""
    axes = (rows, *(() for _ in column.axes[1:]))
    return Rows(axes, row_domain(chosen), Gate(node, column.base.root, True, False, chosen.expert))


def gate(node: Node, table: Table) -> Gate:
    """The weight a table gives the row's expert."""
    if table.slots is not None:
        return Gate(node, table.slots.root, True, False, table.expert)
    source = table.root if table.root is not None else node
    return Gate(node, source, False, table.ones, table.expert)


def _is_slot_weight(view: View, routing: Routing) -> bool:
    dims = [a.index for axis in view.axes for a in axis if a.kind == "d"]
    total: Any = 1
    for axis in view.axes:
        total = total * extent(axis)
    return dims == sorted(dims) and same(total, routing.num_tokens * routing.top_k)


def take_tokens(ctx: Context, node: Node, base: View, chosen: Selection, rows: Axis) -> Any:
    """Rows of a plain [tokens, H] tensor for the tokens of an expert."""
    token_axes, features = base.axes[:1], base.axes[1:]
    if not same(extent(token_axes[0]), chosen.routing.num_tokens):
        return ctx.lost("tokens-differ", node, detail=f"{extent(token_axes[0])} rows are indexed by {chosen.routing.num_tokens} tokens")
    expr = token(node, base, list(token_axes), list(features))
    if expr is None:
        return ctx.lost("tokens-differ", node, detail="the indexed tensor is not a plain [tokens, features] tensor")
    if chosen.routing.top_k == 1 and not any(features):
        return Rows((rows, *features), row_domain(chosen), SlotWeight(node, base.root))
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in features))
    return Rows(axes, row_domain(chosen), expr)


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


def by_mask(ctx: Context, node: Node, x: Node, base: Any, chosen: Selection, columns: tuple[str, ...]) -> Any:
    """``x[mask]`` with a boolean mask over tokens, or over tokens and slots."""
    rows = row_axis(node)
    if columns == ("token",):
        if isinstance(base, Sum) and base.parts[0].rows.domain.routing is not chosen.routing:
            base = View(fresh(out_shape(x)), x)
        if isinstance(base, Fill | Sum):
            return Buffer((rows,), x, chosen)
        if isinstance(base, Column) and chosen.slot == base.slot:
            return _slot_gate(node, base, chosen, rows)
        if isinstance(base, View):
            return take_tokens(ctx, node, base, chosen, rows)
        if isinstance(base, Table) and base.expert == chosen.expert and base.routing is chosen.routing:
            return Rows((rows, *base.axes[1:]), row_domain(chosen), gate(node, base))
        return None
    if isinstance(base, View) and _is_slot_weight(base, chosen.routing) and columns == ("token", "slot"):
        return Rows((rows,), row_domain(chosen), SlotWeight(node, base.root))
    return None


def by_order(ctx: Context, node: Node, base: Any, index: Sorted) -> Any:
    """Indexing by the sorted order of all slots, by its tokens, or by its inverse."""
    order, routing = index.order, index.order.routing
    rows: Axis = (Atom("r", 0, routing.num_tokens * routing.top_k),)
    domain = Domain("sorted", routing, order=order)
    if isinstance(base, Rows) and base.domain.name == "sorted" and index.of == "inverse" and base.domain.order is order:
        slots: Axis = (*(Atom("t", i, s) for i, s in enumerate(routing.tokens)), Atom("k", 0, routing.top_k))
        return replace(base, axes=(slots, *base.axes[1:]), domain=Domain("slots", routing))
    if isinstance(base, Rows) and base.domain.name == "slots" and index.of == "slot" and base.domain.same(Domain("slots", routing)):
        return replace(base, axes=(rows, *base.axes[1:]), domain=domain)
    if isinstance(base, Range) and index.of == "slot" and base.axes:
        return _range_by_order(base, index, rows)
    if isinstance(base, Sorted) and base.of == "slot" and index.of == "slot":
        return None
    if not isinstance(base, View):
        return None
    if index.of == "slot" and base.root is routing.node and len(base.axes) == 1:
        return Sorted((rows,), order, "ids")
    if index.of == "ids":
        rest = stacked(base, base.axes[1:], routing=routing, order=order)
        return None if rest is None else replace(rest, axes=(rows, *rest.axes))
    count = routing.num_tokens if index.of == "token" else routing.num_tokens * routing.top_k
    if not same(extent(base.axes[0]), count):
        return ctx.lost("tokens-differ", node, detail=f"{extent(base.axes[0])} rows are indexed by {count} sorted slots")
    expr = slot_value(node, base, routing) if index.of == "slot" else token(node, base, [base.axes[0]], list(base.axes[1:]))
    if index.of == "inverse" or expr is None:
        return None
    axes = (rows, *((Atom("f", 0, extent(a)),) if a and not same(extent(a), 1) else () for a in base.axes[1:]))
    return Rows(axes, domain, expr)


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
    return SlotWeight(node, base.root) if _is_slot_weight(base, routing) else None


def _range_by_order(base: Range, index: Sorted, rows: Axis) -> Sorted | None:
    """``arange(T).repeat_interleave(K)[perm]``: the token of each sorted slot."""
    axis = base.axes[0]
    routing = index.order.routing
    repeated = len(axis) == 2 and axis[0].kind == "d" and axis[1].kind == "b" and same(axis[1].size, routing.top_k)
    if len(base.axes) == 1 and repeated and same(base.size, routing.num_tokens):
        return Sorted((rows,), index.order, "token")
    return Sorted((rows,), index.order, "slot") if len(base.axes) == 1 and same(base.size, routing.num_tokens * routing.top_k) else None


__all__ = ["Order", "by_order", "by_tensor", "gate", "many", "slot_value", "take_tokens", "token"]
