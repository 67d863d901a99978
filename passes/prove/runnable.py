"""A graph as a module that runs by itself, on tensors of its own, with the loops that capture traced once written out for every expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of, fake
from moefuse.passes.graph.op_classes import ASSERTS
from moefuse.passes.prove.synthetic_inputs import hint

_CHECKPOINT = frozenset(("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"))
"""Arguments of a checkpoint that are not its body's."""


@dataclasses.dataclass(frozen=True)
class ModuleState:
    """A graph and what its module holds under each name."""

    graph: Graph
    attributes: Mapping[str, Any]


class Runnable:
    """Copies of a graph and of the graphs inside it.

    Args:
        states: for every graph module what it was when it is to be copied.
        copy: makes the copy of a tensor that a module holds under a name.
        assumptions: those under which the graphs were traced, in terms of their nodes.

    Attributes:
        nodes: node -> its copy; of a loop's body the copy that runs last.
        tensors, reals: the copies of tensors that the modules hold, by their names; and these.
    """

    def __init__(
        self,
        states: Mapping[GraphModule, ModuleState],
        copy: Callable[[torch.Tensor, str], torch.Tensor],
        assumptions: Sequence[Assumption] = (),
    ) -> None:
        self._states, self._copy, self._assumptions = states, copy, assumptions
        self._made: dict[GraphModule, GraphModule] = {}
        self.nodes: dict[Node, Node] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.reals: dict[str, torch.Tensor] = {}

    def make(self, module: GraphModule) -> GraphModule:
        """The copy of a module."""
        if module not in self._made:
            state = self._states[module]
            graph, nodes = written_out(state.graph, self._assumptions)
            self.nodes |= nodes
            for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint):
                node.target, node.kwargs = _body, {k: v for k, v in node.kwargs.items() if k not in _CHECKPOINT}
            root = {str(n.target): self._attribute(state, str(n.target)) for n in graph.nodes if n.op in ("get_attr", "call_module")}
            self._made[module] = GraphModule(root, graph)
        return self._made[module]

    def _attribute(self, state: ModuleState, target: str) -> Any:
        first, *rest = target.split(".")
        value = state.attributes[first]
        for name in rest:
            value = getattr(value, name)
        if isinstance(value, GraphModule) and value in self._states:
            return self.make(value)
        if not isinstance(value, torch.Tensor):
            return value
        if target not in self.tensors:
            self.tensors[target], self.reals[target] = self._copy(value, target), value
        return self.tensors[target]


def _body(body: GraphModule, *args: Any, **kwargs: Any) -> Any:
    """What a checkpoint computes. Outside of a compiler its operator runs the body again in the backward pass, writes included."""
    return body(*args, **kwargs)


def translated(a: Assumption, nodes: Mapping[Node, Node]) -> Assumption:
    """An assumption about a graph as one about its copy."""

    def other(value: Any) -> Any:
        return nodes.get(value, value) if isinstance(value, Node) else value

    return dataclasses.replace(
        a,
        subject=other(a.subject),
        row_node=other(a.row_node),
        siblings={other(n): {m: other(s) for m, s in same.items()} for n, same in a.siblings.items()},
        nodes=set(map(other, a.nodes)),
        returned=other(a.returned),
        carried=[(name, other(old), other(new)) for name, old, new in a.carried],
    )


def written_out(graph: Graph, assumptions: Sequence[Assumption] = ()) -> tuple[Graph, dict[Node, Node]]:
    """A copy of a graph that runs as it stands, and its nodes: the body of a captured loop comes once for every expert."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    body_of = {n: a for a in reversed(assumptions) if a.row_node is not None for n in a.nodes if n in place}
    least = {a.subject: a.row for a in assumptions if a.kind == "length"}
    new, nodes, done = Graph(), dict[Node, Node](), set[Node]()

    def copied(node: Node) -> None:
        call = call_of(node)
        if call is not None and call.name in ASSERTS and assumptions and not node.users:
            return  # of sizes that are not zero where the program, unlike its graph, runs the body
        made = nodes[node] = new.node_copy(node, nodes.__getitem__)
        if node in least and call is not None and call.name == "bincount" and len(call.args) == 1:
            made.kwargs = {**made.kwargs, "minlength": least[node]}  # elements without tokens are in the graph too

    def begun(body: Assumption, member: int, own: dict[Node, dict[int, Node]]) -> None:
        nodes[body.row_node] = _number(new, body.row_node, member)  # type: ignore[index, arg-type]
        nodes.update({n: same[member] for n, same in own.items()})

    for node in graph.nodes:
        body = body_of.get(node)
        if body is None:
            copied(node)
        elif node not in done:
            inside = _with_sizes(body, place, body_of)
            done.update(inside)
            own = {n: {m: nodes[s] for m, s in same.items()} for n, same in body.siblings.items()}
            for member in body.members:
                begun(body, member, own)
                for n in inside:
                    copied(n)
                nodes.update({old: nodes[n] for _, old, n in body.carried if isinstance(old, Node) and n in nodes})
            begun(body, body.row, own)
    return new, nodes


def _with_sizes(body: Assumption, place: Mapping[Node, int], body_of: Mapping[Node, Assumption]) -> list[Node]:
    """The nodes of a body in order, with those between them that read them: sizes, which Dynamo asks for outside of the program."""
    order = list(place)
    inside = {n for n in body.nodes if n in place}
    first, last = min(map(place.__getitem__, inside)), max(map(place.__getitem__, inside))
    for node in order[first:last]:
        if body_of.get(node, body) is body and not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    return sorted(inside, key=place.__getitem__)


def _number(graph: Graph, row: Node, member: int) -> Node:
    """The number of an expert, as the tensor that a loop has in its place."""
    value = fake(row)
    shape = [int(hint(s)) for s in value.shape]
    return graph.call_function(torch.full, (shape, member), {"dtype": value.dtype, "device": value.device})
