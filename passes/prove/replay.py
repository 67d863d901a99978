"""Running nodes of a graph on real tensors, the body of a captured loop once for every expert that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.passes.graph.assumptions import Assumption
from moefuse.passes.graph.calls import call_of, fake
from moefuse.passes.graph.modes import entered
from moefuse.passes.infer.backward_slice import execute
from moefuse.passes.prove.guards import Guards
from moefuse.passes.prove.synthetic_inputs import Inputs


class Run:
    """What became of the nodes of one replay. ``values`` has those that ran, and copies of the leaves that they read."""

    def __init__(self, values: Inputs, leaves: dict[Node, Any], nodes: Sequence[Node] = (), bodies: Sequence[Assumption] = ()) -> None:
        self.inputs, self.leaves = values, leaves
        self.mode = values.ctx.mode[values.region.anchor]  # of what is not in the program: a replacement stands beside the anchor
        self.values: dict[Node, Any] = {}
        self.guards = Guards(bodies, nodes, self.values)

    def value(self, node: Node) -> Any:
        """The value of a node now; an assignment by index has that of its target."""
        if node_writes(node) and node not in self.leaves:
            return self.value(node.args[0])  # type: ignore[arg-type]
        if node in self.values:
            return self.values[node]
        now = self.inputs.ctx.now(node)
        if now is not node and now in self.leaves:
            return self.value(now)
        if node in self.leaves or self.guards.jump(node, self.value):
            given = self.leaves[node]
            self.values[node] = given.clone() if isinstance(given, torch.Tensor) else given
            return self.values[node]
        return self.inputs.weight(node)

    def run(self, node: Node) -> None:
        """Run one node, unless its value was given."""
        if node in self.leaves or self.inputs.ctx.now(node) in self.leaves or self.guards.jump(node, self.value):
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.value)
        call = call_of(node)
        if call is not None and call.name == "bincount" and len(args) == 1:
            # All iterations of a captured loop are here, each with an element of its own; a run leaves out the last ones without tokens.
            least: Any = kwargs.get("minlength", 0)
            kwargs = {**kwargs, "minlength": max(least, self.inputs.region.all_experts)}
        if call is not None and call.name == "dropout":
            self.values[node] = args[0]  # what the original draws, no replacement draws: both are compared without
            return
        with entered(self.inputs.ctx.mode.get(node, self.mode)):
            self.values[node] = execute(node, args, kwargs, self.value, self.inputs.older)

    def changed(self) -> list[Node]:
        """Leaves that do not hold what was given any more."""
        given = ((n, v) for n, v in self.leaves.items() if isinstance(v, torch.Tensor) and n in self.values)
        return [n for n, v in given if not torch.equal(self.values[n], v)]


def replay(nodes: Sequence[Node], values: Inputs, leaves: dict[Node, Any], bodies: Sequence[Assumption] = ()) -> Run:
    """Execute nodes in order on real tensors, the body of a loop once for every expert it stands for, what is guarded if that holds."""
    run = Run(values, leaves, nodes, bodies)
    for step in _steps(nodes, bodies, values):
        if isinstance(step, Node):
            run.run(step)
        else:
            run.values.update(step(run.values))
    return run


def _steps(
    nodes: Sequence[Node], bodies: Sequence[Assumption], values: Inputs
) -> Iterator[Node | Callable[[dict[Node, Any]], dict[Node, Any]]]:
    """Nodes in the order to run them, and what to set in between: the number of an expert, and what its turn carries over to the next."""
    done: set[Node] = set()
    body_of = {node: body for body in reversed(bodies) if body.row_node is not None for node in body.nodes}
    for node in nodes:
        body = body_of.get(node)
        if body is None:
            yield node
        elif node not in done:
            inside = [n for n in nodes if n in body.nodes]
            done.update(inside)
            for member in body.members:
                yield functools.partial(_set_row, body, member, values)
                yield from inside
                yield functools.partial(_carry, body)
            yield functools.partial(_set_row, body, body.row, values)


def _set_row(body: Assumption, member: int, values: Inputs, env: dict[Node, Any]) -> dict[Node, Any]:
    assert body.row_node is not None
    own = {node: values.weight(same[member]) for node, same in body.siblings.items()}
    return own | {body.row_node: torch.full_like(fake_zeros(body.row_node), member)}


def _carry(body: Assumption, env: dict[Node, Any]) -> dict[Node, Any]:
    return {old: env[new] for _, old, new in body.carried if new in env}


def fake_zeros(node: Node) -> torch.Tensor:
    """A real tensor of a node's shape, dtype and device."""
    value = fake(node)
    return torch.zeros(tuple(value.shape), dtype=value.dtype, device=value.device)


def node_writes(node: Node) -> bool:
    """Whether a node is an assignment by index, whose result is its target."""
    call = call_of(node)
    return call is not None and call.name == "setitem"
