"""The state of one abstract interpretation: facts of nodes, storage aliases, writes, and where in the program each node stands."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node

from moefuse._dynamo.values import unbacked_in
from moefuse.capture.assumptions import Assumption
from moefuse.passes.graph.calls import Call, call_of, fake, tensor
from moefuse.passes.graph.levels import levels
from moefuse.passes.graph.op_classes import INDICES_ALONG, MODES, SAME_NUMBER, SCORES, VALUES_AND_INDICES
from moefuse.passes.graph.sizes import shape_of, size_of
from moefuse.passes.graph.storage import Memory
from moefuse.passes.infer.ranges import Interval, distinct, interval
from moefuse.passes.infer.symbolic_sizes import Known
from moefuse.passes.ir.axes import Atom, fresh
from moefuse.passes.ir.facts import Combined, Lost, Part, Routing, RowNumber, Sum, View


@dataclass(frozen=True, eq=False)
class Standin:
    """What a node of a rewrite stands for: whoever read ``holders`` reads it now, and the writes among ``nodes`` are made by it.

    ``base``: what it adds to, as ``adds`` did one after another.
    """

    holders: tuple[Node, ...]
    nodes: frozenset[Node]
    base: Node | None = None
    adds: tuple[Node, ...] = ()


class Context:
    """Facts about the nodes of one graph. ``facts`` holds what rules found; everything else is derived from the graph once."""

    def __init__(self, graph: Graph, rows: Mapping[Node, tuple[int, ...]] | None = None) -> None:
        self.graph = graph
        self.rows = dict(rows or {})
        self.siblings: dict[Node, Assumption] = {}
        self.not_empty: set[Any] = set()
        self.facts: dict[Node, Any] = {}
        self.memory = Memory(graph)
        self.position, self.storage = self.memory.position, self.memory.storage
        self.aliases, self.writes = self.memory.aliases, self.memory.writes
        self.calls: dict[Node, Call | None] = {}
        self.made: dict[Node, Any] = {}
        self.mode: dict[Node, tuple[bool, tuple[str, ...]]] = {}
        self.routings: dict[Node, Routing] = {}
        self.derived: dict[tuple[Routing, tuple[str, ...], int], Routing] = {}
        self.erasable: set[Node] = set()
        self.results: dict[Node, Standin] = {}
        self.sentinels: dict[Routing, set[int]] = {}
        self.ranges: dict[Node, Interval | None] = {}
        self.segments: dict[Node, tuple[Part, ...]] = {}
        self.queues: dict[Node, Routing] = {}
        self.chosen: dict[Node, Node] = {}
        self.told: set[Node] = set()
        self.parts: dict[Node, tuple[Node, Routing]] = {}
        self.strangers: dict[Node, Node] = {}
        self.strange_experts: dict[Node, dict[Node, set[Node]]] = {}
        self.kept: dict[tuple[Node, bool], Routing] = {}
        self.filled: dict[int, tuple[Any, Any]] = {}
        self.sizes: Known = {}
        self.first: dict[Node, Node] = {}
        self.replaced: dict[Node, Node] = {}
        self.finished: dict[int, tuple[Any, list[Node]]] = {}
        self.levels = levels(graph)
        self._scan()
        self._same_views()

    def _scan(self) -> None:
        grad: bool = torch.is_grad_enabled()
        casts: tuple[str, ...] = ()
        for node in self.graph.nodes:
            call = call_of(node, self.memory.targets[node])
            self.calls[node] = call
            if call is not None and call.name in MODES:
                grad, casts = _switched(call, grad, casts)
            self.mode[node] = (grad, casts)

    def _same_views(self) -> None:
        """Views that are written again for every expert (``W.view(E, I, H)`` in a loop) are one view."""
        seen: dict[Any, Node] = {}
        for node, call in self.calls.items():
            self.first[node] = node
            if call is None or self.storage[node] is node or call.inplace:
                continue
            args = torch.fx.node.map_arg((call.args, call.kwargs), lambda n: self.first[n])
            self.first[node] = seen.setdefault(f"{call.name} {args} {self.memory.version(self.storage[node], node)}", node)

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

    def number(self, value: object) -> int | None:
        """The value of an integer tensor of one element that was made from constants alone (a row that capture handed out)."""
        known = getattr(tensor(value), "constant", None)
        if not isinstance(known, torch.Tensor) or known.numel() != 1 or known.dtype.is_floating_point or known.dtype == torch.bool:
            return None
        if isinstance(value, Node) and self.storage[value] in self.writes:
            return None
        row = self._row(value) if self.rows else None
        return int(known) if row is None else RowNumber(int(known), row)

    def _row(self, value: Any) -> Node | None:
        """The row that a value is, unchanged."""
        while value not in self.rows:
            call = self.calls.get(value)
            if call is None or call.name not in SAME_NUMBER or (call.name == "getitem" and call.args[1] not in (0, (0,))):
                return None
            value = call.args[0]
        return value  # type: ignore[no-any-return]

    def members(self, expert: int) -> tuple[int, ...]:
        """The experts that a number stands for: itself, or those that capture traced one representative of."""
        return self.rows[expert.row] if isinstance(expert, RowNumber) else (int(expert),)

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
        found = set(self.rows)
        for node in self.graph.nodes if found else ():
            if any(i in found for i in node.all_input_nodes):
                found.add(node)
        return found

    def forget(self, node: Node) -> None:
        """A write changed a node's value. A sum that was complete before stays known: the region ended there."""
        fact = self.facts.pop(node, None)
        if isinstance(fact, Combined | Sum):
            self.finished.setdefault(id(fact), (fact, []))[1].append(node)

    def routing(self, ids: View) -> Routing | None:
        """The routing that an integer view belongs to; one object per tensor of ids."""
        root = ids.root
        if root in self.routings:
            return self.routings[root]
        value = tensor(root)
        if value is None or value.dtype not in (torch.int64, torch.int32):
            return None
        dims = self.root_atoms(ids)
        if dims is None:
            return None
        slots = len(dims) > 1 and not self._one_for_each(root)
        if slots and not isinstance(dims[-1].size, int):
            return None
        tokens = tuple(a.size for a in (dims[:-1] if slots else dims))
        top_k = int(dims[-1].size) if slots else 1
        found = Routing(root, tokens, top_k, slots, distinct=top_k == 1 or distinct(self, root), bounds=interval(self, root))
        self.routings[root] = found
        return found

    def shared_routing(self, routing: Routing, more: tuple[Any, ...]) -> Routing:
        """The routing of tokens [*tokens, *more], where all with the same first numbers go where ``routing`` says; one object for each."""
        return self._with_tokens(routing, (*routing.tokens, *more), more)

    def split_routing(self, routing: Routing, tokens: tuple[Any, ...]) -> Routing:
        """The same routing with its tokens in so many dimensions; one object for each."""
        return self._with_tokens(routing, tokens, routing.shared)

    def _with_tokens(self, routing: Routing, tokens: tuple[Any, ...], shared: tuple[Any, ...]) -> Routing:
        key = (routing, tuple(map(str, tokens)), len(shared))
        return self.derived.setdefault(key, replace(routing, tokens=tokens, shared=shared))

    def root_atoms(self, view: View) -> tuple[Atom, ...] | None:
        """The dimensions a view's root is taken apart into (all of them, also those the view no longer shows)."""
        shown = {a.index: a for axis in view.axes for a in axis if a.kind == "d"}
        value = tensor(view.root)
        if value is None:
            return None
        own = shape_of(value)
        if all(i < len(own) and a.size == own[i] for i, a in shown.items()):
            return tuple(Atom("d", i, s) for i, s in enumerate(own))
        return tuple(shown[i] for i in sorted(shown))

    def from_topk(self, node: Node) -> bool:
        """Whether ids are the indices of a top-k or of a part of a sorted dimension, and so distinct within a token."""
        call = self._chosen_by(node)
        return call is not None and call.name in ("topk", "sort", "argsort") and _last_dim(call)

    def _one_for_each(self, node: Node) -> bool:
        """Whether ids are the best of the scores that a projection gives each [..., features] row: then all their dimensions count tokens.

        (Behind a reshape of the projection the last one may count heads, each with a choice of its own.)
        """
        call = self._chosen_by(node)
        if call is None or call.name not in ("argmax", "argmin", "max", "min") or not _last_dim(call):
            return False
        place = 2  # of keepdim among the arguments
        if call.kwargs.get("keepdim", len(call.args) > place and call.args[place]):
            return False
        scores: Any = call.args[0]
        while (source := self.calls.get(scores)) is not None and source.name in SCORES and source.args and not source.inplace:
            scores = source.args[0]
        return source is not None and source.name == "linear"

    def positions(self, node: Node) -> int | None:
        """How many positions indices choose among: each is from 0 to one less than that."""
        call = self._chosen_by(node)
        scores = tensor(call.args[0]) if call is not None and call.args else None
        dim = dim_of(call) if call is not None else None
        if scores is None or not isinstance(dim, int) or not scores.dim():
            return None
        size = scores.shape[dim]
        return size if isinstance(size, int) else None

    def _chosen_by(self, node: Node) -> Call | None:
        """The operation whose indices along a dimension ids are, perhaps only some of them."""
        call = self.calls.get(node)
        while call is not None and call.name == "getitem" and _is_slice(call.args[1]):
            call = self.calls.get(call.args[0])
        if call is not None and call.name == "getitem" and call.args[1] == 1:
            source = self.calls.get(call.args[0])
            return source if source is not None and source.name in VALUES_AND_INDICES else None
        return call if call is not None and call.name in ("argsort", "argmax", "argmin") else None

    def written_between(self, node: Node, first: Node, last: Node) -> Node | None:
        """A write to the storage of ``node`` after ``first`` and before ``last``, if there is one."""
        return self.memory.written_between(node, first, last)

    def lost(self, code: str, node: Node, **details: Any) -> Lost:
        """A refusal at ``node``."""
        return Lost(code, node, details)


def _is_slice(index: object) -> bool:
    items = index if isinstance(index, tuple) else (index,)
    return all(isinstance(item, slice) or item is Ellipsis for item in items)


def dim_of(call: Call) -> Any:
    """The dimension that a top-k, sort or maximum goes along; None where it is not one dimension."""
    place, default = INDICES_ALONG[call.name]
    return call.kwargs.get("dim", call.args[place] if len(call.args) > place else default)


def _last_dim(call: Call) -> bool:
    """Whether it is the last one."""
    dim, value = dim_of(call), tensor(call.args[0])
    return isinstance(dim, int) and value is not None and dim in (-1, value.dim() - 1)


def _switched(call: Call, grad: bool, casts: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """Grad mode and autocast contexts after a switch."""
    if call.name == "_set_grad_enabled":
        return bool(call.args[0]), casts
    if call.name.startswith("_exit"):
        return grad, casts[:-1]
    return grad, (*casts, str(call.args))


class ComputedDimError(TypeError):
    """A dimension that no rule reads: the graph computes it (a size that only the run knows), or it is one of a tensor without any."""


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
