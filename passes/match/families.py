"""What belongs to one layer, also behind an operation that no rule reads: its routings, those of masks of the same ids, and losses.

A loss says where routing information ended, and a sum is refused for what is missing in it. The second is only true where it does not come
of the first, so a reader is told one of them: that which comes first in the program, of the experts or slots that the sum is without.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch.fx import Node

from moefuse.passes.graph.calls import tensor
from moefuse.passes.graph.named import placed
from moefuse.passes.graph.op_classes import METADATA
from moefuse.passes.infer.state import Context
from moefuse.passes.ir.expr import has_linear
from moefuse.passes.ir.facts import Lost, Many, Mask, Part, Routing, Rows, Sum, Table, Weight
from moefuse.passes.match.unexplained import weights_of

_FAR = 64
"""So many operations are looked at on the way back to a routing."""
_ADDS = frozenset(("add", "sub", "index_add", "index_put", "setitem", "sum", "scatter_add"))
Pair = tuple[int | None, int | None]
"""An expert and a slot; None for all of them."""


class Families:
    """The routings of a graph by the ids that they are made of. Made once the graph is interpreted."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.known: dict[Node, Routing] = {}
        for fact in ctx.facts.values():
            routing = None if isinstance(fact, Weight) else routing_in(fact)
            if routing is not None and (routing.node not in self.known or routing.whole):
                self.known[routing.node] = routing
        self.choices = {n for ids in self.known for n in ids.all_input_nodes if tensor(n) is None}

    def of(self, routing: Routing) -> Routing:
        """The one routing that stands for all of those ids: a mask with fewer slots has them of another one."""
        routing = self.known.get(routing.node, routing)
        for _ in range(_FAR):
            above = next((r for _, r in self._behind(routing.node)), None)
            if above is None:
                break
            routing = above
        return routing

    def around(self, node: Node) -> Routing | None:
        """The routing of the nearest values that an operation is computed from."""
        found = next((r for _, r in self._behind(node, floats=True)), None)
        # Any integers may take rows of a stack; where nothing else says so, they are ids.
        weight = found is None and next((f for n in node.all_input_nodes if isinstance(f := self.ctx.facts.get(n), Weight)), None)
        return self.of(found) if found is not None else weight.routing if weight else None

    def pairs(self, node: Node) -> set[Pair]:
        """Whose rows an operation reads, as far as the nearest values of which that is known say it."""
        out: set[Pair] = set()
        for fact in self._nearest(node):
            for item in fact.items if isinstance(fact, Many) else (fact,):
                domain = getattr(item, "domain", None) or getattr(item, "selection", None) or item
                out.add((getattr(domain, "expert", None), getattr(domain, "slot", None)))
        return {(None if e is None else int(e), slot) for e, slot in out} - {(None, None)}

    def lost_of_others(self, routing: Routing, have: Collection[Pair]) -> Lost | None:
        """The first loss among rows of experts (or slots) that a sum is without."""
        family = self.of(routing)
        for node, fact in self.ctx.facts.items():
            if isinstance(fact, Lost) and self.around(node) is family and self.are_others(node, have):
                return fact
        return None

    def are_others(self, node: Node, have: Collection[Pair]) -> bool:
        """Whether an operation reads rows of an expert (or a slot) that is not among some."""
        by_expert, by_slot = {e for e, _ in have} - {None}, {s for _, s in have} - {None}
        return any(
            (e is not None and bool(by_expert) and e not in by_expert) or (s is not None and bool(by_slot) and s not in by_slot)
            for e, s in self.pairs(node)
        )

    def unread(self, routing: Routing, anchor: Node) -> Node | None:
        """The first operation on the way from ids to a sum over experts whose result nothing is known of: what no rule reads."""
        ctx, family = self.ctx, self.of(routing)
        behind = self._leading_to(_ahead(ctx, anchor)[0])
        computed = set[Node]()  # what experts gave, and what comes of it: nobody is chosen by that
        for node in sorted(behind, key=ctx.position.__getitem__):
            call = ctx.calls.get(node)
            if ctx.position[node] > ctx.position[routing.node] and (weights_of(ctx, node) or not computed.isdisjoint(node.all_input_nodes)):
                computed.add(node)
            if call is None or ctx.facts.get(node) is not None or call.targets or node in computed:
                continue
            for source in node.all_input_nodes:
                fact = ctx.facts.get(source)
                root = getattr(fact, "root", None)
                found = routing_in(fact) or self.known.get(root if isinstance(root, Node) else source)
                if found is not None and self.of(found) is family and not isinstance(fact, Rows | Sum | Weight):
                    return node
        return None

    def elsewhere(self, routing: Routing, lost: Lost) -> Lost | None:
        """The refusal of a sum that is said to be without experts (or slots) whose rows are computed all the same; None for any other."""
        ctx, have, family = self.ctx, lost.details.get("have", ()), self.of(routing)
        slots = {s for _, s in have} - {None}
        behind = _ahead(ctx, lost.node)[1]
        call = None if behind is None else ctx.calls[behind]
        for node, fact in ctx.facts.items() if have else ():
            own = routing_in(fact) if isinstance(fact, Mask | Table | Rows) else None
            if own is None or self.of(own) is not family:
                continue
            expert, slot = (fact.domain.expert, fact.domain.slot) if isinstance(fact, Rows) else (fact.expert, getattr(fact, "slot", None))
            if slots and slot not in slots and isinstance(fact, Rows) and has_linear(fact.expr):
                return ctx.lost("experts-differ", lost.node, expert="?", detail="for another slot of a token they are computed otherwise")
            other = not slots and expert is not None and (int(expert), slot) not in have
            if other and behind is not None and call is not None and self._meet(behind, node):
                return ctx.lost("sum-changed", behind, op=call.name)
        return None

    def _meet(self, one: Node, other: Node) -> bool:
        """Whether something is computed from both of two values, with writes to the same memory."""
        found = [self._from(one), self._from(other)]
        return any(n for n in found[0] & found[1] if self.ctx.calls.get(n) is not None)

    def _from(self, start: Node) -> set[Node]:
        seen, stack = {start}, [start]
        while stack:
            node = stack.pop()
            written = list(self.ctx.memory.targets.get(node, ()))
            aliases = [a for t in written for a in self.ctx.aliases.get(self.ctx.storage[t], ())]
            for n in (*node.users, *(u for a in aliases for u in a.users if self.ctx.position.get(u, -1) > self.ctx.position[node])):
                if n not in seen and n in self.ctx.position:
                    seen.add(n)
                    stack.append(n)
        return seen

    def _leading_to(self, anchor: Node) -> set[Node]:
        """Everything that a value is computed from, writes to the same memory included."""
        ctx, last = self.ctx, self.ctx.position[anchor]
        seen: set[Node] = set()
        stack = [anchor]
        while stack:
            node = stack.pop()
            if node in seen or node not in ctx.calls:
                continue
            seen.add(node)
            stack += node.all_input_nodes
            for name in ctx.memory.storages(node):
                stack += [w for w in ctx.writes.get(name, ()) if ctx.position[w] <= last]
        return seen

    def _behind(self, start: Node, *, floats: bool = False) -> Iterator[tuple[Node, Routing]]:
        """Routings, the nearest first, that a value is computed from: through what no rule reads, and not through a choice."""
        seen, queue = {start}, deque([start])
        while queue and len(seen) < _FAR:
            node = queue.popleft()
            fact = self.ctx.facts.get(node)
            found = self.known.get(node) or (None if isinstance(fact, Weight) else routing_in(fact))
            if found is not None and node is not start:
                yield node, found
                continue
            if self.ctx.calls.get(node) is None or node in self.choices:
                continue
            for source in node.all_input_nodes:
                value = tensor(source)
                counted = value is None or not value.is_floating_point() or isinstance(self.ctx.facts.get(source), Mask | Table)
                if source not in seen and (floats or counted):
                    seen.add(source)
                    queue.append(source)

    def _nearest(self, start: Node) -> Iterator[Any]:
        seen, queue = {start}, deque([start])
        while queue and len(seen) < _FAR:
            node = queue.popleft()
            fact = self.ctx.facts.get(node)
            if node is not start and fact is not None and not isinstance(fact, Weight) and routing_in(fact) is not None:
                yield fact
                continue
            if self.ctx.calls.get(node) is not None and node not in self.choices:
                fresh = [n for n in node.all_input_nodes if n not in seen]
                seen.update(fresh)
                queue += fresh


def routing_in(fact: Any) -> Routing | None:
    """The routing that a fact is about."""
    for item in () if fact is None else fact.items if isinstance(fact, Many) else (fact,):
        for holder in (item, *(getattr(item, name, None) for name in ("domain", "selection", "order"))):
            found = getattr(holder, "routing", None)
            if isinstance(found, Routing):
                return found
    return None


def apart(ctx: Context, families: Families, routing: Routing, one: Lost, other: Lost) -> Lost | None:
    """The operation that a sum over some experts or slots goes through before it meets one over others; None where there is none.

    Each of the two is refused for what the other one has.
    """
    if one.code != "missing-experts" or other.code != "missing-experts":
        return None
    found = (_ahead(ctx, lost.node)[1] for lost in (other, one))
    node = next((node for node in found if node is not None), None)
    call = None if node is None else ctx.calls[node]
    return None if node is None or call is None else ctx.lost("sum-changed", node, op=call.name)


def _ahead(ctx: Context, node: Node) -> tuple[Node, Node | None]:
    """(the last operation that adds something to a sum, the one behind it): where it is the only thing that is done with the sum."""
    for _ in range(_FAR):
        aliases = ctx.aliases.get(ctx.storage[node], (node,))
        after = {
            n for alias in aliases for n in alias.users if ctx.position.get(n, -1) > ctx.position[node] and ctx.calls.get(n) is not None
        }
        call = ctx.calls[first] if (first := min(after, key=ctx.position.__getitem__, default=None)) is not None else None
        if first is None or call is None or call.name not in _ADDS:
            return node, first if call is not None and call.name not in METADATA else None
        node = first
    return node, None


def masks_differ(ctx: Context, parts: Sequence[Part], anchor: Node) -> Lost:
    """The refusal of a sum whose experts take their tokens by different masks, or routers."""
    routings = {p: p.rows.domain.routing for p in parts if p.rows.domain.routing is not None and has_linear(p.rows.expr)}
    families = Families(ctx)
    if len({id(families.of(r)) for r in routings.values()}) > 1:
        return ctx.lost("experts-differ", anchor, expert="?", detail="some have their rows from one routing, and some from another")
    counts = Counter(map(id, routings.values()))
    usual, times = counts.most_common(1)[0]
    odd = next(p for p, r in routings.items() if id(r) != usual) if times > 1 else list(routings)[1]
    mine, theirs = routings[odd], next(r for r in routings.values() if id(r) == usual)
    own, usual_mask = _mask(mine, theirs), _mask(theirs, mine)
    how = "" if usual_mask is None else f", also where {placed(usual_mask, anchor)} does not allow it"
    how = how if own is None else f", where {placed(own, anchor)} allows it"
    than = "the others" if times > 1 else "the first one"
    detail = f"expert {int(odd.rows.domain.expert or 0)} takes its tokens by another mask than {than}{how}"
    return ctx.lost("tokens-differ", anchor, detail=detail)


def _mask(mine: Routing, theirs: Routing) -> Node | None:
    """What a routing has in front of the ids that another one has not."""
    if mine.valid is not None and mine.valid is not theirs.valid:
        return mine.valid
    return mine.node if not mine.whole and mine.node is not theirs.node else None


__all__ = ["Families", "apart", "masks_differ", "routing_in"]
