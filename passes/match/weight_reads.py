"""Who reads gathered weights of spread experts, after all is fused: layers, or penalties, norms and statistics, which no token comes to.

A statistic is what an operation sums a weight up to: one number, or one for each expert. Where weights are divided by their norm and then
multiplied with tokens, they come to the tokens themselves, and that is a layer. So is what cannot be told.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import call_of, location, module_path
from moefuse.passes.graph.op_classes import LOOKS_AT, METADATA
from moefuse.passes.graph.sharded import sweep
from moefuse.passes.graph.storage import Memory
from moefuse.passes.graph.values import fake, tensors_in
from moefuse.passes.ir.facts import Lost
from moefuse.report.quietly import quietly
from moefuse.runtime import pieces
from moefuse.runtime.groups import Terms

NOTE = "experts-gathered at {place}, but by no layer: no token comes there to these weights, which are gathered from all ranks in each call"


def gathered(gm: GraphModule, told: set[str]) -> tuple[list[Lost], list[str]]:
    """Of a graph in which everything is fused that can be, who reads gathered weights: (of layers, notes on what is none).

    Args:
        told: the modules of which it is known; those that are found are added.
    """
    left = [call for call in sweep(gm.graph) if Terms.parse(call.args[-1]).transport != "gather"]  # type: ignore[arg-type]
    if not left:
        return [], []
    find = quietly(Readers, gm.graph, _torch_private.ends_frame(gm) and not pieces.inside(), otherwise=None)
    lost, notes = [], dict[str, None]()
    for call in left:
        readers = sorted(call.users, key=lambda n: not location(n))
        of_layers = readers if find is None else quietly(find.of_layers, call, readers, otherwise=readers)
        if not of_layers:
            notes |= dict.fromkeys(NOTE.format(place=place) for n in readers if (place := location(n) or module_path(n)))
        elif module_path(of_layers[0]) not in told:
            told.add(module_path(of_layers[0]))
            lost.append(Lost("experts-gathered", of_layers[0], {"detail": "nothing was fused that reads them"}))
    return lost, list(notes)


class Readers:
    """What reads gathered weights in one graph.

    Args:
        ends: whether what the graph returns goes to the user, and to no layer that is running in pieces.
    """

    def __init__(self, graph: Graph, ends: bool) -> None:
        self._memory, self._ends = Memory(graph), ends
        self._alone: dict[Node, bool] = {}
        mixed: set[Node] = set()
        for node in graph.nodes:
            self._alone[node] = self._is_alone(node, mixed)
            if not all(self._alone[n] for n in _read(node)):
                mixed.update(name for target in self._memory.targets[node] for name in self._memory.storages(target))

    def of_layers(self, weights: Node, readers: Sequence[Node]) -> list[Node]:
        """Those from which gathered weights come to tokens, or to where nobody sees."""
        return [reader for reader in readers if self._comes_to_tokens(weights, reader)]

    def _is_alone(self, node: Node, mixed: set[Node]) -> bool:
        """Whether a value is the model's, made of such values alone, or a single number: no tokens."""
        value = fake(node)
        if value is not None and not any(t.dim() for t in tensors_in(value)):
            return True
        if node.op in ("placeholder", "get_attr"):
            return node.op == "get_attr" or isinstance(value, torch.nn.Parameter) or _torch_private.has_static_address(node)
        return all(self._alone[n] and mixed.isdisjoint(self._memory.storages(n)) for n in _read(node))

    def _comes_to_tokens(self, weights: Node, reader: Node) -> bool:
        experts = next(iter(_shapes(weights)))[0]
        seen, ahead = {weights}, [(weights, reader)]
        while ahead:
            source, user = ahead.pop()
            if user.op == "output" and not self._ends:
                return True
            if user.op == "output" or user in seen or source not in _read(user) or _asks_for_sizes(user):
                continue
            if not all(self._alone[n] for n in _read(user)) or not seen.issuperset(self._memory.targets[user]):
                return True
            if not self._sums_up(source, user, experts):
                seen.add(user)
                ahead += [(user, after) for after in user.users]
        return False

    def _sums_up(self, source: Node, user: Node, experts: float) -> bool:
        """Whether an operation makes one number of a weight's elements, or one for each expert; not whether it takes a single one out."""
        made, whole = _shapes(user), _shapes(source)
        shares = not set(self._memory.storages(user)).isdisjoint(self._memory.storages(source))
        if not made or not whole or shares or _selects(source, user):
            return False
        one_each = all([n for n in shape if n != 1] in ([], [experts]) for shape in made)
        return one_each and max(map(math.prod, made)) < max(map(math.prod, whole))


def _read(node: Node) -> list[Node]:
    """The inputs of a node whose elements it reads, and not their shapes alone."""
    call = call_of(node)
    at = LOOKS_AT.get(call.name, ()) if call is not None else ()
    looked = {n for i in at if call is not None and i < len(call.args) and isinstance(n := call.args[i], Node)}
    return [n for n in node.all_input_nodes if n not in looked]


def _asks_for_sizes(node: Node) -> bool:
    call = call_of(node)
    return call is not None and call.name in METADATA and next(tensors_in(fake(node)), None) is None


def _selects(source: Node, node: Node) -> bool:
    """Whether an operation may take elements out as they are: by an index, or where a condition holds."""
    others = (t.dtype for n in node.all_input_nodes if n is not source for t in tensors_in(fake(n)))
    return node.target is operator.getitem or any(not (dtype.is_floating_point or dtype.is_complex) for dtype in others)


def _shapes(node: Node) -> list[tuple[float, ...]]:
    """Of a node's tensors; sizes that only the run knows are infinite."""
    return [tuple(n if isinstance(n, int) else math.inf for n in t.shape) for t in tensors_in(fake(node))]
