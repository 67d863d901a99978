"""The state of one abstract interpretation: facts of nodes, storage aliases, writes, and where in the program each node stands."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.fx import Graph, Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of, fake, tensor
from moefuse.passes.graph.levels import levels
from moefuse.passes.graph.modes import modes
from moefuse.passes.graph.op_classes import CONDITIONS, SAME_NUMBER
from moefuse.passes.graph.sizes import same_shape, shape_of, size_of
from moefuse.passes.graph.storage import Memory
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.infer.symbolic_sizes import Known
from moefuse.passes.ir.axes import fresh
from moefuse.passes.ir.facts import Combined, Lost, Part, Routing, RowNumber, Sum, View

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Standin:
    """What a node of a rewrite stands for: whoever read ``holders`` reads it now, and the writes among ``nodes`` are made by it.

    ``base``: what it adds to, as ``adds`` did one after another.
    """

    holders: tuple[Node, ...]
    nodes: frozenset[Node]
    base: Node | None = None
    adds: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Given:
    """What capture says of the graph that it traced.

    Attributes:
        rows: representatives' numbers, and the experts that each stands for.
        siblings: of representatives that have their weights from lists of modules: the assumption that tells the lists.
        not_empty: numbers of rows that are not zero.
        skipped: what the program computes for experts with tokens only.
        by_row: of that, what it computes in a loop over experts with tokens.
        packed: quantised weights may be multiplied as they are held.
    """

    rows: Mapping[Node, tuple[int, ...]] = field(default_factory=dict)
    siblings: Mapping[Node, Assumption] = field(default_factory=dict)
    not_empty: Collection[Any] = ()
    skipped: frozenset[Node] = frozenset()
    packed: bool = True
    by_row: frozenset[Node] = frozenset()


class Context:
    """What is known about the nodes of one graph, while it is interpreted and while its regions are replaced.

    Attributes:
        graph, calls, position, mode, levels: the graph as it was, each node as a canonical operation, where it stands, and in which modes.
        first: for each node the first one that is the same view or condition; those that a loop writes again are one.
        memory, storage, aliases, writes: who shares memory with whom, and who writes to it (``Memory``).
        given: what capture says of the graph.
        facts: what rules found; a write takes back what it makes wrong. ``finished``: sums that a write ended.
        segments: for each node that puts experts' rows where they belong among all slots: whose.
        sentinels: for each routing the ids that the program compares with, of experts that it does not have.
        sizes: what is known of sizes that only the run knows.
        replaced, results: what took the place of a node, and what each result of a rewrite stands for.
    """

    def __init__(self, graph: Graph, given: Given | None = None) -> None:
        self.graph = graph
        self.given = given or Given()
        self.memory = Memory(graph)
        self.position, self.storage = self.memory.position, self.memory.storage
        self.aliases, self.writes = self.memory.aliases, self.memory.writes
        self.calls = {node: call_of(node, self.memory.targets[node]) for node in graph.nodes}
        self.mode, self.levels = modes(self.calls), levels(graph)
        self.facts: dict[Node, Any] = {}
        self.finished: dict[int, tuple[Any, list[Node]]] = {}
        self.segments: dict[Node, tuple[Part, ...]] = {}
        self.sentinels: dict[Routing, set[int]] = {}
        self.sizes: Known = {}
        self.first: dict[Node, Node] = {}
        self.replaced: dict[Node, Node] = {}
        self.results: dict[Node, Standin] = {}
        self._scratch: dict[type, Any] = {}
        self._same_values()

    def scratch(self, kind: type[T]) -> T:
        """The notes of one rule about this graph, made on demand: a class of the rule's own, without arguments."""
        if kind not in self._scratch:
            self._scratch[kind] = kind()
        return self._scratch[kind]  # type: ignore[no-any-return]

    def _same_values(self) -> None:
        """Views that are written again for every expert (``W.view(E, I, H)`` in a loop) are one view; so are conditions (``w > 0``)."""
        seen: dict[Any, Node] = {}
        for node, call in self.calls.items():
            self.first[node] = node
            if call is None or call.inplace:
                continue
            if self.storage[node] is not node:
                version: Any = self.memory.version(self.storage[node], node)
            elif call.name in CONDITIONS and node not in self.writes and (known := tensor(node)) is not None and known.dtype == torch.bool:
                version = list(self.memory.read(node).items())
            else:
                continue
            args = torch.fx.node.map_arg((call.args, call.kwargs), lambda n: self.first[n])
            self.first[node] = seen.setdefault(f"{call.name} {args} {version}", node)

    def now(self, node: Node) -> Node:
        """The node that gives a value in the graph as it is now: of equal views the first, or the result that took its place."""
        first = self.first.get(node, node)
        return self.replaced.get(first, first)

    def view(self, value: object) -> View | None:
        """The plain view of a tensor node: its fact if that is a View, the node itself if it has no fact, else None."""
        if not isinstance(value, Node):
            return None
        fact = self.facts.get(value)
        if isinstance(fact, View):
            return fact
        known = tensor(value)
        if not isinstance(fact, Combined | Lost | None) or known is None or self.storage.get(value) in self.memory.reshaped:
            return None
        return View(fresh(shape_of(known)), self.first.get(value, value))

    def fact(self, value: object) -> Any:
        """The fact of a value: what a rule found, else the plain view of a tensor, else None. What was lost, or is complete, is plain."""
        if not isinstance(value, Node):
            return None
        found = self.facts.get(value)
        return self.view(value) if isinstance(found, Combined | Lost | None) else found

    def same_tensor(self, a: Node, b: Node) -> bool:
        """Whether two nodes show the same elements of one memory in the same shape (``contiguous``, a cast to the same dtype)."""
        first, second = tensor(a), tensor(b)
        if self.storage.get(a) is not self.storage.get(b) or first is None or second is None:
            return False
        return shows_the_same(first, second)

    def number(self, value: object) -> int | None:
        """The value of an integer tensor of one element that was made from constants alone (a row that capture handed out)."""
        known = getattr(tensor(value), "constant", None)
        if not isinstance(known, torch.Tensor) or known.numel() != 1 or known.dtype.is_floating_point or known.dtype == torch.bool:
            return None
        if isinstance(value, Node) and self.storage[value] in self.writes:
            return None
        row = self._row(value) if self.given.rows else None
        return int(known) if row is None else RowNumber(int(known), row)

    def _row(self, value: Any) -> Node | None:
        """The row that a value is, unchanged."""
        while value not in self.given.rows:
            call = self.calls.get(value)
            if call is None or call.name not in SAME_NUMBER or (call.name == "getitem" and call.args[1] not in (0, (0,))):
                return None
            value = call.args[0]
        return value  # type: ignore[no-any-return]

    def members(self, expert: int) -> tuple[int, ...]:
        """The experts that a number stands for: itself, or those that capture traced one representative of."""
        return self.given.rows[expert.row] if isinstance(expert, RowNumber) else (int(expert),)

    @functools.cached_property
    def made_by(self) -> dict[Any, Node]:
        """For each size that only the run knows: the first node that has it."""
        found: dict[Any, Node] = {}
        for node in self.position:
            for symbol in unbacked_in(fake(node)):
                found.setdefault(symbol, node)
        return found

    def by_row(self) -> set[Node]:
        """Everything computed from a representative's row."""
        found = set(self.given.rows)
        for node in self.graph.nodes if found else ():
            if any(i in found for i in node.all_input_nodes):
                found.add(node)
        return found

    def forget(self, node: Node) -> None:
        """A write changed a node's value. A sum that was complete before stays known: the region ended there."""
        fact = self.facts.pop(node, None)
        if isinstance(fact, Combined | Sum):
            self.finished.setdefault(id(fact), (fact, []))[1].append(node)

    def written_between(self, node: Node, first: Node, last: Node) -> Node | None:
        """A write to the storage of ``node`` after ``first`` and before ``last``, if there is one."""
        return self.memory.written_between(node, first, last)

    def lost(self, code: str, node: Node, **details: Any) -> Lost:
        """A refusal at ``node``; where torch.func transforms it, that says more than what it is."""
        return Lost("transformed", node, {"name": self.levels[node]}) if node in self.levels else Lost(code, node, details)


class ComputedDimError(TypeError):
    """A dimension that no rule reads: the graph computes it (a size that only the run knows), or it is one of a tensor without any."""


def shows_the_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one memory have the same elements in the same shape."""
    if a.dtype != b.dtype or a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():
        return False
    # As expressions: comparing the sizes themselves would add a guard.
    mine, theirs = ([size_of(s) for s in (*t.stride(), t.storage_offset())] for t in (a, b))
    return same_shape(shape_of(a), shape_of(b)) and same_shape(mine, theirs)


def normalize(dim: Any, rank: int) -> int:
    """A dimension counted from the front.

    Raises:
        ComputedDimError: it is not the number of a dimension.
    """
    if not isinstance(dim, int) or not -rank <= dim < rank:
        raise ComputedDimError(dim)
    return dim + rank if dim < 0 else dim


def out_shape(node: Node) -> tuple[Any, ...]:
    """The sizes of a node's (fake) result; empty for a non-tensor."""
    value = tensor(node)
    return () if value is None else shape_of(value)


def as_size(value: object) -> Any:
    """A size given as an int, a SymInt or a node holding one; None if unknown."""
    if isinstance(value, Node):
        value = fake(value)
    return None if value is None or isinstance(value, torch.Tensor) else size_of(value)
