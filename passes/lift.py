"""From facts to regions: a complete sum over the chosen experts becomes a Region, or a Refusal that names the node."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.context import Context
from moefuse.passes.expr import ExpertVector, Expr, Gate, Linear, SharedVector, SlotWeight, Token, has_linear, walk, weight_leaves
from moefuse.passes.facts import (
    Buffer,
    Combined,
    Counts,
    Fact,
    Fill,
    Hit,
    Index,
    IndexMatrix,
    Lost,
    Many,
    Mask,
    Part,
    Pieces,
    Range,
    Routing,
    RowNumber,
    Rows,
    Sorted,
    Span,
    Sum,
    Table,
    View,
    Weight,
)
from moefuse.passes.generalise import generalise
from moefuse.passes.instances import instances
from moefuse.passes.leftovers import unread
from moefuse.passes.ops import SIZE_QUERIES, tensor
from moefuse.passes.sizes import shape_of
from moefuse.passes.templates import factors, same_expr, vanishes
from moefuse.spec import Domain

#: operations that take only the shape, dtype or device of some of their arguments
_LOOKS_AT: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("type_as", "view_as", "reshape_as", "expand_as"), (1,)),
    **dict.fromkeys(("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full"), (0,)),
    **dict.fromkeys(("size", "sym_size", "numel", "dim"), (0,)),
}

#: where the ops are at least as fast as what they replace; elsewhere the program stays as it is
_DEVICES = frozenset(("cpu", "cuda"))

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Weightless:
    """Experts behind the last one with weights: each adds ``expr`` of its token (often the token itself), routing weight included."""

    expr: Expr
    numbers: range


@dataclass(eq=False)
class Region:
    """One mixture of experts of the program.

    Attributes:
        anchor: the operation after which the result is complete; the new op goes behind it.
        holders: nodes that hold the result (several when it was accumulated in place).
        expr: what expert e adds for one (token, slot), routing weight included; leaves cover all experts.
        base: a tensor that the sum was added to, or None.
        parts: each expert's share, where the program adds one after another.
        rest: what experts without weights add, if there are such.
        nodes: everything computed only for this region, leaves excluded.
        leaves: tensors the region reads.
    """

    anchor: Node
    holders: list[Node]
    domain: Domain
    routing: Routing
    expr: Expr
    num_experts: int
    base: Node | None
    parts: tuple[Part, ...] = ()
    rest: Weightless | None = None
    nodes: set[Node] = field(default_factory=set)
    leaves: list[Node] = field(default_factory=list)

    @property
    def value(self) -> Node:
        """A node whose fake value is the result's (an assignment by index has none of its own)."""
        return next((h for h in (self.anchor, *self.holders) if tensor(h) is not None), self.anchor)


@dataclass(frozen=True, eq=False)
class Refused:
    """A sum over experts that is not rewritten, and the routing it belongs to."""

    lost: Lost
    routing: Routing | None


def lift(ctx: Context) -> Iterator[Region | Refused]:
    """Every region of the graph, or why a complete-looking one is refused."""
    holders: dict[int, list[Node]] = {}
    for node, fact in ctx.facts.items():
        holders.setdefault(id(fact), []).append(node)
    for key, (_, nodes) in ctx.finished.items():
        holders.setdefault(key, []).extend(n for n in nodes if n not in holders.get(key, ()))
    for fact in _complete(ctx):
        rows = [fact.rows] if isinstance(fact, Combined) else [p.rows for p in fact.parts]
        routing = next((r.domain.routing for r in rows if r.domain.routing is not None), None)
        found = _combined(ctx, fact, holders[id(fact)]) if isinstance(fact, Combined) else _summed(ctx, fact, holders[id(fact)])
        found = _checked(ctx, found) if isinstance(found, Region) else found
        if found is not None:
            yield Refused(found, routing) if isinstance(found, Lost) else found


def _complete(ctx: Context) -> list[Any]:
    """Combined facts, and for each accumulator the fact with the most parts; each once."""
    best: dict[Any, Sum] = {}
    out: dict[int, Any] = {}
    known_facts = [*ctx.facts.values(), *(fact for fact, _ in ctx.finished.values())]
    for fact in known_facts:
        if isinstance(fact, Sum):
            for part in fact.parts[:1] + fact.parts[-1:]:
                known = best.get(part)
                if known is None or len(fact.parts) > len(known.parts):
                    best[part] = fact
        elif isinstance(fact, Combined):
            out[id(fact)] = fact
    for fact in known_facts:
        if isinstance(fact, Sum) and all(len(best[p].parts) <= len(fact.parts) for p in (fact.parts[0], fact.parts[-1])):
            out[id(fact)] = fact
    return list(out.values())


def _combined(ctx: Context, fact: Combined, holders: list[Node]) -> Region | Lost | None:
    rows = fact.rows
    routing = rows.domain.routing
    if routing is None or not has_linear(rows.expr):
        return None
    anchor = min(holders, key=lambda n: ctx.position[n] if ctx.calls[n] is not None and not _target_of_write(ctx, n, fact) else 1 << 60)
    if rows.domain.name == "dense" and not vanishes(rows.expr):
        return ctx.lost("not-weighted", anchor)
    count = _num_experts(ctx, rows.expr, anchor)
    if isinstance(count, Lost):
        return count
    region = Region(anchor, holders, rows.domain.name, routing, rows.expr, count, fact.base)  # type: ignore[arg-type]
    if _needs_distinct(rows.expr, False, False) and not routing.distinct:
        return ctx.lost("ids-not-distinct", anchor)
    return region


def _target_of_write(ctx: Context, node: Node, fact: Any) -> bool:
    """Whether a holder only holds the fact because a later operation wrote to it."""
    call = ctx.calls[node]
    writes = ctx.writes.get(ctx.storage[node], ())
    return call is not None and not call.inplace and any(ctx.facts.get(w) is fact for w in writes)


def _summed(ctx: Context, fact: Sum, holders: list[Node]) -> Region | Lost | None:
    parts = [p for p in fact.parts if has_linear(p.rows.expr)]
    anchor = _anchor(ctx, fact, holders)
    if not parts:
        return None
    routing = next((p.rows.domain.routing for p in parts if p.rows.domain.routing is not None), None)
    if routing is None:
        return None
    experts = [p.rows.domain.expert for p in fact.parts]
    if any(p.rows.domain.routing not in (None, routing) for p in fact.parts) or any(e is None for e in experts):
        return ctx.lost("experts-differ", anchor, expert="?", detail="its rows are chosen by another routing")
    rest = _weightless(ctx, fact, anchor)
    if isinstance(rest, Lost):
        return rest
    found = _over_slots(ctx, parts, routing, anchor, rest)
    if isinstance(found, Lost):
        return found
    expr, count = found
    names = {p.rows.domain.name for p in parts}
    by_token = any(p.rows.domain.selection is not None and p.rows.domain.selection.by_token for p in parts)
    per_slot = parts[0].rows.domain.slot is not None
    if len(names) != 1:
        return ctx.lost("experts-differ", anchor, expert="?", detail="some experts see every token and some only theirs")
    if names == {"masked"} and not vanishes(expr):
        return ctx.lost("not-weighted", anchor)
    if not per_slot and _needs_distinct(expr, fact.once, by_token) and not routing.distinct:
        return ctx.lost("ids-not-distinct", anchor)
    return Region(anchor, holders, names.pop(), routing, expr, count, fact.base, fact.parts, rest)  # type: ignore[arg-type]


def _weightless(ctx: Context, fact: Sum, anchor: Node) -> Weightless | Lost | None:
    """The experts of a loop that have no weights: one expression of the token for all of them, times the routing weight of the slot."""
    parts = [p for p in fact.parts if not has_linear(p.rows.expr)]
    if not parts:
        return None
    found = _common(ctx, parts, anchor)
    if isinstance(found, Lost):
        return found
    expr, numbers = found
    leaves = {type(e) for e in walk(expr) if isinstance(e, Token | SlotWeight | Gate | ExpertVector | SharedVector)}
    by_slot = all(p.rows.domain.name == "selected" and p.rows.domain.slot is None and _exact(p) for p in fact.parts)
    weights = [f for f in factors(expr) if isinstance(f, SlotWeight)]
    if (
        fact.once
        or not by_slot
        or leaves != {Token, SlotWeight}
        or len(weights) != 1
        or numbers != list(range(numbers[0], numbers[-1] + 1))
    ):
        return ctx.lost("experts-differ", anchor, expert=str(numbers[0]), detail="it has no weights, and is not its token times a weight")
    return Weightless(expr, range(numbers[0], numbers[-1] + 1))


def _exact(part: Part) -> bool:
    """Whether a share is one row for each slot that chose the expert, not one for each token."""
    selection = part.rows.domain.selection
    return selection is not None and not selection.by_token


def _over_slots(ctx: Context, parts: list[Part], routing: Routing, anchor: Node, rest: Weightless | None = None) -> tuple[Expr, int] | Lost:
    """The experts' common expression; where the loop also runs over slots, the same one for every slot."""
    slots = {p.rows.domain.slot for p in parts}
    if slots != {None} and slots != set(range(routing.top_k)):
        return ctx.lost("missing-experts", anchor, present=f"slots {sorted(map(str, slots))}", count=str(routing.top_k))
    found = [_over_experts(ctx, [p for p in parts if p.rows.domain.slot == s], anchor, rest) for s in sorted(slots, key=str)]
    first = found[0]
    if any(e.slot not in (None, p.rows.domain.slot) for p in parts for e in walk(p.rows.expr) if isinstance(e, SlotWeight)):
        return ctx.lost("experts-differ", anchor, expert="0", detail="weighted by the routing weight of another slot")
    for other in found[1:]:
        if isinstance(other, Lost):
            return other
        if not isinstance(first, Lost) and not same_expr(first[0], other[0]):
            return ctx.lost("experts-differ", anchor, expert="0", detail="in another slot it computes something else")
    return first


def _over_experts(ctx: Context, parts: list[Part], anchor: Node, rest: Weightless | None = None) -> tuple[Expr, int] | Lost:
    """(common expression, E) of one part for each expert with weights."""
    found = _common(ctx, parts, anchor)
    if isinstance(found, Lost):
        return found
    expr, numbers = found
    # Weights that experts without weights have all the same are never read.
    count = _num_experts(ctx, expr, anchor, {len(numbers), len(numbers) + len(rest.numbers)} if rest is not None else set())
    if isinstance(count, Lost):
        return count
    every = [*numbers, *(rest.numbers if rest is not None else ())]
    if every != list(range(count + (len(rest.numbers) if rest is not None else 0))):
        run = numbers == list(range(numbers[0], numbers[-1] + 1))
        return ctx.lost("missing-experts", anchor, present=f"{numbers[0]}..{numbers[-1]}" if run else str(numbers), count=str(count))
    return expr, count


def _common(ctx: Context, parts: list[Part], anchor: Node) -> tuple[Expr, list[int]] | Lost:
    """(common expression, numbers of the experts) of one part for each expert."""
    ordered = sorted(parts, key=lambda p: int(p.rows.domain.expert or 0))
    written = [instances(ctx.siblings, p, ordered) for p in ordered]
    if any(found is None for found in written):
        return ctx.lost("experts-differ", anchor, expert="?", detail="what it computes may depend on its number")
    pairs = sorted((pair for found in written for pair in found or ()), key=lambda pair: int(pair[0]))
    experts: list[int] = [number for number, _ in pairs]
    expr = generalise([expr for _, expr in pairs], experts, anchor)
    if isinstance(expr, Lost):
        return expr
    by_row = ctx.by_row()
    if by_row and not all(_parametric(ctx, p.rows, by_row) for p in ordered):
        return ctx.lost("experts-differ", anchor, expert="?", detail="what it computes may depend on its number")
    return expr, sorted(number for e in experts for number in ctx.members(e))


def _from_lists(ctx: Context, row: Node) -> Collection[Node] | None:
    """Weights that a representative has from lists of modules; None for a twin, which stands for no other, so that any weight will do."""
    if any(row is known.twin_node for known in ctx.siblings.values()):
        return None
    return ctx.siblings[row].siblings if row in ctx.siblings else ()


def _parametric(ctx: Context, rows: Rows, by_row: set[Node]) -> bool:
    """Whether an expert's number is used for nothing but to choose its tokens and its weights: then it may stand for others."""
    number = rows.domain.expert
    if not isinstance(number, RowNumber):
        return not any(source in by_row for source in sources(rows.expr))
    own = _from_lists(ctx, number.row)
    stacked = [leaf for leaf in weight_leaves(rows.expr) if leaf.stacked or (own is not None and leaf.source not in own)]
    chosen = [leaf.expert for leaf in stacked] + [e.expert for e in walk(rows.expr) if isinstance(e, Gate)]
    if rows.domain.selection is not None:
        chosen.append(rows.domain.selection.expert)
    return all(c is not None and c == number for c in chosen) and not any(source in by_row for source in sources(rows.expr))


def _anchor(ctx: Context, fact: Sum, holders: list[Node]) -> Node:
    last = max(ctx.position[p.node] for p in fact.parts)
    after = [h for h in holders if ctx.position[h] >= last]
    return min(after, key=ctx.position.__getitem__) if after else max((p.node for p in fact.parts), key=ctx.position.__getitem__)


def _needs_distinct(expr: Expr, once: bool, by_token: bool) -> bool:
    """Whether a repeated id within a token would be treated differently from a sum over slots."""
    gates = [e for e in walk(expr) if isinstance(e, Gate)]
    exact = any(g.slots for g in gates)
    return once or any(not g.slots and not g.ones for g in gates) or ((by_token or bool(gates)) and not exact)


def _num_experts(ctx: Context, expr: Expr, node: Node, with_rest: Collection[int] = ()) -> int | Lost:
    """E, from the weights themselves; where experts without weights follow, a stack may have room for those too (``with_rest``: both)."""
    counts: dict[int, str] = {}
    for leaf in weight_leaves(expr):
        value = tensor(leaf.source)
        size = shape_of(value)[0] if leaf.stacked and value is not None else len(leaf.parts)
        if not leaf.stacked and not leaf.parts:
            return ctx.lost("experts-differ", node, expert="?", detail=f"`{leaf.source.name}` is one weight for all experts")
        if not isinstance(size, int):
            return ctx.lost("missing-experts", node, present="a dynamic number", count="?")
        counts.setdefault(size, leaf.source.name)
    if with_rest and counts.keys() <= set(with_rest):
        return min(with_rest)
    if len(counts) != 1:
        return ctx.lost("missing-experts", node, present=", ".join(f"{n} in {name}" for n, name in counts.items()), count="one number")
    return next(iter(counts))


def sources(expr: Expr) -> list[Node]:
    """Every tensor an expression reads, weights included."""
    out: dict[Node, None] = {}
    for e in walk(expr):
        match e:
            case Token() | SlotWeight() | SharedVector():
                out[e.source] = None
            case Gate(ones=False):
                out[e.source] = None
    for leaf in weight_leaves(expr):
        out.update(dict.fromkeys(leaf.parts or (leaf.source,)))
    return list(out)


def _checked(ctx: Context, region: Region) -> Region | Lost:
    """The region with its nodes, if nothing in the program around it forbids the rewrite."""
    region.domain = _spelling(ctx, region)
    bounds = ctx.sentinels.get(region.routing, set())
    if bounds - {region.num_experts}:
        return ctx.lost("missing-experts", region.anchor, present=f"below {min(bounds)}", count=str(region.num_experts))
    rest = sources(region.rest.expr) if region.rest is not None else []
    region.leaves = list(dict.fromkeys((*sources(region.expr), *rest, region.routing.node)))
    region.nodes = slice_of(ctx, region)
    for node in unread(ctx):
        if not region.nodes.isdisjoint(node.all_input_nodes):
            region.nodes.add(node)
    if region.base is not None:
        ctx.erasable.update({w: True for w in ctx.writes.get(ctx.storage[region.base], ()) if w in region.nodes})
    for check in (_types, _modes, _mutations, _feeds_itself, _escapes):
        problem = check(ctx, region)
        if problem is not None:
            return problem
    return region


def _spelling(ctx: Context, region: Region) -> Domain:
    """The rows the projections ran on (sorted rows are unsorted before they are summed)."""
    for e in walk(region.expr):
        fact = ctx.facts.get(e.node) if isinstance(e, Linear) else None
        if isinstance(fact, Rows):
            return fact.domain.name  # type: ignore[return-value]
    return region.domain


def _read_by(ctx: Context, node: Node) -> list[Node]:
    """The inputs whose values an operation reads; ``zeros_like(x)`` and ``y.type_as(x)`` only look at x's shape or dtype.

    The number of an expert's rows is a value of the region, though: only its run knows it.
    """
    call = ctx.calls[node]
    if call is not None and call.name in SIZE_QUERIES and isinstance(ctx.facts.get(node.all_input_nodes[0]), Rows | Index | IndexMatrix):
        return node.all_input_nodes
    if call is None or call.name not in _LOOKS_AT:
        return node.all_input_nodes
    values = [a for i, a in enumerate(call.args) if i not in _LOOKS_AT[call.name]]
    return [a for a in values if isinstance(a, Node)]


def slice_of(ctx: Context, region: Region) -> set[Node]:
    """Everything between the leaves and the anchor, in-place writes included."""
    stop = set(region.leaves) | ({region.base} if region.base is not None else set())
    kept = {ctx.storage[n] for n in stop}
    last = ctx.position[region.anchor]
    seen: set[Node] = set()
    stack = [region.anchor, *(h for h in region.holders if ctx.position[h] <= last)]
    while stack:
        node = stack.pop()
        if node in seen or node in stop or ctx.first[node] in stop or ctx.calls.get(node) is None:
            continue
        seen.add(node)
        stack.extend(_read_by(ctx, node))
        stack.extend(w for w in ctx.writes.get(ctx.storage[node], ()) if ctx.position[w] <= last and ctx.storage[node] not in kept)
    if region.base is not None:
        seen.update(w for w in ctx.writes.get(ctx.storage[region.base], ()) if w in region.holders and ctx.position[w] <= last)
    return seen


def _types(ctx: Context, region: Region) -> Lost | None:
    """Dtypes and devices the ops accept."""
    values = [tensor(n) for leaf in weight_leaves(region.expr) for n in (leaf.parts or (leaf.source,))]
    devices = {v.device.type for v in values if v is not None}
    for v in values:
        if v is not None and v.dtype not in _FLOATS:
            return ctx.lost("dtype-unsupported", region.anchor, dtype=str(v.dtype).removeprefix("torch."), detail="expert weights")
    if devices - _DEVICES:
        return ctx.lost("device-unsupported", region.anchor, device=", ".join(sorted(devices)), detail="it has no kernel there")
    dtypes = {v.dtype for v in values if v is not None}
    if len(dtypes) > 1:
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        return ctx.lost("dtype-unsupported", region.anchor, dtype=names, detail="expert weights of several dtypes")
    for e in walk(region.expr):
        if isinstance(e, Linear):
            out, weight = tensor(e.node), tensor(e.weight.source)
            if out is not None and weight is not None and out.dtype != weight.dtype:
                names = f"{out.dtype} from {weight.dtype} weights".replace("torch.", "")
                return ctx.lost("dtype-unsupported", region.anchor, dtype=names, detail="autocast inside the experts")
    return None


def _modes(ctx: Context, region: Region) -> Lost | None:
    """Grad mode and autocast are the same for everything that is differentiated, and for the sum."""
    mode = ctx.mode[region.anchor]
    for node in sorted(region.nodes, key=ctx.position.__getitem__):
        value, fact = tensor(node), ctx.facts.get(node)
        counts = isinstance(fact, Counts | Hit | Span | Sorted | Range | Fill) or (isinstance(fact, Mask) and fact.weight is None)
        if value is None or not value.dtype.is_floating_point or counts or (isinstance(fact, Table) and fact.ones):
            continue
        here = ctx.mode[node]
        # A view or a cast computes the same under every autocast.
        casts = here[1] == mode[1] or isinstance(fact, View | Weight)
        # What is added without gradients has none, however it was computed; an accumulator keeps those that it had.
        grads = here[0] == mode[0] or (here[0] and not isinstance(fact, Sum | Buffer))
        if not casts or not grads:
            return ctx.lost("context-differs", node)
    return None


def _mutations(ctx: Context, region: Region) -> Lost | None:
    """No leaf is written to between its first use in the region and the anchor."""
    if region.base is not None:
        root = ctx.storage[region.base]
        written = any(w in region.nodes for w in ctx.writes.get(root, ()))
        if written and (root.op == "placeholder" or (root is not region.base and root not in region.nodes)):
            return ctx.lost("mutation", region.anchor, name=root.name)
    for source in region.leaves:
        used = [n for n in region.nodes if any(ctx.storage[i] is ctx.storage[source] for i in n.all_input_nodes)]
        first = min(used, key=ctx.position.__getitem__, default=None)
        write = ctx.written_between(source, first, region.anchor) if first is not None else None
        if write is not None and source is not region.base:
            return ctx.lost("mutation", write, name=source.name)
    return None


def _feeds_itself(ctx: Context, region: Region) -> Lost | None:
    """No input of the region is computed from what its experts computed."""
    inside = {n for n in region.nodes if _expert_value(ctx.facts.get(n))} | {e.node for e in walk(region.expr) if isinstance(e, Linear)}
    first = min((ctx.position[n] for n in inside), default=0)
    for source in (s for s in region.leaves if ctx.calls.get(s) is not None):
        stack, seen = [source], {source}
        while stack:
            node = stack.pop()
            if node in inside:
                return ctx.lost("value-escapes", source, name=node.name)
            new = [i for i in node.all_input_nodes if i not in seen and ctx.position[i] >= first]
            seen.update(new)
            stack.extend(new)
    return None


def _escapes(ctx: Context, region: Region) -> Lost | None:
    """Nothing the experts computed is read outside the region."""
    last = ctx.position[region.anchor]
    for node in sorted(region.nodes, key=ctx.position.__getitem__):
        holder = node in region.holders
        if not holder and not _expert_value(ctx.facts.get(node)):
            continue
        for user in node.users:
            call = ctx.calls.get(user)
            if user in region.nodes or (call is not None and call.name in SIZE_QUERIES):
                continue
            if holder and ctx.position[user] > last:
                continue
            code = "hook" if call is not None and call.name == "register_hook" else "value-escapes"
            return ctx.lost(code, user, name=node.name)
    stale = [a for h in region.holders for a in ctx.aliases[ctx.storage[h]] if a not in region.holders and a not in region.nodes]
    for alias in stale:
        written = any(w in region.nodes for w in ctx.writes.get(ctx.storage[alias], ()))
        if written and ctx.position[alias] < last and any(u not in region.nodes for u in alias.users):
            return ctx.lost("alias", region.anchor, name=alias.name)
    return None


def _expert_value(fact: Any) -> bool:
    """Whether a fact is something an expert computed."""
    if isinstance(fact, Many):
        return any(_expert_value(f) for f in fact.items)
    if isinstance(fact, Rows):
        return has_linear(fact.expr)
    return isinstance(fact, Sum | Buffer | Pieces | Lost)


__all__ = ["Fact", "Region", "lift", "slice_of", "sources", "weight_leaves"]
