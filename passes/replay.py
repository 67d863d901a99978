"""Running nodes of a graph on real tensors, the body of a captured loop once for every expert that it stands for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from moefuse.capture.assumptions import Assumption
from moefuse.passes.ops import call_of, call_target, fake
from moefuse.passes.synthetic import Inputs


def replay(nodes: Sequence[Node], values: Inputs, leaves: dict[Node, Any], result: Node, bodies: Sequence[Assumption] = ()) -> torch.Tensor:
    """Execute nodes in order on real tensors, the body of a loop once for every expert it stands for."""
    env: dict[Node, Any] = {}

    def value(node: Node) -> Any:
        if node in env:
            return env[node]
        first = values.first(node)
        if first in leaves and node not in leaves:
            return value(first)
        if node in leaves:
            env[node] = leaves[node].clone() if isinstance(leaves[node], torch.Tensor) else leaves[node]
            return env[node]
        return values.weight(node)

    def run(node: Node) -> None:
        if node in leaves:
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), value)
        call = call_of(node)
        if call is not None and any(t not in env for t in call.targets):
            raise ValueError(f"{node.name} would write to a tensor of the user's")
        if call is not None and call.name == "bincount" and len(args) == 1:
            # All iterations of a captured loop are here, each with an element of its own; a run leaves out the last ones without tokens.
            least: Any = kwargs.get("minlength", 0)
            kwargs = {**kwargs, "minlength": max(least, values.region.all_experts)}
        env[node] = call_target(node, args, kwargs)

    for step in _steps(nodes, bodies, values):
        if isinstance(step, Node):
            run(step)
        else:
            env.update(step(env))
    if node_writes(result):
        return value(result.args[0])  # type: ignore[arg-type, no-any-return]
    return env[result]  # type: ignore[no-any-return]


def _steps(
    nodes: Sequence[Node], bodies: Sequence[Assumption], values: Inputs
) -> Iterator[Node | Callable[[dict[Node, Any]], dict[Node, Any]]]:
    """Nodes in the order to run them, and what to set in between: the number of an expert, and what its turn carries over to the next."""
    done: set[Node] = set()
    for node in nodes:
        body = next((b for b in bodies if node in b.nodes), None)
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
