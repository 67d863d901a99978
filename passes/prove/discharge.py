"""Whether what capture assumed makes no difference. The argument, for one assumption with scope S (see docs/design/capture.md):

1. The program asks exactly whether some slot chose expert e (:func:`_claim`).
2. Whatever S adds to a fused region is a share of expert e of the same routing. The fused op gives an expert that nobody chose nothing.
3. Everything else that S recorded is gone, or is a pure value that only fused ops read. A value that the program keeps and computes where
   it is first asked for (``Assumption.first``) belongs to no scope if nothing writes to what it is computed from. Nor does a call that is
   given nothing and gives nothing (:func:`_runs_when_traced`).
4. A local that S leaves with another tensor holds the accumulator with such shares added, or the same storage.
   A tensor that S returns, and that the other way returns without elements as well, is the same without rows.
5. Where S was traced once for several rows of a loop, no row finds what another left: S writes to nothing that is older than S but
   accumulators, and reads those for nothing but to add to them (:func:`_meets`).
"""

from __future__ import annotations

import types
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse.passes.graph.assumptions import TAG, Assumption, Undischarged
from moefuse.passes.graph.calls import call_target, fake, location
from moefuse.passes.graph.named import named
from moefuse.passes.graph.op_classes import SIZE_QUERIES
from moefuse.passes.graph.sizes import same
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.graph.values import tensors_in
from moefuse.passes.graph.writes import known_function
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.facts import (
    Buffer,
    Counts,
    Fill,
    Hit,
    Many,
    Occurring,
    Part,
    Present,
    Routing,
    RowNumber,
    Span,
    Sum,
)
from moefuse.passes.ir.regions import Region
from moefuse.passes.match.liveness import pure
from moefuse.passes.prove.concerns import Chosen, concerns, of_size
from moefuse.passes.rules.routing.nonempty import hit_of, rows_of
from moefuse.passes.rules.routing.offsets import difference


@dataclass
class Unchanged:
    """Tensors that are equal to another one where the assumption that they were computed under is false."""

    of: dict[Node, Node] = field(default_factory=dict)


@dataclass(frozen=True)
class Claim:
    """What an assumption comes to in one graph: it is false only if no slot (no slot ``slot``) chose ``expert``; None if it is not so."""

    assumption: Assumption
    routing: Routing | None = None
    expert: int | None = None
    slot: int | None = None
    leaks: tuple[tuple[Node, Node], ...] = ()
    meetings: tuple[Node, ...] = ()
    written: str | None = None
    strays: tuple[Node, ...] = ()

    def covers(self, part: Part) -> bool:
        """Whether an expert's share is nothing whenever the assumption is false."""
        domain = part.rows.domain
        known = self.routing is not None and domain.routing is self.routing and domain.expert == self.expert
        return known and (self.slot is None or self.slot == domain.slot)


def claims(ctx: Context, assumptions: Sequence[Assumption]) -> list[Claim]:
    """The claims of the assumptions that something in this graph depends on. Before anything is rewritten."""
    sizes: dict[Any, Chosen] = {}
    for node, fact in ctx.facts.items() if any(a.kind == "size" for a in assumptions) else ():
        found = of_size(ctx, node, fact)
        if found is not None:
            sizes.setdefault(*found)
    for a in assumptions:
        if isinstance(a.subject, tuple):
            between = _between(ctx, *a.subject)
            sizes |= {a.subject: between} if between is not None else {}
    passed: dict[Node, set[Node]] = {}
    for a in assumptions:
        if a.row_node is not None:
            passed.setdefault(a.subject, set()).update(_passed_on(ctx, a))
    here = [a for a in assumptions if _about_python(a, ctx.graph) or any(n in ctx.position for n in _nodes(a))]
    return [_claim(ctx, a, sizes, passed, assumptions) for a in here]


def _nodes(a: Assumption) -> tuple[Node, ...]:
    """What an assumption is about in a graph."""
    return (a.subject,) if a.kind == "end" else (*a.nodes, *a.appended)


def _between(ctx: Context, end: Any, start: Any) -> Chosen | None:
    """(routing, expert, slot) of the slots between two offsets, given as symbols."""
    spans = {v.node.expr: n for n, f in ctx.facts.items() if isinstance(f, Span) and isinstance(v := fake(n), torch.SymInt)}
    found = hit_of(difference(ctx, spans[end], spans[start])) if end in spans and start in spans else None
    return (found.routing, found.expert, None) if isinstance(found, Hit) and found.expert is not None else None


def _counted(ctx: Context, a: Assumption) -> Routing | None:
    """The routing whose slots a tensor counts, one number for each expert that the router could choose."""
    fact = ctx.facts.get(a.subject) if a.kind == "length" else None
    if isinstance(fact, Occurring):
        return fact.routing if fact.count <= a.row and ctx.storage[a.subject] not in ctx.writes else None
    count = fact.routing.choices if isinstance(fact, Counts) else None
    return fact.routing if count is not None and count <= a.row and same(fact.axes[0][0].size, a.row) else None  # type: ignore[union-attr]


def _about_python(a: Assumption, graph: Graph) -> bool:
    """Whether it is about what Python saw: then it matters, whatever is left of it in its graph."""
    return a.kind in ("list", "length") and a.graph is graph


def _strays(ctx: Context, length: Assumption, every: Sequence[Assumption]) -> tuple[Node, ...]:
    """What reads an element of counts outside of the iterations that run only if there is such an element."""
    if length.kind != "length":
        return ()
    inside = {a.row: a.nodes for a in every if a.kind == "element" and a.subject is length.subject}
    last = len(length.items)
    reads = [(at, u) for at, n in enumerate(length.items) if n in ctx.position for u in n.users if u in ctx.position]
    return tuple(u for at, u in reads if not any(u in inside.get(i, ()) for i in range(at, last)))


def _claim(
    ctx: Context, assumption: Assumption, sizes: dict[Any, Chosen], passed: dict[Node, set[Node]], every: Sequence[Assumption]
) -> Claim:
    if assumption.kind in ("list", "length"):
        assumption.concerns_experts = True
        return Claim(assumption, _counted(ctx, assumption), strays=_strays(ctx, assumption, every))
    written = _written_through(ctx, assumption) or _written_before(ctx, assumption)
    leaks = tuple((n, u) for n in assumption.nodes if n in ctx.position for u in n.users if u not in assumption.nodes)
    found = sizes.get(assumption.subject) if assumption.kind == "size" else _chosen(ctx, assumption)
    assumption.concerns_experts = found is not None or concerns(ctx, assumption)
    if found is None:
        return Claim(assumption, leaks=leaks, written=written)
    between = passed[assumption.subject] if assumption.row_node is not None else set()
    meetings = tuple(n for n in assumption.nodes if n in ctx.position and _meets(ctx, n, between))
    return Claim(assumption, *found, leaks=leaks, meetings=meetings, written=written)


def _passed_on(ctx: Context, a: Assumption) -> set[Node]:
    """Tensors older than a representative's scope that it writes to or replaces: all that one row can leave for the next."""
    calls = [(n, ctx.calls[n]) for n in a.nodes if n in ctx.position]
    written = {ctx.storage[t] for _, call in calls if call is not None for t in call.targets} - a.nodes
    return written | {ctx.storage[old] for _, old, _ in a.carried if old in ctx.position}


def _meets(ctx: Context, node: Node, passed: set[Node]) -> bool:
    """Whether one row may find here what another left. Must turn out to be a share of a fused region."""
    call = ctx.calls[node]
    if not any(ctx.storage.get(i) in passed for i in node.all_input_nodes):
        return False
    if call is None or call.inplace:
        return True
    view = ctx.storage[node] in passed and not _cuts(node)  # who reads or writes it is asked instead
    middle = isinstance(ctx.facts.get(node), Buffer)  # of ``out[idx] += rows``: the assignment is asked instead
    return not view and not middle and call.name not in SIZE_QUERIES


def _cuts(node: Node) -> bool:
    """Whether a view lets no gradient through, as ``detach`` and ``.data``."""

    def tracked(source: Node) -> Any:
        value = fake(source)
        return value.detach().requires_grad_(value.dtype.is_floating_point) if isinstance(value, torch.Tensor) else value

    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), tracked)
    with torch.enable_grad():
        result = call_target(node, args, kwargs)
    return not any(t.requires_grad for t in tensors_in(result))


def _chosen(ctx: Context, a: Assumption) -> Chosen | None:
    """(routing, expert, slot) whose rows the condition asks for."""
    fact = hit_of(ctx.facts.get(a.subject))
    if a.kind == "element":  # the tensor ends behind the highest id
        whole = isinstance(fact, Occurring) and ctx.storage[a.subject] not in ctx.writes
        return (fact.routing, a.row, None) if whole else None
    if isinstance(fact, Counts) and not fact.ends and fact.first == 1:
        fact = Hit(fact.axes, fact.routing, None)  # numbers of slots are not zero exactly where there are slots
    if isinstance(fact, Many) and isinstance(fact.items[0], Present):
        fact = fact.items[0]  # ``torch.unique(ids, return_counts=True)``
    if isinstance(fact, Present) and a.kind == "row" and int(a.row) < fact.count and ctx.storage[a.subject] not in ctx.writes:
        return fact.routing, a.row if a.row_node is None else RowNumber(a.row, a.row_node), fact.slot
    if not isinstance(fact, Hit) or ctx.storage[a.subject] in ctx.writes:
        return None
    if a.kind == "end":
        choices = fact.routing.choices
        return (fact.routing, a.row, fact.slot) if rows_of(fact) and choices is not None and choices <= a.row else None
    if a.kind == "row":
        row = a.row if a.row_node is None else RowNumber(a.row, a.row_node)
        return (fact.routing, row, fact.slot) if rows_of(fact) else None
    return (fact.routing, fact.expert, fact.slot) if fact.expert is not None and fact.negated != a.outcome else None


def undischarged(ctx: Context, found: Sequence[Claim], fused: Sequence[Region], harmless: Collection[Node] = ()) -> list[Undischarged]:
    """The assumptions that the fused regions do not discharge. After rewriting and sweeping.

    Args:
        harmless: writes that leave everything as it was where the assumption is false, under which they were recorded.
    """
    emitted = {n for n in ctx.graph.nodes if n not in ctx.position} | set(harmless)
    return [Undischarged(c.assumption, detail) for c in found if (detail := _detail(ctx, c, fused, emitted)) is not None]


def _of_no_scope(ctx: Context, claim: Claim, fused: Sequence[Region]) -> str | None:
    """What is in the way of an assumption under which nothing was recorded."""
    a = claim.assumption
    if a.kind == "list":
        return None if any(_never_empty(ctx, a, region) for region in fused) else "nobody knows whether the list has an item"
    if claim.strays:
        return f"{named(claim.strays[0])} reads an element that is not there if the last experts have no tokens"
    if claim.routing is not None:
        return None
    if a.kind == "length":
        return "nobody knows how many experts there are"
    return f"nothing says that no token chooses expert {a.row} or one behind it"


def _detail(ctx: Context, claim: Claim, fused: Sequence[Region], emitted: set[Node]) -> str | None:
    if claim.assumption.kind in ("end", "list", "length"):
        return _of_no_scope(ctx, claim, fused)
    nodes = claim.assumption.nodes
    if claim.written is not None:
        return claim.written
    left = _not_harmless(ctx, {n for n in nodes if not n._erased and n not in emitted}, emitted)
    if left:
        first = min(left, key=lambda n: ctx.position.get(n, 1 << 60))
        return f"{named(first)} ({location(first) or 'no location'}) did not become part of a fused layer"
    shares: list[Part] = []
    for region in fused:
        inside = region.nodes & nodes
        if not inside:
            continue
        if not region.parts and not segments_of(ctx, region):
            return "a whole layer depends on it"
        shares += [p for p in (*region.parts, *segments_of(ctx, region)) if p.node in nodes]
        for node, user in claim.leaks:
            # Readers that are gone and were not part of a region only asked for sizes.
            reads = user in region.nodes or not user._erased
            alike = node is claim.assumption.returned or isinstance(ctx.facts.get(node), Sum)
            if node in region.nodes and reads and not alike and not _only_joined(ctx, claim, node, user):
                return f"{named(node)} is used behind it"
    if not all(claim.covers(p) for p in shares):
        return "it does not ask exactly whether some token chose the expert that it runs"
    if not all(_joined_away(ctx, claim, node, fused) for node in claim.assumption.appended):
        return "what it appends to a list is more than the rows of the expert that it asks about"
    added = {p.node for p in shares}
    stray = next((n for n in claim.meetings if n not in added), None)
    if stray is not None:
        return f"one iteration may find what another left ({named(stray)})"
    carried = next((name for name, old, new in claim.assumption.carried if not _same_without(ctx, claim, old, new)), None)
    return None if carried is None else f"`{carried}` is read after it, and has another value if it does not run"


def _written_through(ctx: Context, a: Assumption) -> str | None:
    """What was indexed by a row that Python has as a number, and written to: by the number it is a view, and the graph has a copy."""
    found = next((named(u) for n in a.numbers for u in n.users if ctx.storage.get(u) in ctx.writes), None)
    return None if found is None else f"{found} is written to, and is a view"


def _written_before(ctx: Context, a: Assumption) -> str | None:
    """What the graph writes to, and a value is computed from that is the same wherever it is computed only if nothing does."""
    inputs = {i: None for n in a.first if n in ctx.position for i in n.all_input_nodes if i not in a.first}
    found = next((named(i) for i in inputs if any(name in ctx.writes for name in ctx.memory.storages(i))), None)
    return None if found is None else f"{found} is written to, and what is kept of it is computed where an expert first has tokens"


def segments_of(ctx: Context, region: Region) -> list[Part]:
    """The pieces of sorted slots that a region puts together."""
    return [p for n in region.nodes for p in ctx.segments.get(n, ())]


def _only_joined(ctx: Context, claim: Claim, node: Node, user: Node) -> bool:
    """Whether a reader behind the scope puts an expert's rows, which are none if the assumption is false, beside those of the others."""
    if isinstance(ctx.facts.get(node), Span) or isinstance(ctx.facts.get(user), Span):
        return True  # a number, or how many rows there are: asked as a carried local
    return any(p.node is node and claim.covers(p) for p in ctx.segments.get(user, ()))


def _joined_away(ctx: Context, claim: Claim, node: Node, fused: Sequence[Region]) -> bool:
    """Whether what was appended to a list ended up as an expert's piece of a fused region, and nowhere else."""
    return node._erased and any(p.node is node and claim.covers(p) for region in fused for p in segments_of(ctx, region))


def _never_empty(ctx: Context, assumption: Assumption, region: Region) -> bool:
    """Whether a list has an item whenever there is a token: it has one for every expert that somebody chose."""
    routing = region.routing
    slots = routing.num_tokens * routing.top_k
    some = slots >= 1 if isinstance(slots, int) else bool(slots.is_positive)
    whole = any({p.node for p in ctx.segments.get(n, ())} == set(assumption.items) for n in region.nodes)
    return whole and some and routing.choices == len(assumption.items)


def _not_harmless(ctx: Context, remaining: set[Node], emitted: set[Node]) -> set[Node]:
    """Nodes that stay in the graph and are not plain values which fused ops alone read (a view of a weight, say)."""
    remaining = {n for n in remaining if not _runs_when_traced(n)}
    good = {n for n in remaining if pure(ctx, n) and not unbacked_in(fake(n))}
    changed = True
    while changed:
        bad = {n for n in good if any(u not in emitted and u not in good for u in n.users)}
        changed = bool(bad)
        good -= bad
    return remaining - good


def _runs_when_traced(node: Node) -> bool:
    """Whether a call of a program's own function is given nothing, and gives nothing.

    Compilers trace such a function (``allow_in_graph``), and nothing of it is left for calls: it runs, whoever has tokens, and not again.
    """
    alone = node.op == "call_function" and not node.args and not node.kwargs and not node.users and fake(node) is None
    return alone and isinstance(node.target, types.FunctionType) and not known_function(node.target)


def _offset(ctx: Context, value: Any) -> Any:
    """The node of a number of slots, or the constant 0. Of several nodes for one number Dynamo keeps the first."""
    if not isinstance(value, Node) or value in ctx.position:
        fact = ctx.facts.get(value) if isinstance(value, Node) else None
        return value if value == 0 or isinstance(fact, Span) or (isinstance(fact, Fill) and not fact.axes) else None
    number = fake(value)
    expr = number.node.expr if isinstance(number, torch.SymInt) else None
    same = (n for n, f in ctx.facts.items() if isinstance(f, Span) and isinstance(v := fake(n), torch.SymInt) and v.node.expr == expr)
    return next(same, None)


def _unread(ctx: Context, new: Any) -> bool:
    """Whether Dynamo has dropped a number that only the run knows: nothing in the graph computes it, so nobody reads it."""
    number = fake(new) if isinstance(new, Node) and new._erased and new not in ctx.position else None
    if not isinstance(number, torch.SymInt) or not unbacked_in(number):
        return False
    return not any(isinstance(v := fake(n), torch.SymInt) and v.node.expr == number.node.expr for n in ctx.position)


def _same_offset(ctx: Context, claim: Claim, old: Any, new: Any) -> bool:
    """Whether a number grows by the slots of the expert that the assumption is about."""
    between = difference(ctx, new, old)
    if not isinstance(between, Span):
        return False
    return (
        between.routing is claim.routing and (between.start, between.stop) == (claim.expert, (claim.expert or 0) + 1) and claim.slot is None
    )


def _same_without(ctx: Context, claim: Claim, old: Any, new: Any) -> bool:
    """Whether ``new`` equals ``old`` when the assumption is false: the accumulator, with shares of an expert that nobody chose."""
    offset = _offset(ctx, new)
    if offset is None and _unread(ctx, new):
        return True
    if offset is not None and new._erased and not _writes_to(ctx, new, old):
        return _same_offset(ctx, claim, _offset(ctx, old), offset)
    if old not in ctx.position or new not in ctx.position:
        return False
    if _writes_to(ctx, new, old) or ctx.scratch(Unchanged).of.get(new) is old:
        return True
    before, after = ctx.facts.get(old), ctx.facts.get(new)
    if not isinstance(after, Sum):
        return False
    if isinstance(before, Sum):
        known, base = list(before.parts), after.base is before.base
    else:
        known, base = [], (isinstance(before, Fill) and before.value == 0.0 and after.base is None) or after.base is old
    # What is written to a copy behind the scope would be written to what it is a copy of.
    end = max((ctx.position[n] for n in claim.assumption.nodes if n in ctx.position), default=0)
    more = (p for p in after.parts[len(known) :] if ctx.position[p.node] <= end)
    return base and after.parts[: len(known)] == tuple(known) and all(map(claim.covers, more))


def _writes_to(ctx: Context, new: Node, old: Node) -> bool:
    """Whether ``new`` is ``old`` itself behind in-place operations."""
    node = new
    while node is not old:
        call = ctx.calls.get(node)
        if call is None or not call.targets:
            return False
        node = call.targets[0]
    return True


def out_of_sight(gm: GraphModule, assumptions: Sequence[Assumption]) -> list[Undischarged]:
    """The assumptions about the end of a loop whose mask is no longer in the graph, so that nothing can be said about it. At the start."""
    here = {n for m in gm.modules() if isinstance(m, GraphModule) for n in m.graph.nodes}
    return [Undischarged(a, "its mask is not in the graph") for a in assumptions if a.kind == "end" and a.subject not in here]


def lost_track(gm: GraphModule, assumptions: Sequence[Assumption]) -> list[Undischarged]:
    """All assumptions, if the graph holds a node that was made under one of them and that none of them knows (a copy)."""
    known = {n for a in assumptions for n in a.nodes}
    bodies = [m for m in gm.modules() if isinstance(m, GraphModule)]
    unknown = any(TAG in n.meta and n not in known for m in bodies for n in m.graph.nodes)
    here = {n for m in bodies for n in m.graph.nodes}
    elsewhere = any(not n._erased and n not in here for n in known)
    elsewhere = elsewhere or any(a.kind in ("list", "length") and a.graph not in [m.graph for m in bodies] for a in assumptions)
    return [Undischarged(a, "Dynamo copied the graph") for a in assumptions] if unknown or elsewhere else []
