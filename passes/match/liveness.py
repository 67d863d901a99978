"""Which nodes anything needs: the result of the graph, or an effect of it. What has no effect and no reader is dead."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from moefuse import _torch_private
from moefuse.passes.graph.calls import Call, fake
from moefuse.passes.graph.op_classes import ASSERTS, MODES, SIZE_QUERIES, draws
from moefuse.passes.graph.sharded import is_gathered
from moefuse.passes.graph.symbols import unbacked_in
from moefuse.passes.graph.writes import known_function
from moefuse.passes.infer.state import Context
from moefuse.passes.match.promises import about_data, promised, settled


def live(ctx: Context) -> set[Node]:
    """Nodes that the result of the graph, or an effect of it, needs."""
    # Steps of torch.func (``levels``) depend on each other in ways that no argument shows.
    roots = [n for n in ctx.graph.nodes if n in ctx.levels or n.op in ("placeholder", "output", "call_module") or _effect(ctx, n)]
    asserts = [n for n in ctx.graph.nodes if about_data(ctx, n)]
    writes = [n for n in ctx.graph.nodes if (call := ctx.calls.get(n)) is not None and call.inplace and n not in roots]
    found: set[Node] = set()
    while roots:
        _reach(found, roots)
        sizes = {s for n in found if n.op != "output" for s in unbacked_in(fake(n))}
        roots = [n for n in asserts if n not in found and any(unbacked_in(fake(i)) & sizes for i in n.all_input_nodes)]
        roots += [w for w in writes if w not in found and any(a in found for a in _written(ctx, w))]
    return found


def _written(ctx: Context, write: Node) -> list[Node]:
    """Everything that may show what a write leaves: the aliases of its target, or the fused op's result in its place."""
    names = {name for t in ctx.memory.targets[write] for name in ctx.memory.storages(t)}
    return [*(a for name in names for a in ctx.aliases.get(name, ())), *_put_in(ctx, write, names)]


def _put_in(ctx: Context, write: Node, names: set[Node]) -> list[Node]:
    """New nodes that a write goes to, perhaps through views: ``result.detach().mul_(2)``."""
    found, stack, seen = [], list(write.all_input_nodes), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in ctx.position:
            found.append(node)
        elif not names.isdisjoint(ctx.memory.storages(node)):
            stack.extend(node.all_input_nodes)
    return found


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
    if about_data(ctx, node):
        return promised(ctx, node)
    if call.name in ASSERTS and settled(node):
        return True
    if call.inplace and not users_own(node) and not draws(call):
        return any(ctx.memory.outlives(name) for t in call.targets for name in ctx.memory.storages(t))
    return call.name not in SIZE_QUERIES and not pure(ctx, node)


def users_own(node: Node) -> bool:
    """Whether an operator is not torch's own: what it does besides its writes is not known."""
    target = node.target
    foreign = getattr(target, "namespace", "aten") not in ("aten", "prims") or not known_function(target)
    return isinstance(target, _torch_private.HigherOrderOperator) or foreign


def unread(ctx: Context) -> list[Node]:
    """Nodes without effect that nothing reads but other such nodes, in the order of the program."""
    found: dict[Node, None] = {}
    for node in reversed(ctx.graph.nodes):
        if node.op in ("call_function", "call_method") and all(u in found for u in node.users) and pure(ctx, node):
            found[node] = None
    return list(reversed(found))


def pure(ctx: Context, node: Node) -> bool:
    """Whether a node is a function of its arguments and nothing else, as far as torch says."""
    return node.op == "get_attr" or is_pure(ctx.calls.get(node), node)


def is_pure(call: Call | None, node: Node) -> bool:
    """Whether a node that is a call has no effect but its result."""
    if call is None or call.inplace or call.name in MODES or call.name in ASSERTS or draws(call):
        return False
    if isinstance(node.target, _torch_private.HigherOrderOperator) or not plain_value(fake(node)):
        return False
    return node.op == "call_method" or (known_function(node.target) and (is_gathered(node) or not node.is_impure()))


def plain_value(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(plain_value, value))
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool | bool | int | float)
