"""Memory of a graph: which values share storage, who writes to it, and which version of it each reader finds.

What shares storage is read from the example values: two values alias if their tensors are views of one allocation, however they came to be.
A value that torch recorded nothing about may be anything that its node was given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from moefuse import _torch_private
from moefuse.passes.graph.values import fake, tensors_in
from moefuse.passes.graph.writes import returns_input, written


class Memory:
    """Storages, their writes and versions.

    Attributes:
        storage: for each node the first node with its storage, which names it. A tuple of tensors that do not share one has a name of its
            own, and so has what is no tensor.
        aliases: a storage's name -> all nodes with that storage, in the order of the program.
        targets: for each node the tensors among its arguments that it writes to.
        writes: a storage's name -> the nodes that write to it, in order. Each makes a new version of it.
        reshaped: storages of tensors whose sizes or strides change in place: what torch recorded is true of their last version only.
    """

    def __init__(self, graph: Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.storage: dict[Node, Node] = {}
        self.aliases: dict[Node, list[Node]] = {}
        self.writes: dict[Node, list[Node]] = {}
        self.reshaped: set[Node] = set()
        self._parent: dict[int, int] = {}
        self._keys: dict[Node, frozenset[int]] = {}
        self._names: dict[int, Node] = {}
        self.targets = {node: written(node) for node in graph.nodes}
        for node in graph.nodes:
            self._keys[node] = self._read(node)
        self._join_hidden(graph)
        for node in graph.nodes:
            self._place(node)
        for node, targets in self.targets.items():
            for name in dict.fromkeys(n for t in targets for n in self.storages(t)):
                self.writes.setdefault(name, []).append(node)
            if targets and _reshapes(node):
                self.reshaped.update(n for t in targets for n in self.storages(t))

    def storages(self, node: Node) -> tuple[Node, ...]:
        """The names of all storages that a node's tensors have."""
        keys = {self._find(k) for k in self._keys.get(node, ())}
        return tuple(dict.fromkeys(self._names[k] for k in keys if k in self._names)) or (self.storage.get(node, node),)

    def introduce(self, node: Node, like: Node | None = None) -> None:
        """A node that a rewrite put in: a tensor of its own, or with the storage of ``like``."""
        self.storage[node] = node if like is None else self.storage[like]
        self.targets[node] = ()
        self._keys[node] = frozenset() if like is None else self._keys[like]

    def outlives(self, name: Node) -> bool:
        """Whether a storage is there before the graph runs and after it: an input, a parameter, a buffer."""
        return name.op in ("placeholder", "get_attr")

    def version(self, name: Node, reader: Node) -> Node | None:
        """The write that made what ``reader`` finds in a storage; None for what was there first."""
        writes = self.writes.get(name, ())
        count = bisect_left(writes, self.position[reader], key=self.position.__getitem__)
        return writes[count - 1] if count else None

    def read(self, reader: Node) -> dict[Node, Node | None]:
        """The version of every storage that a node can read, of those that are written to anywhere."""
        names = {name for source in reader.all_input_nodes for name in self.storages(source) if name in self.writes}
        return {name: self.version(name, reader) for name in names}

    def written_between(self, node: Node, first: Node, last: Node) -> Node | None:
        """A write to a storage of ``node`` after ``first`` and before ``last``, if there is one."""
        low, high = self.position[first], self.position[last]
        for name in self.storages(node):
            writes = self.writes.get(name, ())
            at = bisect_right(writes, low, key=self.position.__getitem__)
            if at < len(writes) and self.position[writes[at]] < high:
                return writes[at]
        return None

    def written_behind(self, node: Node, place: Node) -> Node | None:
        """The first write to a storage of ``node`` behind ``place``, if there is one."""
        writes = [w for name in self.storages(node) for w in self.writes.get(name, ()) if self.position[w] > self.position[place]]
        return min(writes, key=self.position.__getitem__, default=None)

    def _read(self, node: Node) -> frozenset[int]:
        value = _attribute(node) if node.op == "get_attr" and fake(node) is None else fake(node)
        keys = frozenset(_torch_private.storage_key(t) for t in tensors_in(value))
        unknown = value is None and node.op in ("call_function", "call_method", "call_module") and node.users and not _modes(node)
        return self._joined(k for i in node.all_input_nodes for k in self._keys[i]) if unknown else keys

    def _join_hidden(self, graph: Graph) -> None:
        """Results that are their input in truth, where torch recorded a copy: Dynamo traces with decompositions, which copy more.

        Only what is written to is asked, since nobody can tell a tensor from a copy before one of them is.
        """
        changed = {k for node in graph.nodes for t in self.targets[node] for k in self._keys[t]}
        for node in graph.nodes if changed else ():
            given = {k for i in node.all_input_nodes for k in self._keys[i]}
            own = self._keys[node]
            if own and given and own.isdisjoint(given) and not changed.isdisjoint(own | given) and not self.targets[node]:
                shared = returns_input(node)
                if shared is None or shared & given:
                    self._joined((*own, *(given if shared is None else shared & given)))

    def _place(self, node: Node) -> None:
        keys = {self._find(k) for k in self._keys[node]}
        targets = self.targets[node] if not keys and fake(node) is None else ()
        if len(keys) == 1:
            name = self._names.setdefault(next(iter(keys)), node)
        elif targets:  # an assignment by index: its result is its target
            name = self.storage[targets[0]]
        else:
            name = node
        self.storage[node] = name
        self.aliases.setdefault(name, []).append(node)

    def _joined(self, keys: Iterable[int]) -> frozenset[int]:
        """Storages of which nobody can tell which is which, as one."""
        first: int | None = None
        for key in keys:
            first = self._find(key) if first is None else first
            self._parent[self._find(key)] = first
        return frozenset(() if first is None else (first,))

    def _find(self, key: int) -> int:
        while (parent := self._parent.get(key, key)) != key:
            key = parent
        return key


def _attribute(node: Node) -> object:
    """The real value of an attribute of the graph's module; None if it has none of that name."""
    owner: object = node.graph.owning_module
    for name in str(node.target).split("."):
        owner = getattr(owner, name, None)
    return owner


def _modes(node: Node) -> bool:
    """Whether a node's result is a guard object of a mode or context that a later node takes back, and no tensor."""
    return all(not isinstance(fake(i), torch.Tensor) for i in node.all_input_nodes)


def _reshapes(node: Node) -> bool:
    """Whether a write changes sizes, strides or the storage itself."""
    target = node.target
    if isinstance(target, _torch_private.OpOverload):
        return torch.Tag.inplace_view in target.tags
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    if not isinstance(packet, _torch_private.OpOverloadPacket):
        return False
    return any(torch.Tag.inplace_view in getattr(packet, o).tags for o in packet.overloads())
