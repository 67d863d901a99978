"""Whether what capture assumed makes no difference. The argument, for one assumption with scope S (see docs/design/capture.md):

1. The program asks exactly whether some slot chose expert e (:func:`_claim`).
2. Whatever S adds to a fused region is a share of expert e of the same routing. The fused op gives an expert that nobody chose nothing.
3. Everything else that S recorded is gone, or is a pure value that only fused ops read.
4. A local that S leaves with another tensor holds the accumulator with such shares added, or the same storage.
5. Where S was traced once for several rows, no row finds what another left: S writes to nothing that is older than S but accumulators, and
   reads those for nothing but to add to them (:func:`_meetings`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from moefuse._dynamo_private import unbacked_in
from moefuse.capture.assumptions import TAG, Assumption, Undischarged
from moefuse.passes.context import Context
from moefuse.passes.facts import Buffer, Fill, Hit, Index, IndexMatrix, Mask, Part, Routing, RowNumber, Rows, Sum
from moefuse.passes.lift import SIZE_QUERIES, Region
from moefuse.passes.ops import fake, location
from moefuse.passes.rules.hits import rows_of
from moefuse.passes.rules.pointwise import RANDOM

_ASSERTS = frozenset(("_assert_scalar", "_assert_async", "sym_constrain_range", "sym_constrain_range_for_size", "_check", "_check_is_size"))
_MODES = frozenset(("_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "_exit_inference_mode"))


_Chosen = tuple[Routing, int, int | None]


@dataclass(frozen=True)
class Claim:
    """What an assumption comes to in one graph: it is false only if no slot (no slot ``slot``) chose ``expert``; None if it is not so."""

    assumption: Assumption
    routing: Routing | None = None
    expert: int | None = None
    slot: int | None = None
    leaks: tuple[tuple[Node, Node], ...] = ()
    meetings: tuple[Node, ...] = ()

    def covers(self, part: Part) -> bool:
        """Whether an expert's share is nothing whenever the assumption is false."""
        domain = part.rows.domain
        known = self.routing is not None and domain.routing is self.routing and domain.expert == self.expert
        return known and (self.slot is None or self.slot == domain.slot)


def claims(ctx: Context, assumptions: Sequence[Assumption]) -> list[Claim]:
    """The claims of the assumptions that something in this graph depends on. Before anything is rewritten."""
    sizes: dict[Any, _Chosen] = {}
    for node, fact in ctx.facts.items() if any(a.kind == "size" for a in assumptions) else ():
        found = _of_size(ctx, node, fact)
        if found is not None:
            sizes.setdefault(*found)
    return [_claim(ctx, a, sizes) for a in assumptions if any(n in ctx.position for n in a.nodes)]


def _claim(ctx: Context, assumption: Assumption, sizes: dict[Any, _Chosen]) -> Claim:
    leaks = tuple((n, u) for n in assumption.nodes if n in ctx.position for u in n.users if u not in assumption.nodes)
    found = sizes.get(assumption.subject) if assumption.kind == "size" else _chosen(ctx, assumption)
    assumption.concerns_experts = found is not None or _concerns(ctx, assumption)
    if found is None:
        return Claim(assumption, leaks=leaks)
    return Claim(assumption, *found, leaks=leaks, meetings=_meetings(ctx, assumption))


def _meetings(ctx: Context, a: Assumption) -> tuple[Node, ...]:
    """Nodes of a representative's scope at which one row may find what another left. All must turn out to be shares of a fused region.

    They write to a tensor that is older than the scope, or read one that the scope writes to or replaces.
    """
    if len(a.members) < 2:
        return ()
    inside = [n for n in a.nodes if n in ctx.position]
    passed = {ctx.storage[n] for n in inside if (call := ctx.calls[n]) is not None and call.inplace} - a.nodes
    passed |= {ctx.storage[old] for _, old, _ in a.carried if old in ctx.position}
    return tuple(n for n in inside if _meets(ctx, n, passed))


def _meets(ctx: Context, node: Node, passed: set[Node]) -> bool:
    call = ctx.calls[node]
    if not any(ctx.storage.get(i) in passed for i in node.all_input_nodes):
        return False
    if call is None or call.inplace:
        return True
    view = ctx.storage[node] in passed  # who reads or writes it is asked instead
    middle = isinstance(ctx.facts.get(node), Buffer)  # of ``out[idx] += rows``: the assignment is asked instead
    return not view and not middle and call.name not in SIZE_QUERIES


def _chosen(ctx: Context, a: Assumption) -> _Chosen | None:
    """(routing, expert, slot) whose rows the condition asks for."""
    fact = ctx.facts.get(a.subject)
    if not isinstance(fact, Hit) or ctx.storage[a.subject] in ctx.writes:
        return None
    if a.kind == "row":
        row = a.row if a.row_node is None else RowNumber(a.row, a.row_node)
        return (fact.routing, row, fact.slot) if rows_of(fact) else None
    return (fact.routing, fact.expert, fact.slot) if fact.expert is not None and fact.negated != a.outcome else None


def _of_size(ctx: Context, node: Node, fact: Any) -> tuple[Any, _Chosen] | None:
    """(symbol, selection) of a tensor whose length counts the rows of a selection, or of a number that does."""
    value = fake(node)
    if isinstance(value, torch.SymInt):
        counts = isinstance(fact, Hit) and not fact.negated and fact.expert is not None
        return (value.node.expr, (fact.routing, fact.expert, fact.slot)) if counts else None
    if not isinstance(value, torch.Tensor) or not value.dim() or ctx.storage[node] in ctx.writes:
        return None
    at = 1 if isinstance(fact, IndexMatrix) and fact.transposed else 0
    symbol = getattr(getattr(value.shape[at], "node", None), "expr", None)
    selection = fact.selection if isinstance(fact, Index | IndexMatrix) else fact.domain.selection if isinstance(fact, Rows) else None
    if symbol is None or selection is None:
        return None
    return symbol, (selection.routing, selection.expert, selection.slot)


def sweep(ctx: Context, found: Sequence[Claim]) -> None:
    """Erase what nothing reads any more, and the assertions about sizes that are gone with it."""
    live = _live(ctx)
    for node in reversed(list(ctx.graph.nodes)):
        if node not in live and not any(u in live for u in node.users):
            ctx.graph.erase_node(node)
    _drop_idle_modes(ctx, {n for claim in found for n in claim.assumption.nodes})


def _live(ctx: Context) -> set[Node]:
    """Nodes that the result of the graph, or an effect of it, needs."""
    roots = [n for n in ctx.graph.nodes if n.op in ("placeholder", "output", "call_module") or _effect(ctx, n)]
    asserts = [n for n in ctx.graph.nodes if _about_data(ctx, n)]
    writes = [n for n in ctx.graph.nodes if (call := ctx.calls.get(n)) is not None and call.inplace and n not in roots]
    live: set[Node] = set()
    while roots:
        _reach(live, roots)
        sizes = {s for n in live if n.op != "output" for s in unbacked_in(fake(n))}
        roots = [n for n in asserts if n not in live and any(unbacked_in(fake(i)) & sizes for i in n.all_input_nodes)]
        roots += [w for w in writes if w not in live and any(a in live for a in ctx.aliases[ctx.storage[w]])]
    return live


def _reach(live: set[Node], roots: list[Node]) -> None:
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in live:
            live.add(node)
            stack.extend(node.all_input_nodes)


def _effect(ctx: Context, node: Node) -> bool:
    """Whether a node does something besides its result. Writes count where the storage is the user's."""
    call = ctx.calls.get(node)
    if call is None:
        return node in ctx.calls and node.op not in ("placeholder", "get_attr")
    if _about_data(ctx, node):
        return False
    if call.inplace and isinstance(call.args[0], Node) and call.kwargs.get("out") is None:
        return ctx.storage[node].op in ("placeholder", "get_attr")
    return call.name not in SIZE_QUERIES and not _pure(ctx, node)


def _about_data(ctx: Context, node: Node) -> bool:
    """Whether a node only asserts something about sizes that the run decides."""
    call = ctx.calls.get(node)
    return call is not None and call.name in _ASSERTS and any(unbacked_in(fake(i)) for i in node.all_input_nodes)


def _drop_idle_modes(ctx: Context, scoped: set[Node]) -> None:
    """Grad modes that were switched in a scope for operations that are gone."""
    order = [n for n in ctx.graph.nodes if n.op not in ("placeholder", "get_attr")]
    now = torch.is_grad_enabled()
    kept: list[tuple[Node, bool]] = []
    for node in order:
        call = ctx.calls.get(node)
        switches = call is not None and call.name == "_set_grad_enabled" and isinstance(call.args[0], bool)
        if switches and kept and kept[-1][1] and kept[-1][0] in scoped:
            ctx.graph.erase_node(kept.pop()[0])
        kept.append((node, switches))
    for node, switches in kept:
        if not switches:
            continue
        wanted = bool(node.args[0])
        if wanted == now and node in scoped:
            ctx.graph.erase_node(node)
        now = wanted


def undischarged(ctx: Context, found: Sequence[Claim], fused: Sequence[Region]) -> list[Undischarged]:
    """The assumptions that the fused regions do not discharge. After rewriting and sweeping."""
    emitted = {n for n in ctx.graph.nodes if n not in ctx.position}
    return [Undischarged(c.assumption, detail) for c in found if (detail := _detail(ctx, c, fused, emitted)) is not None]


def _detail(ctx: Context, claim: Claim, fused: Sequence[Region], emitted: set[Node]) -> str | None:
    nodes = claim.assumption.nodes
    left = _not_harmless(ctx, {n for n in nodes if not n._erased}, emitted)
    if left:
        first = min(left, key=lambda n: ctx.position.get(n, 1 << 60))
        return f"what `{first.name}` ({location(first) or 'no location'}) computes in it did not become part of a fused layer"
    shares: list[Part] = []
    for region in fused:
        inside = region.nodes & nodes
        if not inside:
            continue
        if not region.parts:
            return "a whole layer depends on it"
        shares += [p for p in region.parts if p.node in nodes]
        for node, user in claim.leaks:
            # Readers that are gone and were not part of a region only asked for sizes.
            reads = user in region.nodes or not user._erased
            if node in region.nodes and reads and not isinstance(ctx.facts.get(node), Sum):
                return f"`{node.name}` is used behind it"
    if not all(claim.covers(p) for p in shares):
        return "it does not ask exactly whether some token chose the expert that it runs"
    added = {p.node for p in shares}
    stray = next((n for n in claim.meetings if n not in added), None)
    if stray is not None:
        return f"one iteration may find what another left (`{stray.name}`)"
    carried = next((name for name, old, new in claim.assumption.carried if not _same_without(ctx, claim, old, new)), None)
    return None if carried is None else f"`{carried}` is read after it, and has another value if it does not run"


def _not_harmless(ctx: Context, remaining: set[Node], emitted: set[Node]) -> set[Node]:
    """Nodes that stay in the graph and are not plain values which fused ops alone read (a view of a weight, say)."""
    good = {n for n in remaining if _pure(ctx, n) and not unbacked_in(fake(n))}
    changed = True
    while changed:
        bad = {n for n in good if any(u not in emitted and u not in good for u in n.users)}
        changed = bool(bad)
        good -= bad
    return remaining - good


def _pure(ctx: Context, node: Node) -> bool:
    """Whether a node is a function of its arguments and nothing else, as far as torch says."""
    call = ctx.calls.get(node)
    if node.op == "get_attr":
        return True
    if call is None or call.inplace or call.name in _MODES or call.name in _ASSERTS or random(call.name):
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator) or not _plain_value(fake(node)):
        return False
    return node.op == "call_method" or (_known_module(node.target) and not node.is_impure())


def _plain_value(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain_value, value))
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | bool | int | float)


def _known_module(target: Any) -> bool:
    module = str(getattr(target, "__module__", None) or "torch")
    return module.partition(".")[0] in ("torch", "_operator", "operator", "math", "builtins") or isinstance(target, torch._ops.OpOverload)


@functools.cache
def random(name: str) -> bool:
    """Whether an operation draws random numbers."""
    if name in RANDOM or "rand" in name or name in ("dropout", "manual_seed", "seed", "set_rng_state"):
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, o).tags for o in overloads)


def _same_without(ctx: Context, claim: Claim, old: Node, new: Node) -> bool:
    """Whether ``new`` equals ``old`` when the assumption is false: the accumulator, with shares of an expert that nobody chose."""
    if old not in ctx.position or new not in ctx.position:
        return False
    if _writes_to(ctx, new, old):
        return True
    before, after = ctx.facts.get(old), ctx.facts.get(new)
    if not isinstance(after, Sum):
        return False
    if isinstance(before, Sum):
        known, base = list(before.parts), after.base is before.base
    else:
        known, base = [], (isinstance(before, Fill) and before.value == 0.0 and after.base is None) or after.base is old
    return base and after.parts[: len(known)] == tuple(known) and all(claim.covers(p) for p in after.parts[len(known) :])


def _writes_to(ctx: Context, new: Node, old: Node) -> bool:
    """Whether ``new`` is ``old`` itself behind in-place operations."""
    node = new
    while node is not old:
        call = ctx.calls.get(node)
        if call is None or not call.inplace or not isinstance(call.args[0], Node):
            return False
        node = call.args[0]
    return True


def lost_track(gm: GraphModule, assumptions: Sequence[Assumption]) -> list[Undischarged]:
    """All assumptions, if the graph holds a node that was made under one of them and that none of them knows (a copy)."""
    known = {n for a in assumptions for n in a.nodes}
    bodies = [m for m in gm.modules() if isinstance(m, GraphModule)]
    unknown = any(TAG in n.meta and n not in known for m in bodies for n in m.graph.nodes)
    here = {n for m in bodies for n in m.graph.nodes}
    elsewhere = any(not n._erased and n not in here for n in known)
    return [Undischarged(a, "Dynamo copied the graph") for a in assumptions] if unknown or elsewhere else []


def concerns_routing(assumption: Assumption) -> bool:
    """Whether the condition of an assumption is computed from expert ids."""
    from moefuse.passes.interpret import interpret

    if assumption.concerns_experts is None and assumption.graph is not None:
        assumption.concerns_experts = _concerns(interpret(assumption.graph), assumption)
    return assumption.concerns_experts is not False


def _concerns(ctx: Context, assumption: Assumption) -> bool:
    if assumption.kind == "size":
        return any(assumption.subject in unbacked_in(fake(n)) and _routed(ctx.facts.get(n)) for n in ctx.position)
    stack, seen = [assumption.subject], {assumption.subject}
    while stack:
        node = stack.pop()
        if _routed(ctx.facts.get(node)):
            return True
        new = [i for i in node.all_input_nodes if i not in seen]
        seen.update(new)
        stack.extend(new)
    return False


def _routed(fact: Any) -> bool:
    return isinstance(fact, Hit | Mask | Index | IndexMatrix) or getattr(fact, "routing", None) is not None
