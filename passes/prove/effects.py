"""What a graph does besides its result, before and after a rewrite: the last check before the graph is compiled.

Two things must stay as they were. The *effects*, in their order: writes to storage that outlives the graph, random draws, operators whose
effects nobody knows. And what everyone left in the graph *finds*: each reads the same version of each storage as before, where the last
version that a region made is its replacement.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from moefuse.passes.graph.calls import fake
from moefuse.passes.graph.named import named, wrote
from moefuse.passes.graph.op_classes import ASSERTS, MODES, SIZE_QUERIES, draws
from moefuse.passes.graph.sharded import is_gathered
from moefuse.passes.graph.siblings import keep
from moefuse.passes.infer.state import Context, Standin
from moefuse.passes.match.liveness import plain_value, pure, users_own


class EffectsDifferError(Exception):
    """A rewritten graph that does something else than the graph it was made from."""

    def __init__(self, node: Node, detail: str) -> None:
        super().__init__(detail)
        self.node, self.detail = node, detail


@dataclass(frozen=True)
class Effects:
    """Effects of a graph in order, and the inputs of every node that reads a storage which is written to."""

    order: tuple[Node, ...]
    reads: dict[Node, tuple[Node, ...]]


def effects(ctx: Context) -> Effects:
    """The effects of the graph as it is; before anything is rewritten."""
    reads = {}
    for node in ctx.graph.nodes:
        found = tuple(i for i in node.all_input_nodes if any(name in ctx.writes for name in ctx.memory.storages(i)))
        if found:
            reads[node] = found
    return Effects(tuple(n for n in ctx.graph.nodes if _has_effect(ctx, n)), reads)


def _has_effect(ctx: Context, node: Node) -> bool:
    call = ctx.calls[node]
    if call is None:
        return node.op == "call_module"
    if call.name in SIZE_QUERIES or call.name in ASSERTS or call.name in MODES or node.target is keep:
        return False
    if is_gathered(node):
        return False  # other ranks take part in it, and what it is for is its result
    if draws(call):
        return True
    if any(ctx.memory.outlives(name) for t in call.targets for name in ctx.memory.storages(t)):
        return True
    if users_own(node):
        return bool(call.targets) or not pure(ctx, node)
    # What a method of something else than a tensor does (an event, a stream), nobody knows.
    return (node.is_impure() and not call.targets) or any(not plain_value(fake(i)) for i in node.all_input_nodes if fake(i) is not None)


def compare(ctx: Context, before: Effects) -> None:
    """Compare the graph as it is now with its effects before. The dropouts of a region are in its replacement, on other rows.

    Raises:
        EffectsDifferError: an effect is gone or out of order, or a node finds something else in memory than it did.
    """
    left = set(ctx.graph.nodes)
    redrawn = {n for gone in ctx.results.values() for n in gone.nodes if (call := ctx.calls[n]) is not None and call.name == "dropout"}
    before = Effects(tuple(n for n in before.order if n not in redrawn), before.reads)
    after = [n for n in ctx.graph.nodes if n in set(before.order)]
    for was, now in zip(before.order, (*after, None), strict=False):
        if was is not now:
            raise EffectsDifferError(was, "is gone" if was not in left else "happens in another order")
    _Reader(ctx, before).run(ctx.graph)


class _Reader:
    """Walks the new graph and knows, for each storage, the version that a reader finds there.

    ``cuts``: storages of which a region made the last version so far, and that version. ``carried``: its replacement, and views of that.
    """

    def __init__(self, ctx: Context, before: Effects) -> None:
        self.ctx, self.before = ctx, before
        self.last: dict[Node, Node | None] = {}
        self.cuts: dict[Node, Node] = {}
        self.carried: set[Node] = set()

    def run(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node in self.ctx.results:
                self._cut(node)
            elif node in self.ctx.position:
                self._check(node)
                self._follow(node)

    def _cut(self, result: Node) -> None:
        """From here on ``result`` is what the nodes that are gone had made."""
        gone, memory = self.ctx.results[result], self.ctx.memory
        self._check_base(gone)
        self.carried.add(result)
        for holder in gone.holders:
            for name in memory.storages(holder):
                mine = [w for w in memory.writes.get(name, ()) if w in gone.nodes]
                if mine:
                    self.cuts[name] = self.last[name] = mine[-1]

    def _check_base(self, gone: Standin) -> None:
        """What is in the base now is what those that added to it found there, but for what they had written themselves."""
        memory = self.ctx.memory
        for name in memory.storages(gone.base) if gone.base is not None else ():
            for add in gone.adds:
                expected = memory.version(name, add)
                reads = any(name in memory.storages(i) for i in self.before.reads.get(add, ()))
                if reads and expected not in gone.adds and self.last.get(name) is not expected:
                    lost = "what was there before" if expected is None else wrote(expected)
                    raise EffectsDifferError(add, f"would not add to {lost}")

    def _check(self, node: Node) -> None:
        now = set(node.all_input_nodes)
        for source in self.before.reads.get(node, ()):
            for name in self.ctx.memory.storages(source):
                if name in self.cuts and source in now and source not in self.carried:
                    raise EffectsDifferError(node, f"would not find the experts' result in {named(source)}")
                expected = self.ctx.memory.version(name, node)
                if self.last.get(name) is not expected:
                    lost = "what was there before" if expected is None else wrote(expected)
                    raise EffectsDifferError(node, f"would not find {lost} in {named(source)}")

    def _follow(self, node: Node) -> None:
        memory = self.ctx.memory
        for target in memory.targets[node]:
            for name in memory.storages(target):
                self.last[name] = node
        if any(i in self.carried and memory.storage[i] is memory.storage[node] for i in node.all_input_nodes):
            self.carried.add(node)
