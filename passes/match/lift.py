"""From facts to regions: a complete sum over the chosen experts becomes a Region, or a Refusal that names the node."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import FILLS
from moefuse.passes.graph.sizes import product, same, shape_of
from moefuse.passes.infer.routings import shared_routing
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.anti_unify import for_all, generalise, no_rule
from moefuse.passes.ir.axes import Axes, atoms
from moefuse.passes.ir.expr import ExpertVector, Expr, Gate, Op, SharedVector, SlotWeight, Token, has_linear, rebuilt, walk, weight_leaves
from moefuse.passes.ir.expr_algebra import factors, same_expr
from moefuse.passes.ir.facts import (
    Combined,
    Lost,
    Part,
    PerSlot,
    Routing,
    RowNumber,
    Rows,
    Sum,
)
from moefuse.passes.ir.regions import Refused, Region, Summed, Weightless, sources
from moefuse.passes.match import missing
from moefuse.passes.match.activations import vanishes
from moefuse.passes.match.distinct import may_repeat
from moefuse.passes.match.families import masks_differ
from moefuse.passes.match.ids_outside import outside
from moefuse.passes.match.joined import met
from moefuse.passes.match.lowrank import observed, read_elsewhere, refused, taken_apart
from moefuse.passes.match.representative import instances
from moefuse.passes.match.safety import checked
from moefuse.passes.match.unrecognised import unread, unread_stacks


def lift(ctx: Context) -> Iterator[Region | Refused]:
    """Every region of the graph, or why a complete-looking one is refused."""
    holders: dict[int, list[Node]] = {}
    for node, fact in ctx.facts.items():
        holders.setdefault(id(fact), []).append(node)
    for key, (_, nodes) in ctx.finished.items():
        holders.setdefault(key, []).extend(n for n in nodes if n not in holders.get(key, ()))
    for fact in _complete(ctx):
        rows = [fact.rows] if isinstance(fact, Combined | PerSlot) else [p.rows for p in fact.parts]
        routing = next((r.domain.routing for r in rows if r.domain.routing is not None), None)
        found = _combined(ctx, fact, holders[id(fact)]) if isinstance(fact, Combined | PerSlot) else _summed(ctx, fact, holders[id(fact)])
        axes = [fact.axes] if isinstance(fact, Combined) else [r.axes for r in rows]
        if isinstance(found, Region) and not all(map(_in_order, axes)):
            found = ctx.lost("tokens-differ", found.anchor, detail="the sum does not have its tokens first and its features last")
        anchor = found.anchor if isinstance(found, Region) else None
        found = _apart(ctx, _placed(ctx, checked(ctx, found))) if isinstance(found, Region) else found
        if found is not None:
            yield Refused(found, routing, anchor) if isinstance(found, Lost) else found
    yield from unread_stacks(ctx)


def _in_order(axes: Axes) -> bool:
    """Whether features come last, and tokens in their own order: what the ops return, but for how dimensions are flattened."""
    order = [a for a in atoms(axes) if not same(a.size, 1)]
    features = [a.kind == "f" for a in order]
    return features == sorted(features) and all(
        [a.index for a in order if a.kind == kind] == sorted(a.index for a in order if a.kind == kind) for kind in "tf"
    )


def _apart(ctx: Context, found: Region | Lost) -> Region | Lost:
    """The region with its weights' low-rank terms beside the projections, where that is one op."""
    apart = taken_apart(ctx, found) if isinstance(found, Region) else None
    if isinstance(found, Lost) or apart is None:
        return found
    if isinstance(apart, Summed):
        return replace(found, summed=apart)
    other = _placed(ctx, checked(ctx, apart.region))
    if isinstance(other, Lost):
        return replace(found, summed=refused(apart.sums, other)) if apart.sums else found
    hooked = observed(ctx, other, apart.sums)
    if hooked is not None:
        return replace(found, summed=hooked)
    return replace(other, summed=other.summed or read_elsewhere(ctx, other, apart.sums))


def _placed(ctx: Context, found: Region | Lost) -> Region | Lost:
    """The region, and what it means by ids that belong to no expert."""
    means = outside(ctx, found) if isinstance(found, Region) else None
    if isinstance(found, Lost) or isinstance(means, Lost):
        return found if isinstance(found, Lost) else means  # type: ignore[return-value]
    return replace(found, outside=means)


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
        elif isinstance(fact, Combined | PerSlot):
            out[id(fact)] = fact
    further = {p.of for fact in known_facts if isinstance(fact, Sum) for p in fact.parts}
    further |= {p for parts in ctx.segments.values() for p in parts}  # tables of one slot, beside each other
    for fact in known_facts:
        if not isinstance(fact, Sum) or further.issuperset(fact.parts):
            continue
        if all(len(best[p].parts) <= len(fact.parts) for p in (fact.parts[0], fact.parts[-1])):
            out[id(fact)] = fact
    return _longest(list(out.values()))


def _longest(found: list[Any]) -> list[Any]:
    """Without the sums that another one adds to its own, those in the middle of it, too, and those with nothing more (``out + 0``)."""
    whole: dict[Part, Sum] = {}
    first = {fact.parts: fact for fact in reversed(found) if isinstance(fact, Sum)}
    for fact in sorted(first.values(), key=lambda f: len(f.parts)):
        whole.update(dict.fromkeys(fact.parts, fact))
    return [f for f in found if not isinstance(f, Sum) or (first[f.parts] is f and len(whole[f.parts[0]].parts) == len(f.parts))]


def _combined(ctx: Context, fact: Combined | PerSlot, holders: list[Node]) -> Region | Lost | None:
    rows = fact.rows
    routing = rows.domain.routing
    if routing is None or not has_linear(rows.expr):
        return None
    anchor = min(holders, key=lambda n: ctx.position[n] if ctx.calls[n] is not None and not _target_of_write(ctx, n, fact) else 1 << 60)
    if rows.domain.name == "dense" and not vanishes(rows.expr):
        return ctx.lost("not-weighted", anchor)
    expr = for_all(rows.expr)
    count = _num_experts(ctx, expr, anchor)
    if isinstance(count, Lost):
        return count
    base = fact.base if isinstance(fact, Combined) else None
    region = Region(anchor, tuple(holders), rows.domain.name, routing, expr, count, base, per_slot=isinstance(fact, PerSlot))  # type: ignore[arg-type]
    if _needs_distinct(rows.expr, False, False) and not routing.distinct:
        return may_repeat(ctx, anchor, routing)
    return region


def _target_of_write(ctx: Context, node: Node, fact: Any) -> bool:
    """Whether a holder only holds the fact because a later operation wrote to it."""
    call = ctx.calls[node]
    writes = ctx.writes.get(ctx.storage[node], ())
    ended = ctx.finished.get(id(fact), (None, []))[1]
    return call is not None and not call.inplace and any(ctx.facts.get(w) is fact or w in ended for w in writes)


def _summed(ctx: Context, fact: Sum, holders: list[Node]) -> Region | Lost | None:
    parts = [p for p in fact.parts if has_linear(p.rows.expr)]
    anchor = _anchor(ctx, fact, holders)
    if not parts:
        return unread(ctx, [p.rows.expr for p in fact.parts], selected=all(p.rows.domain.name == "selected" for p in fact.parts))
    routing = next((p.rows.domain.routing for p in parts if p.rows.domain.routing is not None), None)
    if routing is None:
        return None
    changed = _changed_before(ctx, fact, routing)
    if changed is not None:
        return changed
    if all(p.rows.domain.name == "slots" for p in parts):
        return _slot_by_slot(ctx, fact, routing, anchor, holders)
    if (differ := _apart_in(ctx, fact, routing, anchor)) is not None:
        return differ
    rest = _weightless(ctx, fact, anchor)
    if isinstance(rest, Lost):
        return rest
    found = _over_slots(ctx, parts, routing, anchor, rest)
    if isinstance(found, Lost):
        return (met(ctx, fact, routing) if found.code == "missing-experts" else None) or found
    expr, count = found
    by_token_of = _of_sequences(ctx, parts, routing)
    if isinstance(by_token_of, Lost):
        return by_token_of
    routing = by_token_of
    names = {p.rows.domain.name for p in parts}
    by_token = any(p.rows.domain.selection is not None and p.rows.domain.selection.by_token for p in parts)
    per_slot = parts[0].rows.domain.slot is not None
    if len(names) != 1:
        return ctx.lost("experts-differ", anchor, expert="?", detail="some experts see every token and some only theirs")
    if names == {"masked"} and not vanishes(expr):
        return ctx.lost("not-weighted", anchor)
    if not per_slot and _needs_distinct(expr, fact.once, by_token) and not routing.distinct:
        return may_repeat(ctx, anchor, routing)
    base = None if _all_replaced(ctx, fact, routing, count) else fact.base
    replaced = fact.replaced and base is not None
    return Region(anchor, tuple(holders), names.pop(), routing, expr, count, base, fact.parts, rest, replaced=replaced)  # type: ignore[arg-type]


def _apart_in(ctx: Context, fact: Sum, routing: Routing, anchor: Node) -> Lost | None:
    """The refusal of a sum whose parts have their tokens in several ways."""
    if any(p.rows.domain.routing not in (None, routing) for p in fact.parts):
        return masks_differ(ctx, fact.parts, anchor)
    if any(p.rows.domain.expert is None for p in fact.parts):
        return ctx.lost("experts-differ", anchor, expert="?", detail="some are computed one by one, and some all at once")
    return None


def _all_replaced(ctx: Context, fact: Sum, routing: Routing, count: int) -> bool:
    """Whether nothing is left of a tensor of one constant, or of memory that nothing initialised: every token has an expert."""
    made = None if fact.base is None else ctx.calls[fact.base]
    return fact.replaced and made is not None and made.name in FILLS and routing.whole and routing.within(count)


def _changed_before(ctx: Context, fact: Sum, routing: Routing) -> Lost | None:
    """The operation that a sum over some of the experts goes through before the others are added to it; None if there is none."""
    base = fact.base
    if base is None:
        return None
    sums = [(f, n) for f, nodes in ctx.finished.values() for n in nodes if isinstance(f, Sum)]
    sums += [(f, n) for n, f in ctx.facts.items() if isinstance(f, Sum) and f is not fact]
    before = {n for f, n in sums if any(p.rows.domain.routing is routing for p in f.parts) and not set(f.parts) & set(fact.parts)}
    first = ctx.position[fact.parts[0].node]
    storage, shares = ctx.storage[base], {p.node for f, _ in sums for p in f.parts}
    if base in before:
        written = [w for w in ctx.writes.get(storage, ()) if ctx.position[w] < first and w not in shares]
        node = max(written, key=ctx.position.__getitem__, default=None)
    else:
        steps = [storage]
        while not any(n in before for n in steps[-1].all_input_nodes) and len(steps[-1].all_input_nodes) == 1:
            steps += steps[-1].all_input_nodes
        node = steps[-1] if any(n in before for n in steps[-1].all_input_nodes) else None
    call = None if node is None else ctx.calls[node]
    return None if node is None or call is None else ctx.lost("sum-changed", node, op=call.name)


def _of_sequences(ctx: Context, parts: list[Part], routing: Routing) -> Routing | Lost:
    """The routing of single tokens, where an expert was given whole sequences: all tokens of one have the ids of that one."""
    more = {tuple(a.size for axis in p.rows.axes for a in axis if a.kind == "t") for p in parts if p.rows.domain.name == "selected"}
    if len(more) > 1:
        return Lost("experts-differ", parts[0].node, {"expert": "?", "detail": "their rows have different dimensions"})
    sizes = next(iter(more), ())
    return shared_routing(ctx, routing, sizes) if sizes else routing


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
    simple = leaves == {Token, SlotWeight} and len(weights) == 1
    if fact.once or not by_slot or not simple or numbers != list(range(numbers[0], numbers[-1] + 1)):
        unknown = no_rule(expr)
        detail = f"expert {numbers[0]} has no weights" + (", and is not its token times a weight" if by_slot and not simple else "")
        return unknown or ctx.lost("experts-differ", anchor, expert="?", detail=detail)
    return Weightless(expr, range(numbers[0], numbers[-1] + 1))


def _exact(part: Part) -> bool:
    """Whether a share is one row for each slot that chose the expert, not one for each token."""
    selection = part.rows.domain.selection
    return selection is not None and not selection.by_token


def _over_slots(ctx: Context, parts: list[Part], routing: Routing, anchor: Node, rest: Weightless | None = None) -> tuple[Expr, int] | Lost:
    """The experts' common expression; where the loop also runs over slots, the same one for every slot."""
    slots = {p.rows.domain.slot for p in parts}
    if slots != {None} and slots != set(range(routing.top_k)):
        return missing.slots(ctx, slots, routing.top_k, anchor)
    found = [_over_experts(ctx, [p for p in parts if p.rows.domain.slot == s], anchor, rest) for s in sorted(slots, key=str)]
    first = found[0]
    if any(e.slot not in (None, p.rows.domain.slot) for p in parts for e in walk(p.rows.expr) if isinstance(e, SlotWeight)):
        return ctx.lost(
            "experts-differ", anchor, expert="0", detail="the rows of a slot are weighted by the routing weight of another slot"
        )
    for other in found[1:]:
        if isinstance(other, Lost):
            return other
        if not isinstance(first, Lost) and not same_expr(first[0], other[0]):
            return ctx.lost("experts-differ", anchor, expert="0", detail="for another slot of a token they compute something else")
    return first


def _slot_by_slot(ctx: Context, fact: Sum, routing: Routing, anchor: Node, holders: list[Node]) -> Region | Lost:
    """The layer whose slots give their rows one after another: one expression, in which each reads its own column of the weights."""
    parts = sorted(fact.parts, key=lambda p: int(p.rows.domain.slot or 0))
    slots = [p.rows.domain.slot for p in parts]
    if slots != list(range(routing.top_k)):
        return missing.slots(ctx, set(slots), routing.top_k, anchor)
    found = generalise([p.rows.expr for p in parts], list(range(routing.top_k)), anchor)
    tables = (
        []
        if isinstance(found, Lost)
        else [shape_of(value) for e in walk(found) if isinstance(e, Gate) and (value := tensor(e.source)) is not None]
    )
    if isinstance(found, Lost) or not all(
        same(t[-1], routing.top_k) and same(product(t), routing.num_tokens * routing.top_k) for t in tables
    ):
        return ctx.lost("experts-differ", anchor, expert="0", detail="for another slot of a token they compute something else")
    expr = rebuilt(found, lambda old, run: SlotWeight(old.node, old.source) if isinstance(old, Gate) else None)
    count = _num_experts(ctx, expr, anchor)
    return count if isinstance(count, Lost) else Region(anchor, tuple(holders), "slots", routing, expr, count, None)


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
        if rest is not None and sorted(every) == list(range(len(every))):
            return ctx.lost("experts-differ", anchor, expert="?", detail=f"expert {rest.numbers[0]} has no weights, and one behind it has")
        times = len(numbers) // max(len(set(numbers)), 1)
        if times > 1 and numbers == sorted([*set(numbers)] * times):
            return ctx.lost("missing-experts", anchor, times=times)
        return missing.experts(ctx, parts, numbers, anchor, count)
    if rest is None and missing.others_elsewhere(ctx, parts, count):
        return missing.experts(ctx, parts, numbers, anchor, count)
    return expr, count


def _common(ctx: Context, parts: list[Part], anchor: Node) -> tuple[Expr, list[int]] | Lost:
    """(common expression, numbers of the experts) of one part for each expert."""
    ordered = sorted(parts, key=lambda p: int(p.rows.domain.expert or 0))
    written = [instances(ctx.given.siblings, p, ordered) for p in ordered]
    if any(found is None for found in written):
        return ctx.lost("experts-differ", anchor, expert="?", detail="what one computes may depend on its number")
    pairs = sorted((pair for found in written for pair in found or ()), key=lambda pair: int(pair[0]))
    experts: list[int] = [number for number, _ in pairs]
    expr = generalise([expr for _, expr in pairs], experts, anchor)
    if isinstance(expr, Lost):
        return expr
    by_row = ctx.by_row()
    if by_row and not all(_parametric(ctx, p.rows, by_row) for p in ordered):
        return ctx.lost("experts-differ", anchor, expert="?", detail="what one computes may depend on its number")
    return expr, sorted(number for e in experts for number in ctx.members(e))


def _from_lists(ctx: Context, row: Node) -> Collection[Node] | None:
    """Weights that a representative has from lists of modules; None for a witness: it stands for no other, so any weight will do."""
    if any(row is known.witness_node for known in ctx.given.siblings.values()):
        return None
    return ctx.given.siblings[row].siblings if row in ctx.given.siblings else ()


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
    """Whether a repeated id within a token would be treated differently from a sum over slots, which draws for each of them."""
    gates = [e for e in walk(expr) if isinstance(e, Gate)]
    exact = any(g.slots for g in gates) and not any(isinstance(e, Op) and e.name == "dropout" for e in walk(expr))
    return once or any(not g.slots and not g.ones for g in gates) or ((by_token or bool(gates)) and not exact)


def _num_experts(ctx: Context, expr: Expr, node: Node, with_rest: Collection[int] = ()) -> int | Lost:
    """E, from the weights themselves; where experts without weights follow, a stack may have room for those too (``with_rest``: both)."""
    counts: dict[int, str] = {}
    for leaf in weight_leaves(expr):
        value = tensor(leaf.source)
        size = shape_of(value)[leaf.along] if leaf.stacked and value is not None else len(leaf.parts)
        if not leaf.stacked and not leaf.parts:
            return ctx.lost("experts-differ", node, expert="?", detail=f"{named(leaf.source)} is one weight for all experts")
        if not isinstance(size, int):
            return ctx.lost("missing-experts", node, detail=f"how many there are in {named(leaf.source)} may change from call to call")
        counts.setdefault(size, named(leaf.source))
    if with_rest and counts.keys() <= set(with_rest):
        return min(with_rest)
    if len(counts) != 1:
        return ctx.lost("missing-experts", node, detail=f"the weights are of {', '.join(f'{n} in {name}' for n, name in counts.items())}")
    return next(iter(counts))
